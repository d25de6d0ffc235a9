"""The drafters bundled with the package, each made for one target model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from windfall.core.files import WEIGHTS, parse_json
from windfall.kernels.packed import weights_of

if TYPE_CHECKING:
    from windfall.model.target import Target

TARGET = "windfall_target"  # key of a drafter's config.json: the name, sizes and fingerprint of its target
BORROWS = "windfall_borrows"  # key of a small language model's config.json: what it borrows from its target
FOLDER = WEIGHTS  # it has a folder for each drafter
HASHED_NUMBERS = 64  # of each matrix
HASH_BEFORE_PACKING = "windfall_hash"  # attribute of a model whose numbers have lost their signs by rounding to zero


def bundled_head(target: Target) -> Path | None:
    """The folder of the draft head made for this model, if there is one."""
    return _find(target, small=False)


def bundled_lm(target: Target) -> Path | None:
    """The folder of the small language model made for this model, if there is one."""
    return _find(target, small=True)


def _find(target: Target, small: bool) -> Path | None:
    own, weights = shape(target), None
    for file in sorted(FOLDER.glob("*/config.json")):
        config = json.loads(file.read_text("utf-8"))
        wanted = config.get(TARGET, {})
        if (BORROWS in config) != small or own != {key: wanted.get(key) for key in own}:
            continue
        try:
            weights = weights or fingerprint(target)["weights"]
        except NotImplementedError:  # tensors of some quantisation libraries do not show their numbers
            return None
        if weights == wanted.get("weights"):
            return file.parent
    return None


def made_for(folder: Path, target: Target) -> bool | None:
    """Whether the drafter in a folder was made for this model; None if its files do not say.

    The config.json of a trained drafter names its target, and so does job.json in the folder above.
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
    """A model's sizes and a hash of its weights, which is the same in every precision."""
    before = getattr(target.model, HASH_BEFORE_PACKING, None)
    return {**shape(target), "weights": before or hash_of(weights_of(target.model))}


def hash_of(parameters: Any) -> str:
    """A hash of the signs of some numbers of each matrix, which do not change with the precision."""
    digest = hashlib.sha256()
    for parameter in parameters:
        if parameter.dim() < 2:
            continue
        flat = parameter.detach().reshape(-1)
        places = torch.arange(HASHED_NUMBERS, device=flat.device) * (flat.numel() // HASHED_NUMBERS + 1) % flat.numel()
        digest.update(bytes(torch.signbit(flat[places]).cpu().tolist()))
    return digest.hexdigest()[:16]
