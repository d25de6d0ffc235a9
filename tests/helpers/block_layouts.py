"""DFlash, DFlash 2 and DSpark files of z-lab, SpecForge and DeepSpec with random weights, and what they compute by the
definition of their layout, written plainly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from helpers import peers
from helpers.block_peers import ANCHORS, BLOCK, Outputs, text
from helpers.peers import HEADS, SHARED, WIDTH, Config, Tensors
from helpers.tiny import VOCABULARY

LAYERS, DIM, RANK, GROUP, EPS = 2, 8, 6, 8, 1e-5
IDS = {"mask_token_id": 5, "target_layer_ids": [1, 3, 6]}
CONV = {"conv_kernel_size": 2, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": 7}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "use_sliding_window": True}


def shapes(taps: int = 3) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"fc.weight": (WIDTH, taps * WIDTH), "hidden_norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        found |= {f"{at}{norm}_layernorm.weight": (WIDTH,) for norm in ("input", "post_attention")}
        found |= {f"{at}self_attn.{part}_norm.weight": (DIM,) for part in "qk"}
        found |= peers.layer_shapes(at, WIDTH)
    return {**found, "norm.weight": (WIDTH,)}


def conv_shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"candidate_selector.hidden_projection.weight": (RANK, WIDTH)}
    found |= {f"candidate_selector.{name}_codebook": (VOCABULARY, RANK) for name in ("predecessor", "successor")}
    for layer in range(LAYERS):
        for part in ("attention", "mlp"):
            found[f"layers.{layer}.{part}_conv.base_kernel"] = (2, 2, WIDTH)
            found[f"layers.{layer}.{part}_conv.kernel_projection.weight"] = (2 * 2 * WIDTH // GROUP, WIDTH)
    return found


def markov_shapes() -> dict[str, tuple[int, ...]]:
    markov: dict[str, tuple[int, ...]] = {
        f"markov_head.markov_{name}.weight": (VOCABULARY, RANK) for name in ("w1", "w2")
    }
    return markov | {"confidence_head.proj.weight": (1, WIDTH + RANK), "confidence_head.proj.bias": (1,)}


@dataclass
class Layout:
    """One project's way of writing a head."""

    project: str
    kind: str
    config: Config
    more: dict[str, tuple[int, ...]] = field(default_factory=dict)  # shapes besides those of DFlash
    anchor: bool = False  # the first row predicts
    sees: Callable[[int, int, int], bool] = lambda layer, row, column: True  # of columns, counted back from the anchor
    pair: str = "none"
    scale: float = 1.0
    multiplier: float = 1.0
    softcap: float | None = None
    taps: tuple[int, ...] = (2, 4, 7)

    def tensors(self) -> Tensors:
        return peers.random_tensors({**shapes(), **self.more})

    def put(self, folder: Path) -> Path:
        basic = peers.layer_config(num_hidden_layers=LAYERS, head_dim=DIM, model_type="qwen3", block_size=BLOCK)
        return peers.put(folder, {**basic, **self.config}, self.tensors())


def sliding(layer: int, row: int, column: int) -> bool:
    """z-lab's sliding layers are causal, and a row sees the last 3 columns with its own."""
    return layer == 1 or 0 <= row - column < 3


LAYOUTS = (
    Layout("z-lab", "DFlash", {"architectures": ["DFlashDraftModel"], "dflash_config": IDS}),
    Layout("z-lab", "DFlash, sliding windows", {"dflash_config": IDS, **SLIDING}, sees=sliding),
    Layout(
        "z-lab",
        "DFlash, is_causal",
        {"dflash_config": IDS, "is_causal": True},
        sees=lambda layer, row, column: column <= row,
    ),
    Layout(
        "z-lab",
        "DFlash, scaled and capped logits",
        {
            "dflash_config": {
                **IDS,
                "input_embedding_scale": 3.0,
                "output_multiplier": 0.5,
                "final_logit_softcapping": 4,
            }
        },
        scale=3.0,
        multiplier=0.5,
        softcap=4.0,
    ),
    Layout(
        "z-lab",
        "DFlash 2",
        {"architectures": ["DFlash2DraftModel"], "dflash_config": {**IDS, **CONV, "block_size": BLOCK}},
        conv_shapes(),
        pair="selector",
    ),
    Layout(
        "JetSpec",
        "JetSpec",
        {"dflash_config": {**IDS, "causal_head": True}},
        sees=lambda layer, row, column: column <= row,
    ),
    Layout(
        "SpecForge",
        "DSpark",
        {
            "architectures": ["DSparkDraftModel"],
            "dflash_config": {**IDS, "projector_type": "dspark", "markov_rank": RANK, "markov_head_type": "vanilla"},
        },
        markov_shapes(),
        anchor=True,
        pair="markov",
    ),
    Layout(
        "DeepSpec",
        "DSpark",
        {
            "architectures": ["Qwen3DSparkModel"],
            "mask_token_id": 5,
            "target_layer_ids": [-1, 3, 7],
            "markov_rank": RANK,
            "markov_head_type": "vanilla",
        },
        {**markov_shapes(), "embed_tokens.weight": (VOCABULARY, WIDTH), "lm_head.weight": (VOCABULARY, WIDTH)},
        anchor=True,
        pair="markov",
        taps=(0, 4, -1),
    ),
)


