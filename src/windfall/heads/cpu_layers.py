"""The first layer of EAGLE-3 heads in one call of a C kernel, on a CPU (kernels/cpu_layers.py)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from windfall.heads.eagle3 import ConcatLayer
from windfall.heads.layers import Memory, RMSNorm
from windfall.kernels.cpu.operands import readable, unobserved
from windfall.kernels.cpu_layers import WIDTH_STEP, Layer, LayerKernels, prepared_kernels
from windfall.model.cpu_layers import Place, as_layer, linear_of, place_of, unchanged
from windfall.model.cpu_modules import MOST_ROWS, WithKernels, is_silu, use_kernels
from windfall.model.kv_cache import KVCache


def use_cpu_layers(head: nn.Module) -> None:
    """Let the layers of this head, whose weights stay as they are, use the kernels, if they are prepared."""
    kernels = prepared_kernels()
    for module in head.modules():
        known = _known_layer(module) if type(module) is ConcatLayer else None
        if kernels is not None and known is not None:
            use_kernels(module, CpuConcatLayer, kernels)
            vars(module)["cpu_layer"] = known


class CpuConcatLayer(WithKernels):
    """A layer whose attention reads the concatenated embedding and feature."""

    cpu_kernels: LayerKernels
    cpu_layer: tuple[Layer, list[Place]]  # and the tensors that it reads
    self_attn: Any
    hidden_norm: RMSNorm
    normed_residual: bool

    def forward(self, embedded: Tensor, hidden: Tensor, turn: tuple[Tensor, Tensor], memory: Memory) -> Any:
        found, cache = None, getattr(memory, "cache", None)
        if isinstance(cache, KVCache) and unobserved() and hidden.shape[:-1].numel() <= MOST_ROWS:
            found = self._by_kernel(embedded, hidden, turn, memory, cache)
        return super().forward(embedded, hidden, turn, memory) if found is None else found

    def _by_kernel(
        self, embedded: Tensor, hidden: Tensor, turn: tuple[Tensor, Tensor], memory: Any, cache: KVCache
    ) -> Tensor | None:
        (layer, places), batch, place = self.cpu_layer, len(hidden), self.self_attn.place
        if not unchanged(places):
            return None
        cos, sin = (angles[:, 0].expand(batch, -1, -1) for angles in turn)
        storage = cache.layers[place].allocated(hidden.new_empty(batch, 1, layer.kv_heads * layer.width), layer.width)
        mask = memory.mask_of(place)
        given = embedded, hidden, cos, sin, storage, cache.end, None if mask is None else mask[:, None]
        return self.cpu_kernels.concat_layer(layer, self.hidden_norm.weight, self.normed_residual, *given)


def _known_layer(module: Any) -> tuple[Layer, list[Place]] | None:
    """This layer for the kernel, and the tensors that it reads; None: the kernel cannot compute it."""
    attention, mlp = module.self_attn, module.mlp
    places: list[Place] = []
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    own = [linear_of(linear, places) for linear in (*linears, mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    norms = [module.input_layernorm, module.post_attention_layernorm, attention.q_norm, attention.k_norm]
    known = [norm for norm in (*norms, module.hidden_norm) if norm is not None]
    plain = all(readable(norm.weight) and norm.weight.numel() % WIDTH_STEP == 0 for norm in known)
    width = attention.dim
    if not plain or not is_silu(mlp.act) or width % WIDTH_STEP or module.hidden_norm.eps != norms[0].eps:
        return None
    weights = [0 if norm is None else norm.weight.data_ptr() for norm in norms]
    eps = [0.0 if norm is None else norm.eps for norm in norms]
    layer = as_layer(own, weights, eps, width, width**-0.5, read=2)
    places += [place_of(norm._parameters, "weight") for norm in known]
    return None if layer is None else (layer, places)
