"""Describes the models that the fused forward runs, from their modules and configurations.

Each family of models has one line in FAMILIES, which says how it differs from Llama. What a family does not have to
name is read from the model: windows and their rotary angles, biases, sinks, norms of heads, merged projections, experts
and activations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from windfall.engine.gpu.forward import Unsupported, check_devices
from windfall.engine.gpu.model_guard import is_foreign_hook
from windfall.engine.gpu.rope import NO_ANGLES, AngleForm, Rotary, fixed_positions, in_halves
from windfall.engine.gpu.weights import projection, require_plain_parameters
from windfall.kernels.expert_weights import Experts
from windfall.kernels.norm_kinds import LLAMA_ROTATION, Activation, HeadNorms, NormKind, NormStyle, Rotation
from windfall.kernels.product import Weight
from windfall.model.decoder import attention_windows


class LayerNorms(NamedTuple):
    """The names of a layer's norms: of the inputs and outputs of attention and MLP. None: there is no such norm."""

    attention: str | None = "input_layernorm"
    attention_output: str | None = None
    mlp: str | None = "post_attention_layernorm"
    mlp_output: str | None = None


class Family(NamedTuple):
    """How the models of a family differ from Llama."""

    norm: NormKind = NormKind.ROUNDED
    norms: LayerNorms = LayerNorms()
    parallel: bool = False  # attention and MLP have the same input; their outputs are added to the residual together
    joint_head_norms: bool = False  # queries of all heads are normalised together, and so are keys
    rotation: Rotation = LLAMA_ROTATION
    angles: AngleForm = AngleForm.TWICE  # of the rotary module's output
    rotates: Callable[[Any], bool] = lambda attention: True  # whether this attention has rotary angles
    scaled_embedding: bool = False  # embeddings are multiplied by the square root of their width
    clamped_experts: bool = False  # experts are those of gpt-oss
    # The names of settings in the model's configuration:
    eps: str = "rms_norm_eps"  # of norms
    embedding_scale: str | None = None  # factor of embeddings
    residual_scale: str | None = None  # factor of the outputs of attention and MLP before they are added
    logit_scale: str | None = None  # factor of logits
    logit_divisor: str | None = None  # divisor of logits
    score_cap: str | None = None  # soft cap of attention scores
    logit_cap: str | None = None  # soft cap of logits


AROUND = LayerNorms(
    attention_output="post_attention_layernorm",
    mlp="pre_feedforward_layernorm",
    mlp_output="post_feedforward_layernorm",
)
OUTPUTS = AROUND._replace(attention=None, mlp=None)
GLM4 = LayerNorms(attention_output="post_self_attn_layernorm", mlp_output="post_mlp_layernorm")
GEMMA = Family(norm=NormKind.WIDE_PLUS_ONE, scaled_embedding=True)
GEMMA2 = GEMMA._replace(norms=AROUND, score_cap="attn_logit_softcapping", logit_cap="final_logit_softcapping")
GEMMA3 = GEMMA._replace(norms=AROUND, logit_cap="final_logit_softcapping")
GRANITE = Family(
    embedding_scale="embedding_multiplier", residual_scale="residual_multiplier", logit_divisor="logits_scaling"
)
OLMO2 = Family(norm=NormKind.WIDE, norms=OUTPUTS, joint_head_norms=True, rotation=Rotation(wide=True))
COHERE = Family(
    norm=NormKind.CENTRED,
    norms=LayerNorms(mlp="input_layernorm"),
    parallel=True,
    rotation=Rotation(adjacent=True, wide=True),
    angles=AngleForm.REPEATED,
    eps="layer_norm_eps",
    logit_scale="logit_scale",
)
FAMILIES = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(),
    "MinistralForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(),
    "Qwen3ForCausalLM": Family(),
    "Phi3ForCausalLM": Family(),
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3._replace(logit_cap=None),  # its text part
    "GptOssForCausalLM": Family(norm=NormKind.WIDE, angles=AngleForm.ONCE, clamped_experts=True),
    "Qwen3MoeForCausalLM": Family(),
    "MellumForCausalLM": Family(),
    "MixtralForCausalLM": Family(),
    "OlmoeForCausalLM": Family(joint_head_norms=True),
    "SmolLM3ForCausalLM": Family(rotates=lambda attention: bool(attention.use_rope)),
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO2,
    "GraniteForCausalLM": GRANITE,
    "CohereForCausalLM": COHERE,
    "Cohere2ForCausalLM": COHERE._replace(rotates=lambda attention: attention.sliding_window is not None),
    "GlmForCausalLM": Family(rotation=Rotation(adjacent=True)),
    "Glm4ForCausalLM": Family(norms=GLM4, rotation=Rotation(adjacent=True)),
    "Starcoder2ForCausalLM": Family(norm=NormKind.CENTRED, eps="norm_epsilon"),
    "Exaone4ForCausalLM": Family(
        norms=OUTPUTS, rotates=lambda attention: attention.sliding_window is None or bool(attention.is_sliding)
    ),
    "Ernie4_5ForCausalLM": Family(rotation=Rotation(adjacent=True, wide=True)),
    "SeedOssForCausalLM": Family(),
    "ArceeForCausalLM": Family(),
    "CwmForCausalLM": Family(),
    "HeliumForCausalLM": Family(norm=NormKind.WIDE, rotation=Rotation(adjacent=True)),
}


