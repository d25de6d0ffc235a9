"""Heads that come with the package, each for one model and no other."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from windfall.records import InputError

if TYPE_CHECKING:
    from windfall.target import Target

FOLDER = Path(__file__).parent.parent / "weights"  # a folder for each head
FINGERPRINT = "windfall_target"  # key of its config.json
STRIDE = 64  # numbers of each matrix that are looked at


def shipped_folder(target: Target) -> Path:
    """The folder of the head that was made for this very model."""
    from windfall.heads.files import read_config

    for config in sorted(FOLDER.glob("*/config.json")):
        wanted = read_config(config.parent, config.parent.name).get(FINGERPRINT, {})
        own = shape(target)
        if own == {key: wanted.get(key) for key in own} and fingerprint(target)["weights"] == wanted.get("weights"):
            return config.parent
    raise InputError(f"there is no head for {target.name}; train one with `windfall train head` or give --drafter PATH")


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
