"""The files of a draft head: found, read strictly, written as a whole. Every defect is named in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from windfall.checkpoints.hub import HUB_ID, cached, fetch
from windfall.checkpoints.model_dir import check_weight_files, readable, weight_files
from windfall.core.files import make_folder, replace_file, replace_text
from windfall.core.types import InputError

CONFIG, WEIGHTS = "config.json", "model.safetensors"
BEST = "best"  # where `windfall train head` and `train lm` keep the best drafter, in their output folder


def locate(source: str | os.PathLike[str]) -> Path:
    """The folder of a head, given by its path or hub id."""
    text = os.fspath(source)
    folder = find(text)
    if folder is None:
        raise InputError(f"there is no folder '{text}', and a head is a folder or a hub id")
    return folder


def find(text: str) -> Path | None:
    """The folder of this path or hub id, downloaded if need be; None where it can be neither."""
    path = Path(os.path.expanduser(text))
    if path.is_dir():
        return trained(path)
    local = path.is_absolute() or text.startswith((".", "~")) or (path.parent.parts and path.parent.is_dir())
    if path.exists() or local:
        return None
    return (cached(text) or fetch(text, code=False)) if HUB_ID.fullmatch(text) else None


def trained(folder: Path) -> Path:
    """The best drafter in the output folder of a training; any other folder itself."""
    best = folder / BEST
    return best if (best / CONFIG).is_file() and not (folder / CONFIG).exists() else folder


def read_config(folder: Path, label: str) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise InputError(f"'{label}' has no config.json: it is not the folder of a head")
    with readable(f"cannot read the config.json of '{label}'", label):
        found = json.loads((folder / CONFIG).read_text("utf-8"))
    if not isinstance(found, dict):
        raise InputError(f"the config.json of '{label}' must be a JSON object, not a {type(found).__name__}")
    return found


def read_tensors(folder: Path, label: str) -> dict[str, Tensor]:
    """All tensors of a folder under the names they have there; pickled code never runs."""
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
    """The names of a folder's tensors, without reading them; none if they cannot be read."""
    names: set[str] = set()
    try:
        for file in weight_files(folder):
            if file.suffix == ".safetensors":
                with safe_open(str(file), framework="pt") as opened:
                    names.update(opened.keys())
            else:
                names.update(_unpickle(file, "meta"))
    except Exception:  # whoever reads the weights themselves will say what is wrong
        return set()
    return names


def _unpickle(file: Path, device: str) -> dict[str, Tensor]:
    with open(file, "rb") as opened:
        zipped = opened.read(2) == b"PK"  # older files cannot be mapped
    found = torch.load(file, map_location=device, weights_only=True, mmap=zipped)
    if not isinstance(found, dict):
        raise InputError(f"'{file}' is not a table of tensors")
    return found


def write_folder(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor], weights: str = WEIGHTS) -> None:
    """Each file as a whole, the config last: a folder without one is no head, so that no two are ever mixed."""
    make_folder(folder)
    text = json.dumps(config, indent=2) + "\n"
    if not _holds(folder / CONFIG, text):
        (folder / CONFIG).unlink(missing_ok=True)
    replace_file(folder / weights, lambda file: save_file(tensors, file, metadata={"format": "pt"}))
    replace_text(folder / CONFIG, text)


def _holds(file: Path, text: str) -> bool:
    return file.is_file() and file.read_bytes() == text.encode()
