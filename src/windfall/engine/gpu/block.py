"""Block heads in fixed buffers: one pass over the rows of a block predicts all levels of a tree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from windfall.engine.gpu.forward import Pass, Unsupported
from windfall.engine.gpu.rope import RotaryTable, cos_and_sin, has_fixed_angles
from windfall.engine.gpu.weights import merge
from windfall.heads.block import BlockConfig, BlockHead
from windfall.heads.pair_scores import PairLookup
from windfall.kernels.levels import Levels, PairTables, recur
from windfall.kernels.norm import add_norm, rotate_and_store
from windfall.kernels.product import linear, norm_gate, norm_rotate
from windfall.kernels.rows import embed
from windfall.kernels.top import LazyLogits


class BlockNetwork:
    """A block head over rows in fixed buffers, with fused kernels where it has them."""

    def __init__(self, head: BlockHead, kv: Tensor, positions: int):
        """`kv` is its KV cache [2, layers, kv_heads, capacity, d], `positions` the longest text."""
        self.head, self.kv = head, kv
        pair = pair_lookup(head)
        self.tables = None if pair is None else pair.tables
        self._by_state = None if pair is None else pair.by_state
        try:
            self.fused: FusedBlock | None = FusedBlock(head, positions)
        except Unsupported:
            self.fused = None

    def remember(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Store the keys and values of committed positions, from the target's states [n, taps * H]."""
        if self.fused is not None:
            self.fused.remember(features, positions, slots, self.kv)
        else:
            buffer = BlockBuffer(self.kv, slots)
            self.head.remember(self.head.context(features)[None], positions[None], buffer)

    def __call__(self, rows: Pass) -> Tensor:
        """The states [n, H] of whole blocks after the last norm. `rows` has the tokens of the anchors only."""
        if self.fused is not None:
            return self.fused(rows, self.kv)
        size = self.head.config.block
        hidden = self.head.rows(rows.tokens, size).flatten(0, 1)[None]
        turn = self.head.rotary(rows.positions[None], hidden.dtype)
        buffer = BlockBuffer(self.kv, rows.slots, rows, self.head.config)
        for layer in self.head.layers:
            hidden = layer(hidden, turn, buffer)
        return self.head.normed(hidden[0])

    def logits(self, normed: Tensor) -> Tensor | LazyLogits:
        """The logits after these states, or the product that gives them."""
        head = self.head
        if head.packed_vocabulary is not None or head.config.softcap is not None:
            return head.vocabulary_logits(normed)
        return LazyLogits(normed, head.vocabulary, head.vocabulary_bias)

    def level_buffers(self, requests: int, *counts: int) -> list[Levels]:
        """Buffers for the levels of requests with these numbers of candidates. They share the pair scores' states."""
        depth = self.head.config.depth
        rows = requests * depth
        device, known = self.kv.device, self._by_state
        hidden = None if known is None else known[0].new_zeros(rows, len(known[0]))

        def levels(count: int) -> Levels:
            tokens = torch.zeros(rows, count, dtype=torch.long, device=device)
            return Levels(torch.zeros(rows, count, device=device), tokens, hidden, depth=depth)

        return [levels(count) for count in counts]

    def store_pair_states(self, normed: Tensor, levels: Levels) -> None:
        """Store what the pair scores need of the states [n, H]."""
        if levels.hidden is not None and self._by_state is not None:
            linear(normed, *self._by_state, out=levels.hidden[: len(normed)])

    def carry_buffer(self, slots: int) -> Tensor | None:
        """A buffer for what paths carry into their pair scores [slots, R]; None if they carry nothing."""
        if self.tables is None or self.tables.carried is None:
            return None
        return torch.zeros(slots, self.tables.rank, device=self.kv.device)

    def first_carry(self, anchors: Tensor, normed: Tensor) -> Tensor:
        """What blocks carry after their anchors [N], which predict nothing and have these states [N, H]."""
        assert self.tables is not None and self._by_state is not None
        joint = self.tables.before[anchors].float() + linear(normed, *self._by_state).float()
        return recur(joint, None)[1]


class BlockBuffer:
    """The KV cache of a block head in a fixed buffer, for one pass."""

    def __init__(self, kv: Tensor, slots: Tensor, rows: Pass | None = None, config: BlockConfig | None = None):
        self.kv, self.slots, self.rows, self.config = kv, slots, rows, config

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.kv[0, layer].index_copy_(1, self.slots, keys[0])
        self.kv[1, layer].index_copy_(1, self.slots, values[0])

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        assert self.rows is not None and self.config is not None
        self.append(layer, keys, values)
        window = self.config.window(layer)
        out = self.rows.attend(queries[0].transpose(0, 1), self.kv[:, layer], window)  # [n, heads, d]
        return out.transpose(0, 1)[None]


