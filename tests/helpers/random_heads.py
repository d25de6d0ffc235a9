"""Random draft heads for tiny targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig

from helpers.tiny import SHAPE, VOCABULARY
from windfall.heads.base import DraftHead, FeatureHead, HeadConfig
from windfall.heads.block import BlockConfig, BlockHead
from windfall.heads.eagle import Eagle
from windfall.heads.eagle3 import Eagle3
from windfall.heads.griffin import Griffin

WIDTH = SHAPE["hidden_size"]
Head = TypeVar("Head", bound=DraftHead)
KINDS: dict[str, tuple[type[FeatureHead], dict[str, Any]]] = {
    "eagle": (Eagle, {"taps": (-1,), "flags": {"fc_bias": True}}),
    "eagle-pruned": (Eagle, {"taps": (-1,), "draft_vocab_size": 30}),
    "eagle3": (Eagle3, {}),
    "eagle3-normed": (Eagle3, {"flags": {"fc_norm": True, "norm_output": True, "norm_before_residual": True}}),
    "eagle3-before-fc": (Eagle3, {"flags": {"norm_before_fc": True, "own_vocabulary": True, "own_embedding": True}}),
    "eagle3-pruned": (Eagle3, {"draft_vocab_size": 30}),
    "eagle3-deep": (Eagle3, {"layers": 2}),
    "eagle3-final": (Eagle3, {"taps": (-1,), "flags": {"final_state": True}}),
    "eagle3-partial": (Eagle3, {"rope": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "griffin": (Griffin, {"taps": (-1,)}),
}


_ANCHOR = {"predict_anchor": True}
BLOCKS: dict[str, dict[str, Any]] = {
    "block": {"flags": {**_ANCHOR, "fc_norm": True}},
    "block-pruned": {"flags": _ANCHOR, "draft_vocab_size": 30},
    "block-plain": {"flags": _ANCHOR, "pair": "none", "qk_norm": True},
    "block-dflash": {"flags": {"bidirectional": True}, "pair": "none", "mask_token": 3},
    "block-conv": {"flags": _ANCHOR, "pair": "selector", "conv_taps": 2, "mask_token": 3},
    "block-markov": {"flags": {**_ANCHOR, "bidirectional": True, "own_vocabulary": True}, "pair": "markov"},
    "block-gated": {"flags": _ANCHOR, "pair": "gated", "draft_vocab_size": 30},
    "block-rnn": {"pair": "rnn"},
    "block-path": {"flags": _ANCHOR, "pair": "path", "draft_vocab_size": 30},
    "block-window": {"flags": _ANCHOR, "windows": (6, 9)},
    "block-windows": {"flags": {**_ANCHOR, "bidirectional": True}, "windows": (None, 3), "causal_layers": (1,)},
    "block-anchor-windows": {"flags": {"bidirectional": True, "anchor_windows": True}, "windows": (2, 3)},
    "block-scaled": {"flags": _ANCHOR, "embedding_scale": 3.0, "softcap": 5.0, "logit_scale": 0.5, "mask_token": 3},
}


WINDOWED: dict[str, tuple[type[FeatureHead], dict[str, Any]]] = {  # layers that see a few positions only
    "eagle3-window": (Eagle3, {"windows": (5,)}),
    "eagle3-windows": (Eagle3, {"layers": 3, "windows": (4, None, 3)}),
    "eagle-window": (Eagle, {"taps": (-1,), "windows": (2,)}),
    "griffin-window": (Griffin, {"taps": (-1,), "windows": (5,)}),
}


class Chain:
    """A memory for the rows of one text in their order: each sees those before it, within its layer's window."""

    def __init__(self, head: FeatureHead) -> None:
        self._rows: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._windows = head.config.windows or (None,) * head.config.layer.num_hidden_layers

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        rows = self._rows.setdefault(layer, [])
        rows.append((keys, values))
        keys, values = (torch.cat(parts, 2) for parts in zip(*rows, strict=True))
        places = torch.arange(keys.shape[2])
        own = places[-queries.shape[2] :, None]
        seen = (places <= own) & (places > own - (self._windows[layer] or len(places)))
        return F.scaled_dot_product_attention(queries, keys, values, seen, enable_gqa=True)


def random_head(name: str = "eagle3", seed: int = 0, **changes: Any) -> FeatureHead:
    kind, given = {**KINDS, **WINDOWED}[name]
    given = {"taps": (1, 2, 3), **given, **changes}
    layer = _layer(given.pop("layers", 1), given.pop("positions", 256), given.pop("rope", None))
    config = HeadConfig(kind=name.split("-")[0], layer=layer, target_hidden=WIDTH, vocab_size=VOCABULARY, **given)
    return _random(kind, config, seed)


def random_block(name: str = "block", seed: int = 0, **changes: Any) -> BlockHead:
    given = {"taps": (1, 2, 3), "block": 4, "candidates": 6, "pair": "projected", "rank": 8, "conv_group": 8}
    given |= {**BLOCKS[name], **changes}
    layer = _layer(given.pop("layers", 2), given.pop("positions", 256), given.pop("rope", None))
    layer.qk_norm = given.pop("qk_norm", False)
    config = BlockConfig(kind="block", layer=layer, target_hidden=WIDTH, vocab_size=VOCABULARY, **given)
    return _random(BlockHead, config, seed)


def _layer(layers: int, positions: int, rope: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=WIDTH, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCABULARY,
        num_hidden_layers=layers, max_position_embeddings=positions, rope_parameters=rope,
    )  # fmt: skip


def _random(kind: Callable[[Any], Head], config: HeadConfig, seed: int) -> Head:
    torch.manual_seed(seed)
    head = kind(config)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.2))
            if parameter.dim() == 1:
                parameter.add_(1)
    if config.draft_vocab_size:
        head.draft_tokens = torch.randperm(VOCABULARY)[: config.draft_vocab_size].sort().values
    return head.eval()
