"""Where a run comes from: versions, machine, weights, and the command without absolute paths."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shlex
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

import torch
import transformers
from torch import nn

from windfall import __version__
from windfall.bench.paths import shorten
from windfall.bench.tasks import Prompt
from windfall.drafters.base import Drafter
from windfall.engine.engine import Engine
from windfall.engine.profiling import machine
from windfall.kernels.packed import PackedLinear
from windfall.model.decoder import attention_of
from windfall.model.target import Target

HASHED_VALUES = 1024  # of each parameter, evenly spread
URL = re.compile("https?://")


def describe(
    engines: dict[str, Engine], target: Target, prompts: Sequence[Prompt], command: Sequence[str]
) -> dict[str, Any]:
    """What is needed to repeat a run."""
    return {
        **describe_client(prompts, command, target.device),
        "target": {
            "name": shorten(target.name),
            "weights": model_hash(target.model),
            "dtype": str(target.decoder.dtype).removeprefix("torch."),
            "device": target.device.type,
            "attention": attention_of(target.model),
            "exact": all(engine.exact_passes for engine in engines.values()) if engines else None,
        },
        "drafters": {label: _drafter(engine) for label, engine in engines.items()},
    }


def describe_client(
    prompts: Sequence[Prompt], command: Sequence[str], device: torch.device | None = None
) -> dict[str, Any]:
    """What is known of a run without its models: versions, this machine, the command and the prompts."""
    return {
        "command": shlex.join(word if URL.match(word) else shorten(word) for word in command),
        "date": now(),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "windfall": __version__,
        },
        "machine": machine(device or torch.device("cpu")),
        "prompts": prompts_hash(prompts),
    }


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def weights_hash(parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A hash of names, shapes and an even sample of the values; it does not depend on the device."""
    known = hashlib.sha256()
    for name, parameter in sorted(parameters, key=lambda pair: pair[0]):
        values = parameter.detach().flatten()
        known.update(f"{name} {tuple(parameter.shape)}".encode())
        known.update(values[:: max(len(values) // HASHED_VALUES, 1)].float().cpu().numpy().tobytes())
    return known.hexdigest()[:16]


def model_hash(model: nn.Module) -> str:
    """`weights_hash` of a model's weights, of packed ones as they are decoded."""
    packed = (
        (f"{name}.weight", module.weight)
        for name, module in model.named_modules()
        if isinstance(module, PackedLinear) and not module.shares
    )
    return weights_hash([*model.named_parameters(), *packed])


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    rows = [[p.task, p.category, p.id, p.turns, p.raw] for p in prompts]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def _drafter(engine: Engine) -> dict[str, Any]:
    """The class, and the weights where it is a model."""
    kind, module = type(engine.drafter), _module(engine.drafter)
    weights = None if module is None else weights_hash(module.named_parameters())
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "weights": weights}


def _module(drafter: Drafter) -> torch.nn.Module | None:
    """The network of a drafter, held directly or by an object that runs it."""
    held = [inner for value in vars(drafter).values() for inner in (value, getattr(value, "model", None))]
    return next((each for each in held if isinstance(each, torch.nn.Module)), None)
