"""From a path, a hub id or a ready module to a head that fits its target."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from windfall.heads.base import FeatureHead
from windfall.heads.kinds import KINDS, recognise
from windfall.records import InputError

if TYPE_CHECKING:
    from windfall.target import Target


def find_head(head: Any, target: Target, drafter: str | None = None) -> FeatureHead:
    """The head, on the target's device and in its precision, with what it borrows from the target.

    A folder or hub id is read in the way that agrees best with the target; None is the head that ships for it.
    `drafter` is the one that it is wanted for, if that matters.
    """
    from windfall.heads import formats, probe, shipped
    from windfall.heads.files import locate

    if head is None:
        return fit(formats.read(shipped.shipped_folder(target), target.decoder.config), target)
    if isinstance(head, FeatureHead):
        _check_kind(head.config.kind, drafter, type(head).__name__)
        return fit(head, target)
    if not isinstance(head, str | os.PathLike):
        raise InputError(f"a head is a folder, a hub id or a loaded FeatureHead, not a {type(head).__name__}")
    folder, label = locate(head), os.fspath(head)
    kind = recognise(folder)
    _check_kind(kind, drafter, label)
    if kind is not None and KINDS[kind].drafter != "head":
        return fit(formats.read(folder, target.decoder.config), target)
    return probe.choose(formats.read_checkpoint(folder, label, formats.Shape.of(target.decoder.config)), target)


def _check_kind(kind: str | None, drafter: str | None, label: str) -> None:
    own = KINDS[kind].drafter if kind and kind in KINDS else drafter
    if drafter not in (None, own):
        raise InputError(f"'{label}' is a {kind} head, which the drafter {own} takes, not {drafter}")


def fit(head: FeatureHead, target: Target) -> FeatureHead:
    """Move a head to its target, and let it borrow embedding and vocabulary; refuse what cannot go together."""
    check_fit(head, target)
    output = target.model.get_output_embeddings()
    head = head.to(device=target.device, dtype=target.decoder.dtype).eval()
    embedding = target.model.get_input_embeddings().weight
    head.borrow(embedding, output.weight, getattr(output, "bias", None))
    return head


def check_fit(head: FeatureHead, target: Target) -> None:
    config, own = head.config, target.decoder.config.hidden_size
    if config.target_hidden != own:
        raise InputError(f"this head reads hidden states of width {config.target_hidden}; {target.name} has {own}")
    if config.vocab_size > target.vocab_size:
        raise InputError(f"this head drafts {config.vocab_size} tokens; {target.name} has {target.vocab_size}")
    tokens = target.vocab_size if target.tokenizer is None else min(len(target.tokenizer), target.vocab_size)
    if config.vocab_size < tokens:
        raise InputError(f"this head knows {config.vocab_size} tokens; {target.name} has {tokens}")
    deepest = target.decoder.config.num_hidden_layers
    if any(tap > deepest for tap in config.taps):
        raise InputError(f"this head reads layer {max(config.taps)}; {target.name} has {deepest} layers")
    if (head.embed_tokens is None or head.lm_head is None) and config.layer.hidden_size != own:
        raise InputError(
            f"this head is {config.layer.hidden_size} wide and brings no embedding or vocabulary of its own; "
            f"those of {target.name} are {own} wide"
        )
