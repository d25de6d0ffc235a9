"""Read the tensors of a folder's weight files."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from windfall.checkpoints.model_dir import check_weight_files, readable, weight_files
from windfall.core.errors import InputError


def read_tensors(folder: Path, label: str) -> dict[str, Tensor]:
    """All tensors of a folder under their names in the files; pickled code never runs."""
    check_weight_files(folder, label)
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        with readable(f"cannot read '{file}'", label):
            tensors |= load_file(file) if file.suffix == ".safetensors" else _unpickle(file, "cpu")
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"'{label}' holds something else than tensors: {name} is a {type(tensor).__name__}")
    return tensors


def tensor_names(folder: Path) -> set[str]:
    """The names of a folder's tensors, without reading them; empty if the files cannot be read."""
    names: set[str] = set()
    try:
        for file in weight_files(folder):
            if file.suffix == ".safetensors":
                with safe_open(str(file), framework="pt") as opened:
                    names.update(opened.keys())
            else:
                names.update(_unpickle(file, "meta"))
    except Exception:  # `read_tensors` reports what is wrong
        return set()
    return names


def _unpickle(file: Path, device: str) -> dict[str, Tensor]:
    with open(file, "rb") as opened:
        zipped = opened.read(2) == b"PK"  # older files cannot be memory-mapped
    found = torch.load(file, map_location=device, weights_only=True, mmap=zipped)
    if not isinstance(found, dict):
        raise InputError(f"'{file}' is not a table of tensors")
    return found
