"""Modules of known models that use the kernels of `kernels/cpu_layers.py` on a CPU.

A module keeps its parameters and its name; its class becomes a subclass that uses a kernel where it can, and otherwise
computes what its own class computes: with gradients, in other dtypes, and in passes of many rows.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from windfall.kernels.cpu.operands import readable, unobserved
from windfall.kernels.cpu_layers import WIDTH_STEP, LayerKernels
from windfall.model.kv_cache import KVCache

MOST_ROWS = 64  # of all texts of a pass; torch's attention is faster with more
STATE = ("cpu_kernels", "cpu_layer")  # attributes that copies do not get


class WithKernels(nn.Module):
    """A module that has another class than it was made with. Copies, and what is saved, have its own class again."""

    cpu_kernels: LayerKernels

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in vars(self).items() if name not in STATE}
        return _without_state, (type(self).__bases__[1],), state


def _without_state(own: type[nn.Module]) -> nn.Module:
    return own.__new__(own)


def use_kernels(module: Any, part: type[WithKernels], kernels: LayerKernels) -> None:
    """Let this module use the kernels as `part` does."""
    module.__class__ = _combined(type(module), part)  # type: ignore[arg-type]
    vars(module)["cpu_kernels"] = kernels


@cache
def _combined(own: type, part: type) -> type:
    return type(f"Cpu{own.__name__}", (part, own), {"__doc__": part.__doc__})


class CpuNorm(WithKernels):
    """A norm of rows."""

    weight: nn.Parameter
    variance_epsilon: float

    @staticmethod
    def fits(module: Any) -> bool:
        return bool(module.weight.shape[-1] % WIDTH_STEP == 0)

    def forward(self, hidden_states: Tensor) -> Any:
        weight = self.weight
        if not (hidden_states.shape[-1:] == weight.shape and unobserved() and readable(hidden_states, weight)):
            return super().forward(hidden_states)
        return self.cpu_kernels.norm(hidden_states, weight, self.variance_epsilon)


class CpuMlp(WithKernels):
    """A gated MLP."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module

    @staticmethod
    def fits(module: Any) -> bool:
        return is_silu(module.act_fn)

    def forward(self, x: Tensor) -> Any:
        if x.shape[:-1].numel() > MOST_ROWS or not unobserved():
            return super().forward(x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        fit = gate.shape == up.shape and gate.shape[-1] % WIDTH_STEP == 0 and readable(gate, up)
        return self.down_proj(self.cpu_kernels.gate_up(gate, up) if fit else self.act_fn(gate) * up)


class CpuAttention(WithKernels):
    """Attention over windfall's KV cache."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    head_dim: int
    layer_idx: int
    scaling: float

    @staticmethod
    def fits(module: Any) -> bool:
        return bool(module.head_dim % WIDTH_STEP == 0)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **more: Any,
    ) -> Any:
        own = partial(super().forward, hidden_states, position_embeddings, attention_mask, past_key_values, **more)
        batch, rows = hidden_states.shape[:2]
        known = attention_mask is None or attention_mask.dtype is torch.bool
        cached = isinstance(past_key_values, KVCache) and position_embeddings[0].shape[-1] == self.head_dim
        if not (known and cached and unobserved()) or batch * rows > MOST_ROWS:
            return own()
        queries, keys, values = (project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj))
        if (query_norm := getattr(self, "q_norm", None)) is not None:  # of each head
            queries = query_norm(queries.view(batch, rows, -1, self.head_dim)).flatten(2)
            keys = self.get_submodule("k_norm")(keys.view(batch, rows, -1, self.head_dim)).flatten(2)
        cos, sin = (angles.expand(batch, -1, -1) for angles in position_embeddings)
        cache = past_key_values.layers[self.layer_idx].allocated(keys, self.head_dim)
        mask = None if attention_mask is None else attention_mask.expand(batch, -1, -1, -1)
        given = queries, keys, values, cos, sin, cache, past_key_values.end, mask
        found = self.cpu_kernels.attention(*given, self.scaling)
        return own() if found is None else (self.o_proj(found), None)


def is_silu(function: Any) -> bool:
    return isinstance(function, nn.SiLU | type(_silu()))


@cache
def _silu() -> Any:
    from transformers.activations import ACT2FN

    return ACT2FN["silu"]
