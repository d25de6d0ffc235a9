"""Fused element-wise operations of a transformer layer. Results are rounded where transformers rounds them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.kernels.backend import on_triton
from windfall.kernels.norm_kinds import (
    LLAMA_NORM,
    LLAMA_ROTATION,
    Activation,
    HeadNorms,
    NormKind,
    NormStyle,
    Rotation,
)
from windfall.kernels.scatter import Scatter


def add_norm(
    x: Tensor,  # [n, width]
    residual: Tensor | None,  # [n, width]; None: the sum is x
    weight: Tensor | None,  # [width], or [p, width]: row i uses weight i % p; None: the sum is not normalised
    eps: float,
    pick: Tensor | None = None,  # [m] long: the rows to compute; None: all rows
    scatter: Scatter | None = None,
    style: NormStyle = LLAMA_NORM,
) -> tuple[Tensor, Tensor]:
    """(weight * normalised(x + residual), x + residual), both [n, width], or [m, width] with `pick`.

    `style` says what else happens to x, to the sum and to the result; `before` and `parallel` need a residual.
    """
    if on_triton(x):
        from windfall.kernels.triton.norm import add_norm as run
    else:
        run = add_norm_reference
    return run(x, residual, weight, eps, pick, scatter, style)


def add_norm_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    pick: Tensor | None = None,
    scatter: Scatter | None = None,
    style: NormStyle = LLAMA_NORM,
) -> tuple[Tensor, Tensor]:
    """`add_norm` with torch."""
    if style.before is not None:
        x = x * style.before if isinstance(style.before, float) else norm(x, style.before, eps, style.kind)
    x = x if residual is None else residual + x
    if weight is None:
        return x, x
    if weight.dim() == 2:
        weight = weight.repeat(-(-len(x) // len(weight)), 1)[: len(x)]
    if pick is not None:
        x, weight = x[pick], weight if weight.dim() == 1 else weight[pick]
    normed = norm(x if residual is None or not style.parallel else residual, weight, eps, style.kind, style.bias)
    if scatter is not None:
        scatter.buffer.index_copy_(0, scatter.rows, normed if scatter.normed else x)
    return normed, x


def norm(x: Tensor, weight: Tensor, eps: float, kind: NormKind, bias: Tensor | None = None) -> Tensor:
    """A norm over the last dimension, with torch."""
    wide = x.float()
    if kind is NormKind.CENTRED:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if kind is NormKind.ROUNDED:
        made = weight * wide.to(x.dtype)
    else:
        made = wide * (1.0 + weight.float() if kind is NormKind.WIDE_PLUS_ONE else weight)
    return (made if bias is None else made + bias).to(x.dtype)


def gate_mul(gate_up: Tensor, gelu: bool = False) -> Tensor:
    """silu(left half) * right half: [n, 2m] → [n, m]. With `gelu`, the tanh form of GELU instead of SiLU."""
    if on_triton(gate_up):
        from windfall.kernels.triton.norm import gate_mul as compiled

        return compiled(gate_up, gelu)
    return gate_mul_reference(gate_up, gelu)


def gate_mul_reference(gate_up: Tensor, gelu: bool = False) -> Tensor:
    """`gate_mul` with torch."""
    gate, up = gate_up.chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up


def activate(x: Tensor, activation: Activation) -> Tensor:
    """The activation of an MLP without a gate, [n, m] → [n, m], in place."""
    if on_triton(x):
        from windfall.kernels.triton.norm import activate as compiled

        return compiled(x, activation)
    return x.relu_().square_() if activation is Activation.RELU_SQUARED else x.copy_(F.gelu(x, approximate="tanh"))


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in place."""
    if on_triton(x):
        from windfall.kernels.triton.norm import soft_cap as compiled

        return compiled(x, cap)
    return x.div_(cap).tanh_().mul_(cap)


def rotate_and_store(
    qkv: Tensor,  # [n, (heads + 2 * kv_heads) * d]: queries, keys, values
    cos: Tensor,  # [n, r]: the first r dimensions of a head are rotated, r <= d
    sin: Tensor,  # [n, r]
    keys: Tensor,  # [kv_heads, capacity, d], written
    values: Tensor,  # [kv_heads, capacity, d], written
    slots: Tensor,  # [n] integers: each row's slot in the KV cache
    positions: Tensor | None = None,  # [n] long
    norms: HeadNorms | None = None,
    rotation: Rotation = LLAMA_ROTATION,
) -> Tensor:
    """Apply rotary embedding to queries and keys, store keys and values in the KV cache → queries [n, heads, d].

    With `positions`, cos and sin are tables [p, r], indexed by them. Positions outside the tables use the
    nearest row: unused seats may have any position. With `norms`, queries and keys are normalised first. In every kind
    of rotation, the first half of cos and sin belongs to the first dimension of each pair.
    """
    if on_triton(qkv):
        from windfall.kernels.triton.norm import rotate_and_store as run
    else:
        run = rotate_and_store_reference
    return run(qkv, cos, sin, keys, values, slots, positions, norms, rotation)


def rotate_and_store_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor | None = None,
    norms: HeadNorms | None = None,
    rotation: Rotation = LLAMA_ROTATION,
) -> Tensor:
    """`rotate_and_store` with torch."""
    if positions is not None:
        cos, sin = (x[positions.clamp(0, len(x) - 1)] for x in (cos, sin))
    shared, width = keys.shape[0], keys.shape[2]
    rows = qkv.reshape(len(qkv), -1, width)  # [n, heads + 2 * kv_heads, d]
    queries, key, value = rows[:, : -2 * shared], rows[:, -2 * shared : -shared], rows[:, -shared:]
    if norms is not None:
        queries, key = (norm_heads(x, w, norms) for x, w in ((queries, norms.queries), (key, norms.keys)))
    both = rotated(torch.cat([queries, key], 1), cos[:, None], sin[:, None], rotation)
    keys.index_copy_(1, slots.long(), both[:, -shared:].transpose(0, 1))
    values.index_copy_(1, slots.long(), value.transpose(0, 1))
    return both[:, :-shared]


def norm_heads(x: Tensor, weight: Tensor, norms: HeadNorms) -> Tensor:
    """Norms of heads [n, heads, d], with torch."""
    if norms.joint:
        return norm(x.flatten(1), weight, norms.eps, norms.kind).view_as(x)
    return norm(x, weight.view(-1, x.shape[2]), norms.eps, norms.kind)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, rotation: Rotation) -> Tensor:
    """The first dimensions of heads [n, heads, d] turned by cos and sin [n, 1, r], with torch."""
    turned, rest = x[..., : cos.shape[2]], x[..., cos.shape[2] :]
    if rotation.wide:
        turned, cos, sin = turned.float(), cos.float(), sin.float()
    halves = (turned[..., ::2], turned[..., 1::2]) if rotation.adjacent else turned.chunk(2, -1)
    left, right = torch.cat(halves, -1) * cos, torch.cat([-halves[1], halves[0]], -1) * sin
    made = (left + right).to(x.dtype)
    if rotation.adjacent:
        made = torch.stack(made.chunk(2, -1), -1).flatten(-2)
    return torch.cat([made, rest], -1)
