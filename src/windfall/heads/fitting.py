"""Fit a head to its target, and make variants of a head with another vocabulary or window."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from windfall.core.errors import InputError
from windfall.heads.base import DraftHead
from windfall.heads.layers import follows_length, rope_kinds
from windfall.model.hidden_states import last_residual

if TYPE_CHECKING:
    from windfall.model.target import Target

Head = TypeVar("Head", bound=DraftHead)


def fit(head: Head, target: Target) -> Head:
    """Move a head to its target's device and let it borrow from the target; an InputError if the two do not fit."""
    check_fit(head, target)
    matrices = borrowed(target)
    head = head.to(device=target.device, dtype=target.decoder.dtype).eval()
    head.borrow(*matrices)
    return head


def borrowed(target: Target) -> tuple[Tensor, Tensor, Tensor | None]:
    """The target's embedding, its vocabulary matrix and the bias of this; an InputError if they are quantised."""
    output, embedding = target.model.get_output_embeddings(), target.model.get_input_embeddings()
    for module in (embedding, output):
        weight: Any = getattr(module, "weight", None)
        if type(weight) not in (Tensor, nn.Parameter) or not weight.is_floating_point():
            raise InputError(
                f"heads read the embedding and the vocabulary matrix of their target, but {target.name} has a "
                f"quantised {type(module).__name__} there; load it with these in full precision"
            )
    return embedding.weight, output.weight, getattr(output, "bias", None)


def with_vocabulary(head: Head, target: Target, tokens: Tensor | None) -> Head:
    """The same head, drafting from these tokens [Vd] of the target; None: from all of them."""
    if head.owns_vocabulary:
        raise InputError("this head has its own vocabulary and drafts from that; leave out whole and --vocabulary")
    twin = head.twin()
    twin.draft_tokens = tokens
    twin.config = dataclasses.replace(head.config, draft_vocab_size=None if tokens is None else len(tokens))
    twin.borrow(*borrowed(target))
    return twin


def with_window(head: Head, window: int | None, context: int | None) -> Head:
    """The same head, whose attention sees the last `window` positions; None: as many as the head was made for.

    This works in longer texts because rotary attention depends on differences of positions only, which stay below the
    window. `context` is the length of the longest text; if the window covers it, the head is returned unchanged.
    """
    reach = window or head.config.layer.max_position_embeddings
    if context is not None and context <= reach:
        return head
    own = head.config.windows or (None,) * head.config.layer.num_hidden_layers
    twin = head.twin()
    twin.config = dataclasses.replace(head.config, windows=tuple(min(each or reach, reach) for each in own))
    return twin


def max_positions(head: DraftHead, context: int | None) -> int | None:
    """The number of positions that the head can draft at, if its rotary angles change with the length of the text.

    None: no limit, or none below `context` tokens.
    """
    layer = head.config.layer
    if not follows_length(layer):
        return None
    first = layer.rope_parameters.get("original_max_position_embeddings") if rope_kinds(layer) == {"longrope"} else None
    longest = min(filter(None, (layer.max_position_embeddings, first)))
    return None if context is not None and context <= longest else longest


def check_fit(head: DraftHead, target: Target) -> None:
    config, own = head.config, target.decoder.config.hidden_size
    if config.target_hidden != own:
        raise InputError(f"this head reads hidden states of width {config.target_hidden}; {target.name} has {own}")
    tokens = head.draft_tokens
    if config.vocab_size > target.vocab_size and (tokens is None or int(tokens.max()) >= target.vocab_size):
        raise InputError(f"this head drafts {config.vocab_size} tokens; {target.name} has {target.vocab_size}")
    known = target.vocab_size if target.tokenizer is None else min(len(target.tokenizer), target.vocab_size)
    if config.vocab_size < known:
        raise InputError(f"this head knows {config.vocab_size} tokens; {target.name} has {known}")
    deepest = target.decoder.config.num_hidden_layers
    if any(tap > deepest for tap in config.taps):
        raise InputError(f"this head reads layer {max(config.taps)}; {target.name} has {deepest} layers")
    if deepest in config.taps:
        try:
            last_residual(target.model)
        except InputError as reason:
            raise InputError(f"this head reads the state before the final norm of {target.name}: {reason}") from None
    mask, rows = getattr(config, "mask_token", None), target.model.get_input_embeddings().weight.shape[0]
    if mask is not None and head.embed_tokens is None and mask >= rows:
        raise InputError(f"this head has the mask token {mask}; the embedding of {target.name} has {rows} rows")
    if (head.embed_tokens is None or head.lm_head is None) and config.layer.hidden_size != own:
        raise InputError(
            f"this head is {config.layer.hidden_size} wide and brings no embedding or vocabulary of its own; "
            f"those of {target.name} are {own} wide"
        )
