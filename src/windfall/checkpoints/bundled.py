"""Drafters that come with the package, each for one model and no other."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from windfall.core.files import WEIGHTS, parse_json

if TYPE_CHECKING:
    from windfall.model.target import Target

TARGET = "windfall_target"  # key of a drafter's config.json: the name, sizes and fingerprint of its target
BORROWS = "windfall_borrows"  # likewise, of a small language model: what it takes from its target
FOLDER = WEIGHTS  # a folder for each
STRIDE = 64  # numbers of each matrix that are looked at


def bundled_head(target: Target) -> Path | None:
    """The folder of the draft head that was made for this very model."""
    return _find(target, small=False)


def bundled_lm(target: Target) -> Path | None:
    """The folder of the small language model that was made for this very model."""
    return _find(target, small=True)


def _find(target: Target, small: bool) -> Path | None:
    own, weights = shape(target), None
    for file in sorted(FOLDER.glob("*/config.json")):
        config = json.loads(file.read_text("utf-8"))
        wanted = config.get(TARGET, {})
        if (BORROWS in config) != small or own != {key: wanted.get(key) for key in own}:
            continue
        weights = weights or fingerprint(target)["weights"]
        if weights == wanted.get("weights"):
            return file.parent
    return None


def made_for(folder: Path, target: Target) -> bool | None:
    """Whether the drafter in a folder was made for this very model; None: its files do not say.

    A trained drafter says so in its config.json; the job.json of its training, in the folder above, does too.
    """
    said = _target_in(folder / "config.json", TARGET) or _target_in(folder.parent / "job.json", "target")
    if said is None:
        return None
    own = shape(target)
    same = all(said.get(key, size) == size for key, size in own.items())
    return same and said["weights"] == fingerprint(target)["weights"]


def _target_in(file: Path, key: str) -> dict[str, Any] | None:
    """The fingerprint of a target in a JSON file, if it holds one."""
    try:
        found = parse_json(file.read_text("utf-8"))[key]
        return found if isinstance(found, dict) and "weights" in found else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def shape(target: Target) -> dict[str, int]:
    config = target.decoder.config
    return {"vocab_size": target.vocab_size, "hidden_size": config.hidden_size, "layers": config.num_hidden_layers}


@torch.no_grad()
def fingerprint(target: Target) -> dict[str, Any]:
    """A model's sizes and a hash of its weights, the same in every precision."""
    return {**shape(target), "weights": hash_of(target.model.parameters())}


def hash_of(parameters: Any) -> str:
    """Of the signs of some numbers of each matrix, which rounding to another precision leaves alone."""
    digest = hashlib.sha256()
    for parameter in parameters:
        if parameter.dim() < 2:
            continue
        flat = parameter.detach().reshape(-1)
        places = torch.arange(STRIDE, device=flat.device) * (flat.numel() // STRIDE + 1) % flat.numel()
        digest.update(bytes(torch.signbit(flat[places]).cpu().tolist()))
    return digest.hexdigest()[:16]