class Norm(NamedTuple):
    """The norm of the residual stream before attention, before an MLP or before the vocabulary head."""

    weight: Tensor | None  # None: the stream is not normalised
    style: NormStyle


class GatedMlp(NamedTuple):
    """down(gate(x) * up(x)); `gate_up` holds both projections."""

    gate_up: Weight
    down: Weight
    gelu: bool  # whether the gate is GELU in its tanh form, rather than SiLU


class PlainMlp(NamedTuple):
    """down(activation(up(x)))"""

    up: Weight
    up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None
    activation: Activation


class ExpertsMlp(NamedTuple):
    """A mixture of experts, with the weight and bias of its router."""

    router: Tensor
    router_bias: Tensor | None
    experts: Experts


class Layer(NamedTuple):
    """One layer; `qkv` holds the projections of queries, keys and values."""

    norm: Norm
    qkv: Weight
    qkv_bias: Tensor | None
    head_norms: HeadNorms | None
    rotary: int  # index into Description.rotaries, or NO_ANGLES
    window: int | None
    sinks: Tensor | None
    o: Weight
    o_bias: Tensor | None
    mlp_norm: Norm
    mlp: GatedMlp | PlainMlp | ExpertsMlp


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
    rotation: Rotation
    eps: float
    heads: int
    kv_heads: int
    d: int  # width of a head
    scale: float  # of attention scores
    score_cap: float | None
    logit_scale: float | None
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
    if getattr(config, "clip_qkv", None) is not None:
        raise Unsupported("it clips queries, keys and values")
    try:
        return _described(model, family, config)
    except AttributeError as error:  # another version of transformers, or a quantised form
        raise Unsupported(f"its modules are not as expected: {error}") from error


def _described(model: Any, family: Family, config: Any) -> Description:
    """The description of a model of this family."""
    body = getattr(model.model, "language_model", model.model)
    kinds, windows = _kinds(config, len(body.layers)), attention_windows(config)
    by_kind = any(isinstance(part, dict) for part in (config.rope_parameters or {}).values())
    own_angles: list[str | None] = [*sorted(set(kinds))] if by_kind else [None]
    layers, before = [], None
    for layer, kind in zip(body.layers, kinds, strict=True):
        rotary = own_angles.index(kind) if by_kind else 0
        layers.append(_layer(layer, family, config, before, rotary, windows.get(kind)))
        before = _before(layer, family.norms.mlp_output, family, config)
    vocabulary, vocabulary_bias = projection(model.lm_head)
    attention, kv_heads = body.layers[0].self_attn, config.num_key_value_heads
    if {layer.qkv.shape[0] for layer in layers} != {(config.num_attention_heads + 2 * kv_heads) * attention.head_dim}:
        raise Unsupported("its layers differ in the shape of keys and values")
    divisor = _factor(config, family.logit_divisor)
    return Description(
        layers=layers,
        embedding=body.embed_tokens.weight,
        embedding_scale=_embedding_scale(body.embed_tokens, family, config),
        norm=_norm(body, "norm", family, before),
        vocabulary=vocabulary,
        vocabulary_bias=vocabulary_bias,
        rotaries=[partial(_angles, body.rotary_emb, kind, family.angles) for kind in own_angles],
        positions=fixed_positions(config),
        rotation=family.rotation,
        eps=getattr(config, family.eps),
        heads=config.num_attention_heads,
        kv_heads=kv_heads,
        d=attention.head_dim,
        scale=float(attention.scaling),
        score_cap=_setting(config, family.score_cap),
        logit_scale=_factor(config, family.logit_scale) if divisor is None else 1 / divisor,
        logit_cap=_setting(config, family.logit_cap),
    )


def _setting(config: Any, key: str | None) -> float | None:
    """A number of the configuration; None where the family has no such key."""
    found = None if key is None else getattr(config, key)
    return None if found is None else float(found)


def _factor(config: Any, key: str | None) -> float | None:
    """The same for a factor; None also where it is 1."""
    found = _setting(config, key)
    return None if found == 1 else found


def _before(layer: Any, output_norm: str | None, family: Family, config: Any) -> Tensor | float | None:
    """What is done to the output of attention or MLP before it is added to the residual stream."""
    if output_norm is not None:
        weight: Tensor = getattr(layer, output_norm).weight
        return weight
    return _factor(config, family.residual_scale)


def _norm(owner: Any, name: str | None, family: Family, before: Tensor | float | None, parallel: bool = False) -> Norm:
    """The norm with this name, and how an output is added to the stream before it."""
    module = None if name is None else getattr(owner, name)
    bias = getattr(module, "bias", None)
    return Norm(None if module is None else module.weight, NormStyle(family.norm, bias, before, parallel))


