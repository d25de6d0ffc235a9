"""The forward of models with Llama's architecture: merged weight matrices, and few kernels between the products."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from windfall.engine.gpu.forward import Pass, Unsupported, check_supported
from windfall.engine.gpu.model_guard import is_foreign_hook
from windfall.engine.gpu.rope import CosSin, RotaryTable, cos_and_sin, has_fixed_angles
from windfall.kernels.attention import path_attention, tree_attention
from windfall.kernels.norm import add_norm, rotate_and_store
from windfall.kernels.product import linear, norm_gate, norm_rotate, product
from windfall.kernels.rows import embed
from windfall.model.hidden_states import boundary

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class Layer(NamedTuple):
    """The weights of one layer; `qkv` and `gate_up` are concatenated along their outputs."""

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class FusedLlama:
    """The forward of a model with Llama's architecture. The model's own modules still work: they share the weights."""

    bucketed = False

    def __init__(self, model: Any):
        config = model.config.get_text_config()
        if type(model).__name__ not in FAMILIES:
            raise Unsupported(f"{type(model).__name__} does not have Llama's architecture")
        check_supported(model)
        if any(map(_has_altered_forward, model.modules())):
            raise Unsupported("hooks or a replaced method take part in its forward")
        if getattr(config, "hidden_act", "") != "silu" or getattr(config, "mlp_bias", False):
            raise Unsupported("its feed-forward part is not Llama's")
        body = model.model
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.d = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps = config.rms_norm_eps
        self.exact = False  # whether a row is rounded alike in every pass
        self.scale = float(body.layers[0].self_attn.scaling)
        self.shape = (len(body.layers), self.kv_heads, self.d)
        self.layers = [_layer(layer) for layer in body.layers]
        self.embedding, self.norm = body.embed_tokens.weight, body.norm.weight
        require_plain(model.lm_head)
        if type(body.embed_tokens) is not nn.Embedding:
            raise Unsupported(f"its embedding is not plain but {type(body.embed_tokens).__name__}")
        self.vocabulary, self.vocabulary_bias = model.lm_head.weight, model.lm_head.bias
        self._rotary_module = body.rotary_emb
        self._rotary_table: RotaryTable | None = None
        self._fixed_angles = has_fixed_angles(config)

    @torch.no_grad()
    def __call__(self, rows: Pass, kv: Tensor, taps: tuple[int, ...], columns: int) -> tuple[Tensor, Tensor | None]:
        total, rotary = self._embed(rows, kv.shape[3])
        states: dict[int, Tensor] = {}
        mlp_out: Tensor | None = None
        for place, layer in enumerate(self.layers):
            queries, total = self._attention_inputs(layer, mlp_out, total, rotary, rows, kv[:, place])
            states[place] = total
            attended = self._attend(layer, queries, rows, kv[:, place])
            gates, total = norm_gate(attended, total, layer.post_norm, self.eps, layer.gate_up, self.exact)
            mlp_out = linear(gates, layer.down, None, self.exact)
        assert mlp_out is not None, "a model without layers"
        normed, total = add_norm(mlp_out, total, self.norm, self.eps)
        count = len(self.layers)
        states |= {count: total, -1: normed}
        tapped = torch.cat([states[boundary(tap, count)] for tap in taps], -1) if taps else None
        return product(normed, self.vocabulary, self.vocabulary_bias, self.exact), tapped

    def _embed(self, rows: Pass, capacity: int) -> tuple[Tensor, CosSin]:
        """Embed the tokens; returns the residual stream [n, H], and cos and sin [n, d]."""
        if not self._fixed_angles:
            total = F.embedding(rows.tokens, self.embedding)
            cos, sin = self._rotary_module(total[None], rows.positions[None])
            return total, (cos[0], sin[0])
        if self._rotary_table is None or len(self._rotary_table.table) < capacity:
            self._rotary_table = RotaryTable(self._rotary_module, self.embedding, capacity)
        total, turns = embed(rows.tokens, self.embedding, rows.positions, self._rotary_table.table)
        return total, cos_and_sin(turns)

    def _attention_inputs(
        self,
        layer: Layer,
        mlp_out: Tensor | None,
        total: Tensor,
        rotary: CosSin,
        rows: Pass,
        kv: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Add the output of the layer before to the residual stream, and store keys and values.

        Returns queries [n, heads, d] and the residual stream.
        """
        x, residual = (total, None) if mlp_out is None else (mlp_out, total)
        if layer.q_norm is None or layer.k_norm is None:
            weights = (layer.norm, self.eps, layer.qkv, layer.qkv_bias)
            return norm_rotate(x, residual, *weights, *rotary, kv[0], kv[1], rows.slots, self.exact)
        normed, total = add_norm(x, residual, layer.norm, self.eps)
        split = product(normed, layer.qkv, layer.qkv_bias, self.exact)
        split = split.view(len(normed), -1, self.d)  # [n, heads + 2 kv_heads, d]
        q, k, v = split[:, : self.heads], split[:, self.heads : -self.kv_heads], split[:, -self.kv_heads :]
        q, k = (
            add_norm(part.reshape(-1, self.d), None, norm, self.eps)[0].view_as(part)
            for part, norm in ((q, layer.q_norm), (k, layer.k_norm))
        )
        qkv = torch.cat([q, k, v], 1).flatten(1)
        return rotate_and_store(qkv, *rotary, kv[0], kv[1], rows.slots), total

    def _attend(self, layer: Layer, queries: Tensor, rows: Pass, kv: Tensor) -> Tensor:
        """queries [n, heads, d] → [n, H]"""
        if rows.paths is None:
            out = tree_attention(queries, kv[0], kv[1], rows.length, rows.mask, self.scale)
        else:
            out = path_attention(queries, kv[0], kv[1], rows.length, *rows.paths, self.scale)
        return linear(out.flatten(1), layer.o, layer.o_bias, self.exact)


