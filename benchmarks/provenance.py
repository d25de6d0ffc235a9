"""Prints and saves the result of a benchmark with its command, machine, versions, commit and date."""

from __future__ import annotations

import json
import platform
import subprocess
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
    """Print a result with its command, machine, versions, commit and date; save it as JSON if a file is given."""
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
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    text = json.dumps({**result, **about}, indent=2)
    print(text)
    if file:
        Path(file).write_text(text + "\n", "utf-8")


def commit() -> str | None:
    """The commit of this repository, with `-changed` if files differ from it; None: unknown."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--dirty=-changed"]
    try:
        return subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
