"""Untrained block heads: layers of the target, and pair scores that begin at zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from windfall.checkpoints.borrowed_embeddings import FAMILIES
from windfall.core.errors import InputError
from windfall.heads.block import BlockConfig, BlockHead
from windfall.heads.fitting import fit
from windfall.heads.pair_scores import Projected
from windfall.model.target import Target
from windfall.train.new_heads import copy_final_norm, default_taps, initialise, layer_like
from windfall.train.target_layers import check_intermediate, cut_tensors, spread_layers

LAYERS, MIN_LAYERS, MAX_LAYERS = 3, 2, 5
BLOCK, MAX_BLOCK = 8, 64
PAIRS = ("projected", "path", "selector", "markov", "none")  # of new heads
RANK = 64


def new_block(target: Target, shape: dict[str, Any]) -> BlockHead:
    """A head that predicts tokens from the first step on; `shape` holds what the user chose."""
    wanted = {"layers": LAYERS, "block": BLOCK, "pair": PAIRS[0], "rank": RANK, "conv": 0}
    shape = {**shape, **{name: own if shape.get(name) is None else shape[name] for name, own in wanted.items()}}
    check_shape(shape)
    tokens: Tensor | None = shape.get("vocabulary")
    layer, copies = _layers(target, shape)
    taps = shape.get("taps") or default_taps(target.decoder.config.num_hidden_layers)
    head = BlockHead(
        BlockConfig(
            kind="block",
            layer=layer,
            target_hidden=target.decoder.config.hidden_size,
            taps=tuple(taps),
            vocab_size=target.vocab_size,
            draft_vocab_size=None if tokens is None else len(tokens),
            flags={"predict_anchor": True, "fc_norm": True, "bidirectional": bool(shape.get("bidirectional"))},
            block=shape["block"],
            pair=shape["pair"],
            rank=shape["rank"],
            conv_taps=shape["conv"],
        )
    )
    head.draft_tokens = tokens
    _initialise(head, copies, target)
    fit(head, target).float().train()
    return head


def check_shape(shape: dict[str, Any]) -> None:
    """Refuse shapes that a new block head cannot have; sizes that are None or missing have defaults."""
    limits = {"layers": (MIN_LAYERS, MAX_LAYERS), "block": (2, MAX_BLOCK), "rank": (1, 1024), "conv": (0, 8)}
    for name, (low, high) in limits.items():
        value = shape.get(name)
        if value is not None and not low <= value <= high:
            raise InputError(f"--{name} must be between {low} and {high} for a block head, not {value}")
    if shape.get("conv") == 1:
        raise InputError("--conv 1 would mix no rows; use 0 for no convolution, or at least 2")
    if shape.get("pair") not in (None, *PAIRS):
        raise InputError(f"--pair must be one of {', '.join(PAIRS)}, not '{shape['pair']}'")


def _layers(target: Target, shape: dict[str, Any]) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """The configuration of the layers, and weights to start from; none if the target's layers are of another kind."""
    layer, config = layer_like(target, shape), target.decoder.config
    if target.model.config.model_type not in FAMILIES:
        return layer, {}
    check_intermediate(shape.get("intermediate"), config)
    chosen = spread_layers(layer.num_hidden_layers, config.num_hidden_layers)
    given = cut_tensors(target.model.base_model.state_dict(), chosen, shape.get("intermediate"))
    tensors = {name: tensor for name, tensor in given.items() if name.startswith("layers.")}
    layer.attention_bias = "layers.0.self_attn.q_proj.bias" in tensors
    layer.o_bias = "layers.0.self_attn.o_proj.bias" in tensors
    norm = tensors.get("layers.0.self_attn.q_norm.weight")
    layer.qk_norm = norm is not None and len(norm) == layer.head_dim
    return layer, tensors


@torch.no_grad()
def _initialise(head: BlockHead, copies: dict[str, Tensor], target: Target) -> None:
    initialise(head.fc)
    for layer in head.layers:
        initialise(layer.self_attn)  # type: ignore[arg-type]
        initialise(layer.mlp)  # type: ignore[arg-type]
    own = dict(head.named_parameters())
    inside = {name for name in own if name.startswith("layers.") and "_conv." not in name}
    if inside == {*copies} and all(own[name].shape == copies[name].shape for name in inside):
        for name in inside:
            own[name].copy_(copies[name])
    copy_final_norm(head, target)
    assert head.mask is not None
    head.mask.copy_(target.model.get_input_embeddings().weight.float().mean(0))
    if isinstance(head.pair, Projected):
        initialise(head.pair)
        head.pair.scale.zero_()
    elif head.pair is not None:
        head.pair.after.zero_()  # type: ignore[operator]