def _layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    require_plain(attention.o_proj, mlp.down_proj)
    qkv, bias = merge(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up, _ = merge(mlp.gate_proj, mlp.up_proj)
    normed = getattr(attention, "q_norm", None) is not None
    return Layer(
        layer.input_layernorm.weight,
        qkv,
        bias,
        attention.q_norm.weight if normed else None,
        attention.k_norm.weight if normed else None,
        attention.o_proj.weight,
        attention.o_proj.bias,
        layer.post_attention_layernorm.weight,
        gate_up,
        mlp.down_proj.weight,
    )


def _has_altered_forward(module: nn.Module) -> bool:
    """Whether its forward was replaced or has hooks other than those of transformers or windfall."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(map(is_foreign_hook, hooks)) or "forward" in vars(module)


def require_plain(*modules: Any) -> None:
    """Raise Unsupported unless all are plain linear layers: not quantised, without adapters."""
    for module in modules:
        if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter:
            raise Unsupported(f"its products are not plain linear layers but {type(module).__name__}")


def merge(*modules: Any) -> tuple[Tensor, Tensor | None]:
    """One weight and one bias for several linear layers of the same input.

    The layers' own parameters become views of them. Memory is not doubled, and in-place updates are seen.
    """
    require_plain(*modules)
    biases = [module.bias for module in modules]
    return _merged([module.weight for module in modules]), None if biases[0] is None else _merged(biases)


@torch.inference_mode(False)
@torch.no_grad()
def _merged(parts: list[Tensor]) -> Tensor:
    """A tensor that these parameters are consecutive views of; they become views if they are not."""
    whole = _common_storage(parts)
    if whole is None:
        whole = torch.cat([part.detach() for part in parts])
        at = 0
        for part in parts:
            part.data, at = whole[at : at + len(part)], at + len(part)
    return whole


def _common_storage(parts: list[Tensor]) -> Tensor | None:
    """The tensor that these are consecutive views of; None if they are not."""
    first = parts[0]
    at, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    for part in parts:
        adjacent = part.untyped_storage().data_ptr() == storage and part.storage_offset() == at
        if not adjacent or not part.is_contiguous():
            return None
        at += part.numel()
    size = (sum(map(len, parts)), *first.shape[1:])
    return first.detach().as_strided(size, first.stride(), first.storage_offset())