def _layer(
    layer: Any, family: Family, config: Any, before: Tensor | float | None, rotary: int, window: int | None
) -> Layer:
    attention, names = layer.self_attn, family.norms
    o, o_bias = projection(attention.o_proj)
    if hasattr(attention, "qkv_proj"):
        qkv, bias = projection(attention.qkv_proj)
    else:
        qkv, bias = projection(attention.q_proj, attention.k_proj, attention.v_proj)
    head_norms = None
    if getattr(attention, "q_norm", None) is not None:
        weights = attention.q_norm.weight.flatten(), attention.k_norm.weight.flatten()
        head_norms = HeadNorms(*weights, getattr(config, family.eps), family.norm, family.joint_head_norms)
    attention_before = _before(layer, names.attention_output, family, config)
    return Layer(
        norm=_norm(layer, names.attention, family, before),
        qkv=qkv,
        qkv_bias=bias,
        head_norms=head_norms,
        rotary=rotary if family.rotates(attention) else NO_ANGLES,
        window=window,
        sinks=getattr(attention, "sinks", None),
        o=o,
        o_bias=o_bias,
        mlp_norm=_norm(layer, names.mlp, family, attention_before, family.parallel),
        mlp=_mlp(layer.mlp, family),
    )


def _mlp(mlp: Any, family: Family) -> GatedMlp | PlainMlp | ExpertsMlp:
    if hasattr(mlp, "experts"):
        return _clamped_experts(mlp) if family.clamped_experts else _experts(mlp)
    return _gated(mlp) if hasattr(mlp, "gate_proj") or hasattr(mlp, "gate_up_proj") else _plain(mlp)


def _plain(mlp: Any) -> PlainMlp:
    up, down = (mlp.c_fc, mlp.c_proj) if hasattr(mlp, "c_fc") else (mlp.up_proj, mlp.down_proj)
    function = type(getattr(mlp, "act", None) or mlp.act_fn)
    known = {type(ACT2FN["gelu_pytorch_tanh"]): Activation.GELU, type(ACT2FN["relu2"]): Activation.RELU_SQUARED}
    if function not in known:
        raise Unsupported(f"its MLP has an activation of {function.__name__}")
    return PlainMlp(*projection(up), *projection(down), known[function])


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


def _clamped_experts(mlp: Any) -> ExpertsMlp:
    router, own = mlp.router, mlp.experts
    require_plain_parameters("its experts", router, own)
    weights = (own.gate_up_proj, own.gate_up_proj_bias, own.down_proj, own.down_proj_bias)
    return ExpertsMlp(router.weight, router.bias, Experts(*weights, router.top_k, own.alpha, own.limit))


def _experts(mlp: Any) -> ExpertsMlp:
    """Experts as most models have them: with SiLU gates and without biases."""
    router, own = mlp.gate, mlp.experts
    if type(own.act_fn) is not type(ACT2FN["silu"]):
        raise Unsupported(f"its experts have a gate of {type(own.act_fn).__name__}")
    require_plain_parameters("its experts", router, own)
    experts = Experts(
        gate_up=own.gate_up_proj,
        gate_up_bias=None,
        down=own.down_proj,
        down_bias=None,
        top_k=router.top_k,
        limit=None,
        linear=True,
        normalised=getattr(router, "norm_topk_prob", True),
        wide=not hasattr(router, "norm_topk_prob"),  # Mixtral does not round the shares
    )
    return ExpertsMlp(router.weight, None, experts)


def _kinds(config: Any, layers: int) -> list[str]:
    """The kind of each layer's attention, by transformers' names. Without names all layers have the model's window."""
    kinds = list(getattr(config, "layer_types", None) or ["sliding_attention"] * layers)
    if unknown := {*kinds} - {"sliding_attention", "full_attention"}:
        raise Unsupported(f"it has layers of the kind {min(unknown)}")
    return kinds[:layers]


def _embedding_scale(module: Any, family: Family, config: Any) -> float:
    """The factor of the embeddings; that of Gemma is rounded to their dtype, as in transformers."""
    own = getattr(module, "embed_scale", None)
    if type(module) is not nn.Embedding and own is None:
        raise Unsupported(f"its embedding is not plain but {type(module).__name__}")
    if type(module.weight) is not nn.Parameter:
        raise Unsupported(f"the weight of its embedding is not plain but {type(module.weight).__name__}")
    if not family.scaled_embedding:
        return _setting(config, family.embedding_scale) or 1.0
    return float(torch.as_tensor(module.embedding_dim**0.5 if own is None else own).to(module.weight.dtype))


def _angles(rotary: Any, kind: str | None, form: AngleForm, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of these positions, for layers of this kind, in the form of Llama."""
    cos, sin = rotary(like, positions) if kind is None else rotary(like, positions, kind)
    return in_halves(cos, form), in_halves(sin, form)


def _has_altered_forward(module: nn.Module) -> bool:
    """Whether its forward was replaced or has hooks other than those of transformers or windfall."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(map(is_foreign_hook, hooks)) or "forward" in vars(module)
