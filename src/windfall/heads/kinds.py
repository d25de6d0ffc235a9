"""The kinds of draft heads: how a folder is known to hold one, what reads it, and which drafter it serves."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from windfall.heads.unread import Config, Names, is_model, quantised, refuse, refuse_quantised, unread


class Kind(NamedTuple):
    """Everything is named, not imported, so that looking at a folder costs nothing."""

    matches: Callable[[Config, Names], bool]  # config.json and the tensors' plain names; either may be empty
    head: str  # module:class
    reader: str  # module:function, (folder, the target's transformers config or None) → head
    writer: str  # module:function, (head, folder, ...)
    drafter: str  # its name in the registry


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
    "griffin": Kind(_griffin, "windfall.heads.griffin:Griffin", *_FEATURES),
    "eagle3": Kind(_eagle3, "windfall.heads.eagle3:Eagle3", *_FEATURES),
    "eagle": Kind(_eagle, "windfall.heads.eagle:Eagle", *_FEATURES),
    "medusa": Kind(_medusa, "windfall.heads.medusa:Medusa", *_own("medusa")),
    "hydra": Kind(_hydra, "windfall.heads.hydra:Hydra", *_own("hydra")),
}


def recognise(folder: Path, label: str | None = None) -> str | None:
    """The kind of head that a folder holds; None: no head, as far as its files can be read.

    A head of a known kind that windfall does not read is refused. `label` is what the folder is called in that line.
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
    refuse_unread(kind, config, names, str(folder) if label is None else label, kind is None and is_model(names))
    return kind


def refuse_unread(kind: str | None, config: Config, names: Names, label: str, whole: bool = False) -> None:
    """Raise an InputError if these files are of a known kind that windfall does not read, or quantised.

    `whole` says that they are a language model, which drafts as one even if it has other layers too.
    """
    other = unread(config, names)
    if other is not None and not (whole and other.inside):
        raise refuse(other, label)
    if kind is not None and quantised(names):
        raise refuse_quantised(kind, label)


def match(config: Config, names: Names) -> str | None:
    return next((kind for kind, entry in KINDS.items() if entry.matches(config, names)), None)


def kind_of(head: Any) -> str | None:
    """The kind of a loaded head; None: something else."""
    made = f"{type(head).__module__}:{type(head).__qualname__}"
    return next((kind for kind, entry in KINDS.items() if entry.head == made), None)


def load(name: str) -> Any:
    """What `module:attribute` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def plain(name: str) -> str:
    """A tensor's name as most projects write it."""
    name = name.removeprefix("model.")
    name = re.sub(r"^midlayer\.", "layers.0.", name)
    places = {"low": 0, "mid": 1, "high": 2}
    return re.sub(r"^aux_norm_(low|mid|high)\.", lambda found: f"fc_norm.{places[found[1]]}.", name)


def _architecture(config: Config) -> str:
    """The first of the classes that a config names, or nothing."""
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""
