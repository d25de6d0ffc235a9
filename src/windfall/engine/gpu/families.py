"""Describes the models that the fused forward runs, from their modules and configurations.

Each family of models has one line in FAMILIES, which says how it differs from Llama. What a family does not have to
name is read from the model: windows, biases, sinks, norms of heads, merged projections and the gate of the MLP.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from windfall.engine.gpu.forward import Unsupported, check_devices
from windfall.engine.gpu.model_guard import is_foreign_hook
from windfall.engine.gpu.rope import Rotary, fixed_positions
from windfall.engine.gpu.weights import projection, require_plain_parameters
from windfall.kernels.expert_weights import Experts
from windfall.kernels.norm_kinds import HeadNorms, NormKind
from windfall.kernels.product import Weight
from windfall.model.decoder import attention_windows


class Family(NamedTuple):
    """How the models of a family differ from Llama."""

    norm: NormKind = NormKind.ROUNDED
    output_norms: bool = False  # outputs of attention and MLP are normalised before they are added to the residual
    scaled_embedding: bool = False  # embeddings are multiplied by the square root of their width
    score_cap: str | None = None  # config key of the soft cap of attention scores
    logit_cap: str | None = None  # config key of the soft cap of logits
    angles_by_layer_type: bool = False  # layers with and without window have different rotary angles
    half_angles: bool = False  # the rotary module returns cos and sin of each angle once, not twice
    experts: bool = False  # the MLP is a mixture of experts, as in gpt-oss


GEMMA = Family(norm=NormKind.WIDE_PLUS_ONE, scaled_embedding=True)
GEMMA2 = GEMMA._replace(output_norms=True, score_cap="attn_logit_softcapping", logit_cap="final_logit_softcapping")
GEMMA3 = GEMMA._replace(output_norms=True, logit_cap="final_logit_softcapping", angles_by_layer_type=True)
FAMILIES = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(),
    "Qwen3ForCausalLM": Family(),
    "Phi3ForCausalLM": Family(),
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3._replace(logit_cap=None),  # its text part
    "GptOssForCausalLM": Family(norm=NormKind.WIDE, half_angles=True, experts=True),
}


class Norm(NamedTuple):
    """The norm of the residual stream before attention, before an MLP or before the vocabulary head."""

    weight: Tensor
    before: Tensor | None  # weight of the norm of the output that is added to the stream first; None: it has none


class GatedMlp(NamedTuple):
    """down(gate(x) * up(x)); `gate_up` holds both projections."""

    gate_up: Weight
    down: Weight
    gelu: bool  # whether the gate is GELU in its tanh form, rather than SiLU


class ExpertsMlp(NamedTuple):
    """A mixture of experts, with the weight and bias of its router."""

    router: Tensor
    router_bias: Tensor
    experts: Experts


class Layer(NamedTuple):
    """One layer; `qkv` holds the projections of queries, keys and values."""

    norm: Norm
    qkv: Weight
    qkv_bias: Tensor | None
    head_norms: HeadNorms | None
    rotary: int  # index into Description.rotaries
    window: int | None
    sinks: Tensor | None
    o: Weight
    o_bias: Tensor | None
    mlp_norm: Norm
    mlp: GatedMlp | ExpertsMlp


class Description(NamedTuple):
    """A model as the fused forward runs it."""

    layers: list[Layer]
    embedding: Tensor
    embedding_scale: float
    norm: Norm  # before the vocabulary head
    vocabulary: Weight
    vocabulary_bias: Tensor | None
    rotaries: list[Rotary]
    positions: int | None  # rotary angles are fixed up to this number of positions; None: all are
    kind: NormKind
    eps: float
    heads: int
    kv_heads: int
    d: int  # width of a head
    scale: float  # of attention scores
    score_cap: float | None
    logit_cap: float | None


def describe(model: Any) -> Description:
    """The description of a model; raises Unsupported if the fused forward would differ from it."""
    family, config = FAMILIES.get(type(model).__name__), model.config.get_text_config()
    if family is None:
        raise Unsupported(f"there is no fused forward for {type(model).__name__}")
    check_devices(model)
    if any(map(_has_altered_forward, model.modules())):
        raise Unsupported("hooks or a replaced method take part in its forward")
    if getattr(config, "use_bidirectional_attention", False):
        raise Unsupported("its attention is not causal")
    body = getattr(model.model, "language_model", model.model)
    kinds, windows = _kinds(config, len(body.layers)), attention_windows(config)
    own_angles: list[str | None] = [*sorted(set(kinds))] if family.angles_by_layer_type else [None]
    layers, before = [], None
    for layer, kind in zip(body.layers, kinds, strict=True):
        norm = Norm(layer.input_layernorm.weight, before)
        rotary = own_angles.index(kind) if family.angles_by_layer_type else 0
        layers.append(_layer(layer, family, norm, rotary, windows.get(kind), config.rms_norm_eps))
        before = layer.post_feedforward_layernorm.weight if family.output_norms else None
    vocabulary, vocabulary_bias = projection(model.lm_head)
    attention, kv_heads = body.layers[0].self_attn, config.num_key_value_heads
    if {layer.qkv.shape[0] for layer in layers} != {(config.num_attention_heads + 2 * kv_heads) * attention.head_dim}:
        raise Unsupported("its layers differ in the shape of keys and values")
    return Description(
        layers=layers,
        embedding=body.embed_tokens.weight,
        embedding_scale=_embedding_scale(body.embed_tokens, family),
        norm=Norm(body.norm.weight, before),
        vocabulary=vocabulary,
        vocabulary_bias=vocabulary_bias,
        rotaries=[partial(_angles, body.rotary_emb, kind, family.half_angles) for kind in own_angles],
        positions=fixed_positions(config),
        kind=family.norm,
        eps=config.rms_norm_eps,
        heads=config.num_attention_heads,
        kv_heads=kv_heads,
        d=attention.head_dim,
        scale=float(attention.scaling),
        score_cap=None if family.score_cap is None else getattr(config, family.score_cap),
        logit_cap=None if family.logit_cap is None else getattr(config, family.logit_cap),
    )


def _layer(layer: Any, family: Family, norm: Norm, rotary: int, window: int | None, eps: float) -> Layer:
    attention = layer.self_attn
    o, o_bias = projection(attention.o_proj)
    if hasattr(attention, "qkv_proj"):
        qkv, bias = projection(attention.qkv_proj)
    else:
        qkv, bias = projection(attention.q_proj, attention.k_proj, attention.v_proj)
    head_norms = None
    if getattr(attention, "q_norm", None) is not None:
        head_norms = HeadNorms(attention.q_norm.weight, attention.k_norm.weight, eps, family.norm)
    after = layer.post_attention_layernorm.weight
    return Layer(
        norm=norm,
        qkv=qkv,
        qkv_bias=bias,
        head_norms=head_norms,
        rotary=rotary,
        window=window,
        sinks=getattr(attention, "sinks", None),
        o=o,
        o_bias=o_bias,
        mlp_norm=Norm(layer.pre_feedforward_layernorm.weight, after) if family.output_norms else Norm(after, None),
        mlp=_experts(layer.mlp) if family.experts else _gated(layer.mlp),
    )


def _gated(mlp: Any) -> GatedMlp:
    gate = type(getattr(mlp, "act_fn", None) or mlp.activation_fn)
    gelu = type(ACT2FN["gelu_pytorch_tanh"])
    if gate not in (gelu, type(ACT2FN["silu"])):
        raise Unsupported(f"its MLP has a gate of {gate.__name__}")
    if hasattr(mlp, "gate_up_proj"):
        gate_up, bias = projection(mlp.gate_up_proj)
    else:
        gate_up, bias = projection(mlp.gate_proj, mlp.up_proj)
    down, down_bias = projection(mlp.down_proj)
    if bias is not None or down_bias is not None:
        raise Unsupported("its MLP has biases")
    return GatedMlp(gate_up, down, gate is gelu)


def _experts(mlp: Any) -> ExpertsMlp:
    router, own = mlp.router, mlp.experts
    require_plain_parameters("its experts", router, own)
    weights = (own.gate_up_proj, own.gate_up_proj_bias, own.down_proj, own.down_proj_bias)
    return ExpertsMlp(router.weight, router.bias, Experts(*weights, router.top_k, own.alpha, own.limit))


def _kinds(config: Any, layers: int) -> list[str]:
    """The kind of each layer's attention, by transformers' names. Without names all layers have the model's window."""
    kinds = list(getattr(config, "layer_types", None) or ["sliding_attention"] * layers)
    if unknown := {*kinds} - {"sliding_attention", "full_attention"}:
        raise Unsupported(f"it has layers of the kind {min(unknown)}")
    return kinds[:layers]


def _embedding_scale(module: Any, family: Family) -> float:
    """The factor of the embeddings, rounded to their dtype as transformers does."""
    own = getattr(module, "embed_scale", None)
    if type(module) is not nn.Embedding and own is None:
        raise Unsupported(f"its embedding is not plain but {type(module).__name__}")
    if type(module.weight) is not nn.Parameter:
        raise Unsupported(f"the weight of its embedding is not plain but {type(module.weight).__name__}")
    if not family.scaled_embedding:
        return 1.0
    return float(torch.as_tensor(module.embedding_dim**0.5 if own is None else own).to(module.weight.dtype))


def _angles(rotary: Any, kind: str | None, half: bool, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of these positions, for layers of this kind, in the form of Llama."""
    cos, sin = rotary(like, positions) if kind is None else rotary(like, positions, kind)
    return (torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)) if half else (cos, sin)


def _has_altered_forward(module: nn.Module) -> bool:
    """Whether its forward was replaced or has hooks other than those of transformers or windfall."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(map(is_foreign_hook, hooks)) or "forward" in vars(module)
