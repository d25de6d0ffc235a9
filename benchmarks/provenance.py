"""Prints and saves the result of a benchmark with its command, machine, versions and date."""

from __future__ import annotations

import json
import platform
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

import windfall
from windfall.bench.paths import shorten
from windfall.engine.profiling import machine


def publish(result: dict[str, Any], file: str | None) -> None:
    """Print a result with its command, machine, versions and date; save it as JSON if a file is given."""
    script = f"benchmarks/{Path(sys.argv[0]).name}"
    about = {
        "command": " ".join(["python", script, *map(shorten, sys.argv[1:])]),
        "machine": {"architecture": platform.machine(), **machine(torch.device("cpu"))},
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "windfall": windfall.__version__,
        },
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    text = json.dumps({**result, **about}, indent=2)
    print(text)
    if file:
        Path(file).write_text(text + "\n", "utf-8")
