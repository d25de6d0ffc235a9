"""The drafters bundled with the package, each made for one target model."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from windfall.core.files import WEIGHTS, parse_json
from windfall.kernels.packed import weights_of

if TYPE_CHECKING:
    from windfall.model.target import Target

TARGET = "windfall_target"  # key of a drafter's config.json: `description` of its target
BORROWS = "windfall_borrows"  # key of a small language model's config.json: what it borrows from its target
FOLDER = WEIGHTS  # it has a folder for each drafter
SIGNS = "signs"  # key of a description
SIGNS_PER_MATRIX = 64
SIGNS_BEFORE_PACKING = "windfall_signs"  # attribute of a model whose numbers have lost their signs by rounding to zero
SAME_MODEL = 0.8  # of the signs: rounding to 3 bits flips 11% of them, and an unrelated model agrees in about half


def bundled_head(target: Target) -> Path | None:
    """The folder of the draft head made for this model, if there is one."""
    return _find(target, small=False)


def bundled_lm(target: Target) -> Path | None:
    """The folder of the small language model made for this model, if there is one."""
    return _find(target, small=True)


def _find(target: Target, small: bool) -> Path | None:
    for file in sorted(FOLDER.glob("*/config.json")):
        config = _read(file)
        said = _target_in(config, TARGET)
        if said is not None and (BORROWS in config) == small and _same(said, target):
            return file.parent
    return None


def made_for(folder: Path, target: Target) -> bool | None:
    """Whether the drafter in a folder was made for this model; None if its files, or the model's numbers, do not say.

    The config.json of a trained drafter names its target, and so does job.json in the folder above.
    """
    said = _target_in(_read(folder / "config.json"), TARGET) or _target_in(_read(folder.parent / "job.json"), "target")
    return None if said is None else _same(said, target)


def _read(file: Path) -> Any:
    """What a JSON file holds; None if it cannot be read."""
    try:
        return parse_json(file.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _target_in(read: Any, key: str) -> dict[str, Any] | None:
    """What a JSON file says about a target, its signs as packed bytes; None if it says nothing."""
    try:
        found = read[key]
        signs = {SIGNS: base64.b64decode(found[SIGNS])} if SIGNS in found else {}
        return {**found, **signs} if "weights" in found else None
    except (ValueError, KeyError, TypeError):
        return None


def _same(said: dict[str, Any], target: Target) -> bool | None:
    """Whether a drafter's target is this model, perhaps rounded or trained a little further; None if it is unknown."""
    if any(said.get(key, size) != size for key, size in shape(target).items()):
        return False
    try:
        own = _signs(target)
    except NotImplementedError:  # tensors of some quantisation libraries do not show their numbers
        return None
    if SIGNS not in said:  # in a job.json, or in files of an older version
        return bool(said["weights"] == _hash(own))
    return _agreement(said[SIGNS], _packed(own)) >= SAME_MODEL


def _agreement(one: bytes, other: bytes) -> float:
    """The share of equal bits; 0 if there are not as many."""
    if len(one) != len(other) or not one:
        return 0.0
    different = int.from_bytes(one, "big") ^ int.from_bytes(other, "big")
    return 1 - different.bit_count() / (8 * len(one))


def shape(target: Target) -> dict[str, int]:
    config = target.decoder.config
    return {"vocab_size": target.vocab_size, "hidden_size": config.hidden_size, "layers": config.num_hidden_layers}


def fingerprint(target: Target) -> dict[str, Any]:
    """A model's sizes and a hash of the signs of its weights, which is the same in float32, bfloat16 and float16."""
    return {**shape(target), "weights": _hash(_signs(target))}


def description(target: Target) -> dict[str, Any]:
    """What a drafter's config.json says about its target: name, fingerprint, and the signs of weights as text."""
    text = base64.b64encode(_packed(_signs(target))).decode()
    return {"name": target.name, **fingerprint(target), SIGNS: text}


def _signs(target: Target) -> bytes:
    before: bytes | None = getattr(target.model, SIGNS_BEFORE_PACKING, None)
    return signs_of(weights_of(target.model)) if before is None else before


@torch.no_grad()
def signs_of(parameters: Iterable[Tensor]) -> bytes:
    """The signs of some numbers of each matrix, a byte (0 or 1) for each. Rounding changes only those of small ones."""
    signs = bytearray()
    for parameter in parameters:
        if parameter.dim() < 2:
            continue
        flat = parameter.detach().reshape(-1)
        step = flat.numel() // SIGNS_PER_MATRIX + 1
        places = torch.arange(SIGNS_PER_MATRIX, device=flat.device) * step % flat.numel()
        signs += bytes(torch.signbit(flat[places]).cpu().tolist())
    return bytes(signs)


def _hash(signs: bytes) -> str:
    return hashlib.sha256(signs).hexdigest()[:16]


def _packed(signs: bytes) -> bytes:
    """Eight signs in a byte."""
    return np.packbits(np.frombuffer(signs, np.uint8)).tobytes()