@torch.no_grad()
def by_definition(layout: Layout) -> Outputs:
    """Row after row, block after block."""
    weights, (features, tokens) = layout.tensors(), text()
    rows = [_block(layout, weights, features[0], tokens[0], anchor) for anchor in ANCHORS]
    return Outputs(*(torch.cat(parts) for parts in zip(*rows, strict=True)))


def _block(layout: Layout, weights: Tensors, features: Tensor, tokens: Tensor, anchor: int) -> Outputs:
    embedding = weights.get("embed_tokens.weight", peers.embedding()) * layout.scale
    context = norm(features[:anchor] @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    hidden = embedding[torch.tensor([int(tokens[anchor]), *[5] * (BLOCK - 1)])]
    for layer in range(LAYERS):
        own = {name.removeprefix(f"layers.{layer}."): each for name, each in weights.items()}
        normed = norm(hidden, own["input_layernorm.weight"])
        hidden = hidden + conv(own, "attention", normed, partial(attend, layout, own, layer, context))
        normed = norm(hidden, own["post_attention_layernorm.weight"])
        hidden = hidden + conv(own, "mlp", normed, partial(feed_forward, own))
    states = norm(hidden, weights["norm.weight"])[0 if layout.anchor else 1 :]
    logits = states @ weights.get("lm_head.weight", peers.vocabulary()).T * layout.multiplier
    if layout.softcap is not None:
        logits = layout.softcap * torch.tanh(logits / layout.softcap)
    before = tokens[anchor : anchor + len(states)]
    return Outputs(states, logits, logits + pairs(layout.pair, weights, before, states))


def pairs(kind: str, weights: Tensors, before: Tensor, states: Tensor) -> Tensor:
    if kind == "markov":
        return weights["markov_head.markov_w1.weight"][before] @ weights["markov_head.markov_w2.weight"].T
    if kind == "selector":
        at = "candidate_selector."
        scaled = weights[f"{at}predecessor_codebook"][before] * (states @ weights[f"{at}hidden_projection.weight"].T)
        return scaled @ weights[f"{at}successor_codebook"].T
    return torch.zeros(1)


def attend(layout: Layout, own: Tensors, layer: int, context: Tensor, x: Tensor) -> Tensor:
    """Attention of the rows at positions after the context, head by head."""
    queries = x @ own["self_attn.q_proj.weight"].T
    keys, values = (torch.cat([context, x]) @ own[f"self_attn.{part}_proj.weight"].T for part in "kv")
    start, mixed = len(context), torch.zeros(len(x), HEADS * DIM)
    for head in range(HEADS):
        part, shared = slice(head * DIM, (head + 1) * DIM), head // (HEADS // SHARED)
        group = slice(shared * DIM, (shared + 1) * DIM)
        for row in range(len(x)):
            query = turned(norm(queries[row, part], own["self_attn.q_norm.weight"]), start + row)
            scores = torch.full((len(keys),), -torch.inf)
            for column in range(len(keys)):
                if layout.sees(layer, row, column - start):
                    key = turned(norm(keys[column, group], own["self_attn.k_norm.weight"]), column)
                    scores[column] = query @ key / math.sqrt(DIM)
            mixed[row, part] = torch.softmax(scores, 0) @ values[:, group]
    return mixed @ own["self_attn.o_proj.weight"].T


def turned(x: Tensor, position: int) -> Tensor:
    """Rotary positions of one vector."""
    angles = position / 10000.0 ** (torch.arange(0, DIM, 2) / DIM)
    left, right = x.chunk(2)
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()])


def conv(own: Tensors, part: str, x: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
    if f"{part}_conv.base_kernel" not in own:
        return layer(x)
    base, delta = own[f"{part}_conv.base_kernel"], x @ own[f"{part}_conv.kernel_projection.weight"].T
    kernels = delta.view(len(x), 2, 2, -1).repeat_interleave(GROUP, -1) + base  # [rows, side, tap, H]

    def mixed(y: Tensor, side: int) -> Tensor:
        earlier = torch.cat([torch.zeros(1, WIDTH), y[:-1]])
        return kernels[:, side, 0] * y + kernels[:, side, 1] * earlier

    return mixed(layer(mixed(x, 0)), 1)


def feed_forward(own: Tensors, x: Tensor) -> Tensor:
    gate, up = (x @ own[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
    return (silu(gate) * up) @ own["mlp.down_proj.weight"].T


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def some_config(**changes: Any) -> Config:
    """The config of a z-lab head with some keys of `dflash_config` changed; None removes a key."""
    inner = {key: value for key, value in {**IDS, **changes}.items() if value is not None}
    return {"architectures": ["DFlashDraftModel"], "dflash_config": inner}
