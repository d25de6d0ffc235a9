"""Decoder layers of known models on a CPU: one call of a C kernel computes all layers for a few rows.

This works if nothing watches or replaces the layers and the modules in them. Otherwise each layer is a call, or its
modules use kernels, each its own (`cpu_modules.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from windfall.kernels.cpu.operands import readable, unobserved
from windfall.kernels.cpu_layers import Layer, LayerKernels, Linear, prepared_kernels
from windfall.kernels.few_rows import FLOAT32, FewRowsLinear, fits, rows_of_kernel
from windfall.kernels.packed import PackedLinear
from windfall.model.cpu_modules import MOST_ROWS, CpuAttention, CpuMlp, CpuNorm, WithKernels, use_kernels
from windfall.model.kv_cache import KVCache

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")  # whose norms, gates and attention are Llama's
KNOWN_MODELS = {(f"{family}ForCausalLM", f"{family}Model") for family in FAMILIES}
FROM_TRANSFORMERS = "transformers.models."  # the modules of its classes
SMALL_LAYER = 20_000_000  # weights of a layer up to which one call is faster than torch's products of one row
CAPTURING = "transformers.utils.output_capturing"


def use_cpu_layers(model: nn.Module) -> None:
    """Let the layers of this model use the kernels, if they are prepared."""
    names, kernels = {family + part: PARTS[part] for family in FAMILIES for part in PARTS}, prepared_kernels()
    if kernels is None:
        return
    for module in model.modules():
        own: Any = type(module)
        part = names.get(own.__name__)
        if part is not None and own.__module__.startswith(FROM_TRANSFORMERS) and part.fits(module):
            use_kernels(module, part, kernels)


class CpuDecoderLayer(WithKernels):
    """A decoder layer."""

    cpu_layer: KnownLayer | None = None

    @staticmethod
    def fits(module: Any) -> bool:
        return True

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **more: Any,
    ) -> Any:
        if position_embeddings is not None and isinstance(past_key_values, KVCache) and unobserved():
            known = _known([self], hidden_states.shape[:-1].numel())
            given = hidden_states, attention_mask, past_key_values, position_embeddings
            outputs = None if known is None else _computed(self.cpu_kernels, known, *given)
            if outputs is not None:
                return outputs[0]
        all_given = hidden_states, attention_mask, position_ids, past_key_values, use_cache, position_embeddings
        return super().forward(*all_given, **more)


def all_states(
    model: Any, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache
) -> tuple[Tensor, ...] | None:
    """A model's states [B, n, H] at the boundaries of its layers, and what its final norm returns; no mask: causal.

    None: this is no known model with kernels, or the kernel cannot compute all its layers for these rows.
    """
    base: Any = model.base_model
    kernels, names = prepared_kernels(), (type(model).__name__, type(base).__name__)
    own = all(type(module).__module__.startswith(FROM_TRANSFORMERS) for module in (model, base))
    if kernels is None or names not in KNOWN_MODELS or not own or not unobserved():
        return None
    layers = [*base.layers][: base.config.num_hidden_layers]
    known = _known(layers, tokens.numel())
    plain = mask is None or (isinstance(mask, Tensor) and mask.dtype is torch.bool)
    if known is None or not plain or any(map(_watched, (model, base, *layers))):
        return None
    x = base.embed_tokens(tokens)
    outputs = _computed(kernels, known, x, mask, cache, base.rotary_emb(x, position_ids=positions))
    return None if outputs is None else (x, *outputs, base.norm(outputs[-1]))


def _known(layers: list[Any], rows: int) -> list[KnownLayer] | None:
    """What the kernel needs to know of these layers; None: it cannot or should not compute them all for these rows."""
    if rows > MOST_ROWS or not rows_of_kernel():
        return None
    found: list[KnownLayer] = []
    for layer in layers:
        if not isinstance(layer, CpuDecoderLayer):
            return None
        known = layer.cpu_layer
        if known is None or not known.is_current():
            known = vars(layer)["cpu_layer"] = known_layer(layer)
        fast = rows in rows_of_kernel() or known.weights <= SMALL_LAYER
        if known.layer is None or not fast or (found and known.sizes != found[0].sizes):
            return None
        found.append(known)
    return found


def _computed(
    kernels: LayerKernels,
    layers: list[KnownLayer],
    x: Tensor,
    mask: Tensor | None,
    past: KVCache,
    angles: tuple[Tensor, Tensor],
) -> tuple[Tensor, ...] | None:
    """What each of these successive layers returns; None, and nothing is stored: the kernel cannot read a tensor."""
    heads, width = layers[0].sizes[1:]
    cos, sin = (each.expand(len(x), -1, -1) for each in angles)
    keys = x.new_empty(len(x), 1, heads * width)
    caches = [past.layers[each.number].allocated(keys, width) for each in layers]
    wide = None if mask is None else mask.expand(len(x), -1, -1, -1)
    own = [each.layer for each in layers if each.layer is not None]
    found = kernels.decoder_layers(own, x, cos, sin, caches, past.end, wide)
    return None if found is None else found.unbind()


class Place(NamedTuple):
    """A tensor of a module, and where its numbers are."""

    holder: dict[str, Any]  # its module's parameters or buffers
    name: str
    tensor: Tensor | None
    address: int


def unchanged(places: list[Place]) -> bool:
    """Whether the same tensors are in the same places."""
    for holder, name, tensor, address in places:  # a loop is faster, and this runs many times in a pass
        if holder.get(name) is not tensor or (tensor is not None and tensor.data_ptr() != address):
            return False
    return True


class KnownLayer(NamedTuple):
    """What a kernel needs to know of a decoder layer, and on which modules and tensors this depends."""

    layer: Layer | None  # None: the kernel cannot compute it
    sizes: tuple[int, int, int]  # hidden, kv_heads, width
    weights: int  # in float32
    number: int  # of the layer in the cache
    places: list[Place]
    children: list[tuple[dict[str, Any], str, nn.Module | None]]  # the modules in it, where they are registered
    modules: list[nn.Module]
    attributes: list[Any]  # their `vars`
    watched: bool  # by hooks

    def is_current(self) -> bool:
        for children, name, module in self.children:  # this runs for each layer of each pass
            if children.get(name) is not module:
                return False
        if not unchanged(self.places):
            return False
        for own in self.attributes:
            if (own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own) and not self.watched:
                return not any(map(_watched, self.modules))
        return not self.watched or any(map(_watched, self.modules))


def known_layer(module: Any) -> KnownLayer:
    """What the kernel needs to know of this decoder layer, as it is now."""
    attention, mlp = module.self_attn, module.mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    norms = [module.input_layernorm, module.post_attention_layernorm]
    norms += [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    modules = [attention, mlp, *linears, *(norm for norm in norms if norm is not None)]
    places: list[Place] = []
    own = [linear_of(linear, places) for linear in linears]
    weights = [_norm(norm, places) for norm in norms]
    layer, watched = None, any(map(_watched, modules))
    kinds = isinstance(attention, CpuAttention) and isinstance(mlp, CpuMlp)
    if kinds and None not in weights and not watched:
        eps = [0.0 if norm is None else norm.variance_epsilon for norm in norms]
        layer = as_layer(own, weights, eps, attention.head_dim, attention.scaling)
    whole = [place.tensor for place in places if place.tensor is not None and place.tensor.is_floating_point()]
    numbers, attributes = sum(tensor.numel() for tensor in whole), [*map(vars, modules)]
    sizes = (0, 0, 0) if layer is None else (layer.o.outputs, layer.kv_heads, layer.width)
    children = [
        (part._modules, name, part._modules.get(name)) for part in (module, attention, mlp) for name in part._modules
    ]
    return KnownLayer(layer, sizes, numbers, attention.layer_idx, places, children, modules, attributes, watched)


def as_layer(
    linears: list[Linear | None], norms: list[Any], eps: list[float], width: int, scale: float, read: int = 1
) -> Layer | None:
    """A layer for the kernel; None: a linear layer is missing, or the sizes do not belong together.

    Attention has heads of this width. It reads `read` states of a row, side by side.
    """
    known = [linear for linear in linears if linear is not None]
    if len(known) < len(linears):
        return None
    heads = (known[0].outputs // width, known[1].outputs // width, width)
    layer = Layer(*known, *norms, *heads, *eps, scale)
    return layer if _sizes_agree(layer, read) else None


def _sizes_agree(layer: Layer, read: int) -> bool:
    """Whether the sizes of its linear layers belong together."""
    hidden, heads, shared = layer.o.outputs, layer.heads * layer.width, layer.kv_heads * layer.width
    outputs = [each.outputs for each in (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)]
    inputs = [each.inputs for each in (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)]
    inner = layer.gate.outputs
    return (
        outputs == [heads, shared, shared, hidden, inner, inner, hidden]
        and inputs == [read * hidden, read * hidden, read * hidden, heads, hidden, hidden, inner]
        and layer.heads % layer.kv_heads == 0
    )


def linear_of(module: Any, places: list[Place]) -> Linear | None:
    """This linear layer for the kernel; None: it cannot read it. The tensors are added to `places`."""
    if type(module) is PackedLinear:
        holder, name, format = module._buffers, "panels", module.format
    elif type(module) in (nn.Linear, FewRowsLinear):
        holder, name, format = module._parameters, "weight", FLOAT32
    else:
        return None
    weight: Any = holder[name]
    bias = module._parameters.get("bias")
    sizes = weight.shape if format == FLOAT32 else (module.out_features, module.in_features)
    places += [place_of(holder, name), place_of(module._parameters, "bias")]
    numbers = [tensor for tensor in (weight if format == FLOAT32 else None, bias) if tensor is not None]
    plain = readable(*numbers) and all(each.is_contiguous() for each in (weight, *numbers)) and weight.is_cpu
    if not plain or not (format != FLOAT32 or fits(*sizes)):
        return None
    return Linear(weight.data_ptr(), None if bias is None else bias.data_ptr(), *sizes, format)


def _norm(module: Any, places: list[Place]) -> int | None:
    """Where the weights of this norm are; 0: there is no norm. None: the kernel cannot compute it."""
    if module is None:
        return 0
    if not isinstance(module, CpuNorm):
        return None
    places.append(place_of(module._parameters, "weight"))
    return module.weight.data_ptr() if readable(module.weight) and module.weight.is_contiguous() else None


def place_of(holder: dict[str, Any], name: str) -> Place:
    tensor = holder.get(name)
    return Place(holder, name, tensor, 0 if tensor is None else tensor.data_ptr())


def _watched(module: nn.Module) -> bool:
    """Whether hooks see what this module computes, or another function computes it.

    transformers' own hooks only collect states, and attention weights, which are not computed in passes over windfall's
    KV cache.
    """
    own = vars(module)
    if own["_forward_pre_hooks"] or "forward" in own:
        return True
    hooks = own["_forward_hooks"]
    return bool(hooks) and any(getattr(hook, "__module__", "") != CAPTURING for hook in hooks.values())


PARTS: dict[str, Any] = {
    "RMSNorm": CpuNorm,
    "MLP": CpuMlp,
    "Attention": CpuAttention,
    "DecoderLayer": CpuDecoderLayer,
}
