"""A mixture-of-experts MLP: each row goes through the `top_k` experts that a router chooses for it.

The router and the experts are those of GPT-OSS in transformers. Results are rounded where transformers rounds them,
except that the sum over a row's experts is rounded once, as in transformers' `grouped_mm` (its default); its `eager`
form rounds after every expert. Of experts with equal logits, the one with the lowest index is chosen.

On Triton, the result of a row does not depend on the number of rows or on the other rows, to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.kernels.backend import on_triton
from windfall.kernels.expert_weights import Experts


def experts(
    x: Tensor,  # [n, H]
    router: Tensor,  # [E, H]
    router_bias: Tensor | None,  # [E]
    own: Experts,
) -> Tensor:
    """The router and its mixture → [n, H]."""
    return mixture(x, logits_of(x, router, router_bias), own)


def logits_of(x: Tensor, router: Tensor, bias: Tensor | None) -> Tensor:
    """The router's logits [n, E]."""
    if on_triton(x) and router.is_contiguous():
        from windfall.kernels.triton.experts import router as run

        return run(x, router, bias)
    return F.linear(x, router, bias)


def mixture(x: Tensor, logits: Tensor, own: Experts) -> Tensor:
    """The sum of the chosen experts' outputs, weighted by the softmax of their logits [n, E] → [n, H]."""
    if on_triton(x):
        from windfall.kernels.triton.experts import mixture as run

        return run(x, logits, own)
    return mixture_reference(x, logits, own)


def mixture_reference(x: Tensor, logits: Tensor, own: Experts) -> Tensor:
    """`mixture` with torch. It copies the weights of every row's experts."""
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    shares = values[:, : own.top_k].softmax(-1)
    outputs = []
    for expert, share in zip(order[:, : own.top_k].T, shares.T, strict=True):
        gate_up = torch.bmm(x[:, None], own.gate_up[expert])[:, 0] + own.gate_up_bias[expert]
        inner = clamped_swiglu(gate_up, own.alpha, own.limit)
        output = torch.bmm(inner[:, None], own.down[expert])[:, 0] + own.down_bias[expert]
        outputs.append(output * share[:, None])
    return torch.stack(outputs, 1).sum(1)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """The activation of GPT-OSS: [n, 2m] → [n, m]."""
    gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))
