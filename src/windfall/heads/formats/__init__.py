"""Read and write draft-head checkpoints: EAGLE-1/2, EAGLE-3, speculators, GRIFFIN, block heads, Medusa and Hydra.

There is a module for each format; `checkpoint`, `config` and `draft_vocabulary` hold what the formats of feature and
block heads share, `parallel` what Medusa and Hydra share.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from windfall.checkpoints.bundled import TARGET, description
from windfall.checkpoints.model_dir import readable
from windfall.checkpoints.tensors import read_tensors
from windfall.core.types import InputError
from windfall.heads.base import DraftHead
from windfall.heads.files import locate, read_config, write_folder
from windfall.heads.formats.checkpoint import Checkpoint as Checkpoint
from windfall.heads.formats.checkpoint import Reading as Reading
from windfall.heads.formats.checkpoint import Shape as Shape
from windfall.heads.formats.checkpoint import plainly_named
from windfall.heads.formats.draft_vocabulary import draft_mapping, draft_vocabulary
from windfall.heads.formats.eagle import EagleReader, GriffinReader, eagle_config, griffin_config
from windfall.heads.formats.eagle3 import Eagle3Reader, eagle3_config, eagle3_name, vllm_config
from windfall.heads.formats.speculators import SpeculatorsReader, speculators_config
from windfall.heads.kinds import KINDS, load, match, recognise, refuse_unsupported_head

if TYPE_CHECKING:
    from windfall.model.target import Target

READERS = {
    "eagle": EagleReader,
    "eagle3": Eagle3Reader,
    "speculators": SpeculatorsReader,
    "griffin": GriffinReader,
}
CONFIGS = {
    "eagle": eagle_config,
    "eagle3": eagle3_config,
    "speculators": speculators_config,
    "vllm": vllm_config,
    "griffin": griffin_config,
}
FORMATS = {  # format → kind
    "eagle": "eagle",
    "eagle3": "eagle3",
    "speculators": "eagle3",
    "vllm": "eagle3",
    "griffin": "griffin",
}


def formats_of(kind: str) -> list[str]:
    """The formats in which a head of this kind can be written; its own comes first."""
    own = [name for name, fitting in FORMATS.items() if fitting == kind]
    return own or [kind, *(["vllm"] if kind == "medusa" else [])]


def check_format(format: str, kind: str | None) -> None:
    """Refuse a format in which a head of this kind cannot be written. If the kind is None, it is not known yet."""
    if kind is not None and format not in formats_of(kind):
        fitting = ", ".join(formats_of(kind))
        raise InputError(f"a head of kind {kind} cannot be written as '{format}'; choose from {fitting}")
    known = dict.fromkeys(name for each in KINDS for name in formats_of(each))
    if format not in known:
        raise InputError(f"there is no format '{format}'; choose from {', '.join(known)}")


def read(source: str | os.PathLike[str], target: Any = None) -> Any:
    """The head in a folder or hub repository, in the most likely reading; `target` is its target's transformers config.

    `windfall.heads.loading.find_head` also tries the other readings.
    """
    folder, label = locate(source), os.fspath(source)
    kind = recognise(folder, label)
    if kind is not None and KINDS[kind].drafter != "head":
        with readable(f"cannot read '{label}'", label):
            return load(KINDS[kind].reader)(folder, target)
    checkpoint = read_checkpoint(folder, label, None if target is None else Shape.of(target))
    return checkpoint.build(checkpoint.stated[0])


def read_checkpoint(folder: Path, label: str, shape: Shape | None) -> Checkpoint:
    """The files of a feature head, with all their readings."""
    config, tensors = read_config(folder, label), plainly_named(read_tensors(folder, label), label)
    kind = match(config, set(tensors))
    refuse_unsupported_head(kind, config, set(tensors), label)
    if kind is None or KINDS[kind].drafter != "head":
        known = [name for name, entry in KINDS.items() if entry.drafter == "head"]
        other = "no draft head" if kind is None else f"a {kind} head, which drafter {KINDS[kind].drafter} takes"
        raise InputError(f"'{label}' is {other}; here it must be one of {', '.join(known)}")
    with readable(f"cannot read '{label}'", label):
        draft_tokens = draft_vocabulary(config, tensors, label)
        format = "speculators" if "speculators_model_type" in config else kind
        reader = READERS[format](kind, config, tensors, label, shape)
        stated, others = reader.readings(None if draft_tokens is None else len(draft_tokens))
        return Checkpoint(label, tensors, draft_tokens, stated, others)


def write(
    head: DraftHead,
    folder: str | os.PathLike[str],
    format: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    light: bool = False,
    target: Target | None = None,
) -> None:
    """Write a head as other engines read it; `format` is its kind, speculators (eagle3) or vllm (eagle3, medusa).

    What it borrows from its target is written too, unless `light`; `target` adds its description.
    """
    kind = head.config.kind
    format = format or kind
    check_format(format, kind)
    if KINDS[kind].drafter != "head":
        own: dict[str, Any] = {"dtype": dtype, "target": target} if kind == "block" else {}
        own |= {"layout": format} if format == "vllm" else {}
        load(KINDS[kind].writer)(head, folder, **own)
        return
    tensors = _all_tensors(head, light)
    vocabulary = len(tensors["embed_tokens.weight"]) if "embed_tokens.weight" in tensors else head.config.vocab_size
    config = CONFIGS[format](head.config, vocabulary, str(dtype).removeprefix("torch."))
    if "lm_head.weight" not in tensors and head.config.logit_scale != 1:
        config["logit_scale"] = head.config.logit_scale
    if target is not None and format != "vllm":
        config[TARGET] = description(target)
        if format == "speculators":
            named = {"name_or_path": _source(target), "architectures": [type(target.model).__name__]}
            config["speculators_config"]["verifier"] = named
    saved = {name: tensor.detach().to("cpu", dtype).clone().contiguous() for name, tensor in tensors.items()}
    if format in ("eagle3", "vllm"):
        saved = {eagle3_name(name): tensor for name, tensor in saved.items()}
    write_folder(Path(folder), config, {**saved, **draft_mapping(head, vocabulary, light)})


def _source(target: Target) -> str:
    """Where speculators, which loads the target too, finds it: on the hub, or in its folder."""
    return target.name if "/" in target.name else getattr(target.model, "name_or_path", "") or target.name


def _all_tensors(head: DraftHead, light: bool) -> dict[str, Tensor]:
    """The head's own tensors and, unless `light`, the borrowed ones that the format has a place for."""
    tensors = dict(head.state_dict())
    if light:
        return tensors
    borrowed = head._shared
    if not borrowed and (head.embed_tokens is None or (head.lm_head is None and head.config.kind == "eagle3")):
        raise InputError("a head that borrows from its target is written beside it: fit it first, or write it light")
    if head.embed_tokens is None:
        tensors["embed_tokens.weight"] = borrowed["embedding"]
    if head.lm_head is None and head.config.kind == "eagle3":
        if borrowed["bias"] is not None:
            raise InputError("the target's vocabulary head has a bias, which eagle3 has no place for; write it light")
        tensors["lm_head.weight"] = borrowed["vocabulary"]
    return tensors
