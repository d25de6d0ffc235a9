"""Find the folder of a draft head, read its config.json, and write a head's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from windfall.checkpoints.hub import HUB_ID, cached, fetch
from windfall.checkpoints.model_dir import readable
from windfall.core.files import make_folder, replace_file, replace_text
from windfall.core.types import InputError

CONFIG, WEIGHTS = "config.json", "model.safetensors"
BEST = "best"  # folder of the best drafter, in the output folder of `windfall train head` and `train lm`


def locate(source: str | os.PathLike[str]) -> Path:
    """The folder of a head, given by its path or hub id."""
    text = os.fspath(source)
    folder = find(text)
    if folder is None:
        raise InputError(f"there is no folder '{text}', and a head is a folder or a hub id")
    return folder


def find(text: str) -> Path | None:
    """The folder of this path or hub id, downloaded if necessary; None if it is neither."""
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
    """The config.json of a head, as a dict."""
    if not (folder / CONFIG).is_file():
        raise InputError(f"'{label}' has no config.json: it is not the folder of a head")
    with readable(f"cannot read the config.json of '{label}'", label):
        found = json.loads((folder / CONFIG).read_text("utf-8"))
    if not isinstance(found, dict):
        raise InputError(f"the config.json of '{label}' must be a JSON object, not a {type(found).__name__}")
    return found


def write_folder(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor], weights: str = WEIGHTS) -> None:
    """Write each file atomically, the config last: if writing fails, the folder is not taken for a head."""
    make_folder(folder)
    file, text = folder / CONFIG, json.dumps(config, indent=2) + "\n"
    if not (file.is_file() and file.read_bytes() == text.encode()):
        file.unlink(missing_ok=True)
    replace_file(folder / weights, lambda temporary: save_file(tensors, temporary, metadata={"format": "pt"}))
    replace_text(file, text)
