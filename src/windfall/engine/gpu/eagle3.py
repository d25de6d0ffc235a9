"""EAGLE-3 heads of one layer with merged weights and fused kernels, as `FusedForward` is for targets."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

from windfall.engine.gpu.forward import Pass, Unsupported
from windfall.engine.gpu.rope import RotaryTable, has_fixed_angles
from windfall.engine.gpu.weights import merge
from windfall.heads.base import FeatureHead
from windfall.heads.eagle3 import Eagle3
from windfall.heads.layers import Attention
from windfall.kernels.eight_bits import EightBitWeight, pays
from windfall.kernels.norm import add_norm, rotate_and_store
from windfall.kernels.pair import pair_norm
from windfall.kernels.product import Weight, linear, norm_gate
from windfall.kernels.scatter import Scatter
from windfall.kernels.top import LazyLogits


class FusedEagle3:
    """Computes the same as the head, in about a dozen kernel launches."""

    def __init__(self, head: FeatureHead, positions: int, eight_bits: bool | None = False):
        """`eight_bits`: its large weights are read in int8; None: where that is faster."""
        if not isinstance(head, Eagle3) or len(head.layers) != 1:
            raise Unsupported("only EAGLE-3 heads of one layer are fused")
        layer: Any = head.layers[0]
        attention: Attention = layer.self_attn
        config = head.config.layer
        if attention.q_norm is not None or not isinstance(layer.mlp.act, type(ACT2FN["silu"])):
            raise Unsupported("its layer is not Llama's")
        if layer.mlp.gate_proj.bias is not None or not has_fixed_angles(config) or head.rotary.rotated != attention.dim:
            raise Unsupported("its layer is not Llama's")
        self.head, self.layer, self.attention = head, layer, attention
        weight = partial(weight_of, eight_bits)
        self.qkv, self.qkv_bias = weight(*merge(attention.q_proj, attention.k_proj, attention.v_proj))
        self.attention_out, self.attention_bias = weight(attention.o_proj.weight, attention.o_proj.bias)
        self.gate_up, _ = weight(*merge(layer.mlp.gate_proj, layer.mlp.up_proj))
        self.down, _ = weight(layer.mlp.down_proj.weight, None)
        if not head.config.flag("final_state"):
            self.fc, self.fc_bias = weight(head.fc.weight, head.fc.bias)
        if head.packed_vocabulary is None:
            self.vocabulary, _ = weight(head.vocabulary, head.vocabulary_bias)
        self.eps = config.rms_norm_eps
        self.rotary = RotaryTable(
            head.rotary.angles, torch.empty(1, 1, dtype=head.dtype, device=head.device), positions
        )
        self.recycles_normed = head.config.flag("norm_output")
        norms: Any = head.fc_norm if head.config.flag("fc_norm") else ()
        self.tap_norms = torch.stack([norm.weight.detach() for norm in norms]) if norms else None

    def fuse(self, features: Tensor) -> Tensor:
        """The head's own `fuse` of these features [n, taps * H]."""
        if self.tap_norms is not None:
            parts = features.reshape(-1, self.tap_norms.shape[1])
            features = add_norm(parts, None, self.tap_norms, self.eps)[0].view_as(features)
        if self.head.config.flag("norm_before_fc"):
            features = add_norm(features, None, self.head.input_norm.weight, self.eps)[0]
        if self.head.config.flag("final_state"):
            return features
        return F.linear(features, self.fc, self.fc_bias) if isinstance(self.fc, Tensor) else self.fc(features, False)

    def __call__(
        self, rows: Pass, hidden: Tensor, index: Tensor | None, kv: Tensor, pick: Tensor | None, keep: Scatter | None
    ) -> Tensor:
        """Run the layer; returns the input of the vocabulary head [n, H], of all rows or of those in `pick`.

        The input features are `hidden`, or its rows `index`. The output features are stored as `keep` says.
        """
        both, total = self._inputs(rows.tokens, hidden, index)
        qkv = linear(both, self.qkv, self.qkv_bias)
        queries = rotate_and_store(qkv, *self.rotary.tables, kv[0, 0], kv[1, 0], rows.slots, rows.positions)
        out = rows.attend(queries, kv[:, 0], self.head.config.window(0))
        attended = linear(out.flatten(1), self.attention_out, self.attention_bias)
        gates, total = norm_gate(attended, total, self.layer.post_attention_layernorm.weight, self.eps, self.gate_up)
        mlp_out = linear(gates, self.down)
        return add_norm(mlp_out, total, self.head.norm.weight, self.eps, pick, keep)[0]

    def logits(self, normed: Tensor) -> LazyLogits | Tensor:
        """The logits, or the product that gives them."""
        if self.head.packed_vocabulary is not None:
            return self.head.vocabulary_logits(normed)
        if isinstance(self.vocabulary, EightBitWeight):
            return self.vocabulary(normed)
        return LazyLogits(normed, self.head.vocabulary, self.head.vocabulary_bias)

    def _inputs(self, tokens: Tensor, hidden: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
        """The normed embedding and feature side by side [n, 2H], and the residual [n, H]."""
        head, layer = self.head, self.layer
        count, width = len(tokens), hidden.shape[-1]
        both, residual = hidden.new_empty(count, 2 * width), hidden.new_empty(count, width)
        pair_norm(
            tokens,
            head.embedding,
            layer.input_layernorm.weight,
            hidden,
            index,
            layer.hidden_norm.weight,
            self.eps,
            both,
            residual,
            layer.normed_residual,
        )
        return both, residual


def weight_of(eight_bits: bool | None, weight: Tensor, bias: Tensor | None) -> tuple[Weight, Tensor | None]:
    """A weight and its bias, or both as one object in int8 if that is wanted and pays."""
    return (EightBitWeight(weight, bias), None) if pays(weight, eight_bits) else (weight, bias)
