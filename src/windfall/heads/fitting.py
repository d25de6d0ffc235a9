"""A head and its target brought together, or kept apart."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING

from torch import Tensor

from windfall.core.errors import InputError
from windfall.heads.base import FeatureHead
from windfall.heads.layers import follows_length, rope_kind
from windfall.heads.rounded import pays, rounded
from windfall.model.hidden_states import last_residual

if TYPE_CHECKING:
    from windfall.model.target import Target


def fit(head: FeatureHead, target: Target) -> FeatureHead:
    """Move a head to its target, and let it borrow embedding and vocabulary; refuse what cannot go together."""
    check_fit(head, target)
    output = target.model.get_output_embeddings()
    head = head.to(device=target.device, dtype=target.decoder.dtype).eval()
    embedding = target.model.get_input_embeddings().weight
    head.borrow(embedding, output.weight, getattr(output, "bias", None))
    return head


def drafting(head: FeatureHead, target: Target, tokens: Tensor | None) -> FeatureHead:
    """The same head, drafting from these tokens [Vd] of the target's; None: from all of them."""
    if head.lm_head is not None:
        raise InputError(
            "this head brings a vocabulary of its own and drafts from that; leave out whole and --vocabulary"
        )
    twin = copy.copy(head)  # shares all weights
    twin.draft_tokens = tokens
    twin.config = dataclasses.replace(head.config, draft_vocab_size=None if tokens is None else len(tokens))
    output = target.model.get_output_embeddings()
    twin.borrow(target.model.get_input_embeddings().weight, output.weight, getattr(output, "bias", None))
    return twin


def sighted(head: FeatureHead, window: int | None, context: int | None) -> FeatureHead:
    """The same head, whose attention sees the last `window` positions; None: as many as the head has positions.

    Positions go on counting in longer texts: rotary attention depends on their differences alone, which stay smaller
    than the window. `context` is the length of the longest text; where the window covers it, nothing changes.
    """
    reach = window or head.config.layer.max_position_embeddings
    if context is not None and context <= reach:
        return head
    own = head.config.windows or (None,) * head.config.layer.num_hidden_layers
    twin = copy.copy(head)  # shares all weights
    twin.config = dataclasses.replace(head.config, windows=tuple(min(each or reach, reach) for each in own))
    return twin


def end_of_positions(head: FeatureHead, context: int | None) -> int | None:
    """How many positions the head can draft at, where its rotary angles would change with longer texts.

    None: any number, or all that texts of `context` tokens have.
    """
    layer = head.config.layer
    if not follows_length(layer):
        return None
    first = layer.rope_parameters.get("original_max_position_embeddings") if rope_kind(layer) == "longrope" else None
    longest = min(filter(None, (layer.max_position_embeddings, first)))
    return None if context is not None and context <= longest else longest


def rounding(head: FeatureHead, anyway: bool) -> FeatureHead | None:
    """The same head with its vocabulary in int8 instead of the full one. None where this machine has no such product,
    or (unless `anyway`) where it saves no time."""
    full = head.vocabulary
    product = rounded(full, head.vocabulary_bias, not anyway) if anyway or pays(full) else None
    if product is None:
        return None
    twin = copy.copy(head)  # shares all weights but those of the vocabulary, which may go with the head
    twin._modules = {name: module for name, module in head._modules.items() if name != "lm_head"}
    twin._shared = {name: tensor for name, tensor in head._shared.items() if name == "embedding"}
    twin.lm_head, twin.rounded = None, product
    return twin


def check_fit(head: FeatureHead, target: Target) -> None:
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
    if (head.embed_tokens is None or head.lm_head is None) and config.layer.hidden_size != own:
        raise InputError(
            f"this head is {config.layer.hidden_size} wide and brings no embedding or vocabulary of its own; "
            f"those of {target.name} are {own} wide"
        )
