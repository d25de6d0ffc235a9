"""Remembers in the cache folder what checks of models have found."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers

from windfall import __version__
from windfall.checkpoints.find import cache_dir
from windfall.checkpoints.model_dir import is_quantised
from windfall.core.errors import InputError
from windfall.core.files import make_folder, replace_text
from windfall.kernels.packed import packed_formats

VERSIONED = {"torch", "transformers", "windfall"}  # libraries


def known_result(model: Any, check: str) -> str | None:
    """What this check has found for models of this kind; None if it has to run."""
    if has_own_code(model):
        return None
    with suppress(OSError, UnicodeError):
        return _file(model, check).read_text("utf-8")
    return None


def record_result(model: Any, check: str, found: str) -> None:
    """Remember what this check has found."""
    if has_own_code(model):
        return
    with suppress(OSError, InputError):  # a cache that cannot be written to only costs time
        file = _file(model, check)
        make_folder(file.parent)
        replace_text(file, found)


def has_own_code(model: Any) -> bool:
    """Whether parts of the model's code are not of a library with a known version, so that checks run each time.

    The layers of quantised models depend on further libraries.
    """
    if is_quantised(model.config):
        return True
    parts = list(model.modules())
    roots = {type(part).__module__.partition(".")[0] for part in parts}
    return not roots <= VERSIONED or any("forward" in vars(part) for part in parts)


def _file(model: Any, check: str) -> Path:
    return cache_dir() / check / f"{_kind_of_model(model)}.txt"


def _kind_of_model(model: Any) -> str:
    """A hash of everything on which checks depend: class, configuration, precision, versions."""
    config = model.config
    versions = [torch.__version__, transformers.__version__, __version__]
    about = [type(model).__name__, str(model.dtype), model.device.type, config._attn_implementation, *versions]
    about += [config.to_json_string(use_diff=False), *packed_formats(model)]
    return hashlib.sha256(" ".join(about).encode()).hexdigest()[:16]
