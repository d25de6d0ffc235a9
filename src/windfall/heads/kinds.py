"""The kinds of draft heads: how each is recognised, what reads and writes it, and which drafter uses it."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from windfall.heads.unsupported import Config, Names, find_unsupported, is_model, quantised, refuse, refuse_quantised

BLOCK_MODEL_TYPE = "windfall_block"  # in windfall's own files of block heads


class Kind(NamedTuple):
    """One kind. Classes and functions are named, not imported, so that recognising a folder is fast."""

    matches: Callable[[Config, Names], bool]  # from config.json and the tensors' plain names; either may be empty
    head: str  # module:class
    reader: str  # module:function, (folder, the target's transformers config or None) → head
    writer: str  # module:function, (head, folder, ...)
    drafter: str  # registry name


def _block(config: Config, names: Names) -> bool:
    """windfall's own files, DFlash, DFlash 2, DSpark and JetSpec."""
    said = [config.get("model_type"), config.get("speculators_model_type"), _architecture(config)]
    named = any(
        part in str(word).lower() for part in (BLOCK_MODEL_TYPE, "dflash", "dspark", "jetspec") for word in said
    )
    return named or "dflash_config" in config or {"fc.weight", "hidden_norm.weight"} <= names


def _griffin(config: Config, names: Names) -> bool:
    return "fc.fc.weight" in names


def _eagle3(config: Config, names: Names) -> bool:
    named = "speculators_model_type" in config or "draft_vocab_size" in config or "Eagle3" in _architecture(config)
    return named or "layers.0.hidden_norm.weight" in names


def _eagle(config: Config, names: Names) -> bool:
    wrapped = config.get("model_type") == "eagle" and isinstance(config.get("model"), dict)
    return wrapped or "Eagle" in _architecture(config) or {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names


def _medusa(config: Config, names: Names) -> bool:
    return "medusa_num_heads" in config or config.get("model_type") == "medusa"


def _hydra(config: Config, names: Names) -> bool:
    return "hydra_num_heads" in config


def _own(kind: str) -> tuple[str, str, str]:
    return f"windfall.heads.formats.{kind}:read_{kind}", f"windfall.heads.formats.{kind}:write_{kind}", kind


_FEATURES = ("windfall.heads.formats:read", "windfall.heads.formats:write", "head")
KINDS: dict[str, Kind] = {  # the first that matches
    "block": Kind(_block, "windfall.heads.block:BlockHead", *_own("block")),
    "griffin": Kind(_griffin, "windfall.heads.griffin:Griffin", *_FEATURES),
    "eagle3": Kind(_eagle3, "windfall.heads.eagle3:Eagle3", *_FEATURES),
    "eagle": Kind(_eagle, "windfall.heads.eagle:Eagle", *_FEATURES),
    "medusa": Kind(_medusa, "windfall.heads.medusa:Medusa", *_own("medusa")),
    "hydra": Kind(_hydra, "windfall.heads.hydra:Hydra", *_own("hydra")),
}


def recognise(folder: Path, label: str | None = None) -> str | None:
    """The kind of head that a folder holds; None if it holds none, as far as its files can be read.

    A known kind that windfall cannot read is an InputError. `label` is the folder's name in the message.
    """
    from windfall.checkpoints.tensors import tensor_names
    from windfall.heads.files import CONFIG

    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError):
        config = {}
    config = config if isinstance(config, dict) else {}
    names = {plain(name) for name in tensor_names(folder)}
    kind = match(config, names)
    refuse_unsupported_head(
        kind, config, names, str(folder) if label is None else label, kind is None and is_model(names)
    )
    return kind


def refuse_unsupported_head(kind: str | None, config: Config, names: Names, label: str, whole: bool = False) -> None:
    """Raise an InputError if these files are quantised or of a known kind that windfall does not read.

    `whole`: the files are a complete language model, which can draft even if it also has MTP layers.
    """
    other = find_unsupported(config, names)
    if other is not None and not (whole and other.inside):
        raise refuse(other, label)
    if kind is not None and quantised(names):
        raise refuse_quantised(kind, label)


def match(config: Config, names: Names) -> str | None:
    return next((kind for kind, entry in KINDS.items() if entry.matches(config, names)), None)


def kind_of(head: Any) -> str | None:
    """The kind of a loaded head; None if it is something else."""
    made = f"{type(head).__module__}:{type(head).__qualname__}"
    return next((kind for kind, entry in KINDS.items() if entry.head == made), None)


def load(name: str) -> Any:
    """The object that `module:attribute` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def plain(name: str) -> str:
    """A tensor's name as most projects write it, without a model prefix."""
    name = name.removeprefix("model.")
    name = re.sub(r"^midlayer\.", "layers.0.", name)
    places = {"low": 0, "mid": 1, "high": 2}
    return re.sub(r"^aux_norm_(low|mid|high)\.", lambda found: f"fc_norm.{places[found[1]]}.", name)


def _architecture(config: Config) -> str:
    """The first of the config's architectures, or an empty string."""
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""