class FusedBlock:
    """Computes the same as the head, in few kernel launches: Llama layers without convolutions."""

    def __init__(self, head: BlockHead, positions: int):
        config = head.config.layer
        layers: list[Any] = list(head.layers)
        attention = layers[0].self_attn
        plain = attention.q_norm is None and isinstance(layers[0].mlp.act, type(ACT2FN["silu"]))
        whole = has_fixed_angles(config) and head.rotary.rotated == attention.dim
        if not plain or not whole or head.config.conv_taps or attention.k_proj.bias is not None:
            raise Unsupported("its layers are not Llama's")
        if layers[0].mlp.gate_proj.bias is not None:
            raise Unsupported("its layers are not Llama's")
        self.head, self.layers, self.eps = head, layers, config.rms_norm_eps
        self.qkv = [merge(own.q_proj, own.k_proj, own.v_proj)[0] for own in (layer.self_attn for layer in layers)]
        self.gate_up = [merge(layer.mlp.gate_proj, layer.mlp.up_proj)[0] for layer in layers]
        keys, values = (
            [getattr(layer.self_attn, name).weight.detach() for layer in layers] for name in ("k_proj", "v_proj")
        )
        self.context_kv = torch.cat([*keys, *values])  # of all layers
        like = torch.empty(1, 1, dtype=head.dtype, device=head.device)
        self.angles = RotaryTable(head.rotary.angles, like, positions).table
        norms: Any = head.fc_norm if head.config.flag("fc_norm") else ()
        self.tap_norms = torch.stack([norm.weight.detach() for norm in norms]) if norms else None

    def remember(self, features: Tensor, positions: Tensor, slots: Tensor, kv: Tensor) -> None:
        """Keys and values of all layers at once: each layer's heads count as heads of one layer."""
        if self.tap_norms is not None:
            parts = features.reshape(-1, self.tap_norms.shape[1])
            features = add_norm(parts, None, self.tap_norms, self.eps)[0].view_as(features)
        context = add_norm(linear(features, self.head.fc.weight), None, self.head.hidden_norm.weight, self.eps)[0]
        made = linear(context, self.context_kv)
        rotate_and_store(made, *cos_and_sin(self.angles), kv[0].flatten(0, 1), kv[1].flatten(0, 1), slots, positions)

    def __call__(self, rows: Pass, kv: Tensor) -> Tensor:
        x, rotary = self._inputs(rows)
        total: Tensor | None = None
        for place, layer in enumerate(self.layers):
            given = (layer.input_layernorm.weight, self.eps, self.qkv[place], None, *rotary)
            queries, total = norm_rotate(x, total, *given, kv[0, place], kv[1, place], rows.slots)
            out = rows.attend(queries, kv[:, place], self.head.config.window(place))
            attended = linear(out.flatten(1), layer.self_attn.o_proj.weight, layer.self_attn.o_proj.bias)
            gates, total = norm_gate(
                attended, total, layer.post_attention_layernorm.weight, self.eps, self.gate_up[place]
            )
            x = linear(gates, layer.mlp.down_proj.weight)
        return add_norm(x, total, self.head.norm.weight, self.eps)[0]

    def _inputs(self, rows: Pass) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The embedded rows [n, H], with masks after the anchors, and their rotary angles."""
        head = self.head
        mask = head.embedding[head.config.mask_token] if head.mask is None else head.mask.detach()
        given = (rows.tokens, head.embedding, rows.positions, self.angles, head.config.embedding_scale)
        x, turns = embed(*given, mask.to(head.embedding.dtype))
        return x, cos_and_sin(turns)


def pair_lookup(head: BlockHead) -> PairLookup | None:
    """A head's pair scores, with keys by the target's token ids; None if it has no pair scores."""
    if head.pair is None:
        return None
    head.prepare()
    found = head.pair.lookup()
    before, after, carried = found.tables
    if head.draft_tokens is not None:
        whole = after.new_zeros(head.config.vocab_size, after.shape[1])
        after = whole.index_copy_(0, head.draft_tokens, after)
    tables = PairTables(before.contiguous(), after.contiguous(), None if carried is None else carried.contiguous())
    return found._replace(tables=tables)


def block_unsupported(head: BlockHead) -> str:
    """Why a block head cannot run in fixed buffers; empty if it can."""
    config = head.config
    visible = [config.visibility(layer) for layer in range(config.layer.num_hidden_layers)]
    if len({each.bidirectional for each in visible}) > 1:
        return "some layers of its head see later rows and others do not"
    windows = [each.window for each in visible if each.window is not None]
    if windows and (min(windows) < config.block or config.flag("anchor_windows")):
        return "its windows are shorter than its block, or counted from the anchor"
    return ""
