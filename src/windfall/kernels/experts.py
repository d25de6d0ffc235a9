"""A mixture-of-experts MLP: each row goes through the `top_k` experts that a router chooses for it.

The router and the experts are those of GPT-OSS in transformers. Results are rounded where transformers rounds them,
except that the sum over a row's experts is rounded once, as in transformers' `grouped_mm` (its default); its `eager`
form rounds after every expert. Of experts with equal logits, the one with the lowest index is chosen.

On Triton, the result of a row does not depend on the number of rows or on the other rows, if its logits do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from windfall.kernels.backend import on_triton
from windfall.kernels.product import linear


def experts(
    x: Tensor,  # [n, H]
    router_weight: Tensor,  # [E, H]
    router_bias: Tensor | None,  # [E]
    gate_up: Tensor,  # [E, H, 2I]; gate and up projection alternate in the last dimension
    gate_up_bias: Tensor,  # [E, 2I]
    down: Tensor,  # [E, I, H]
    down_bias: Tensor,  # [E, H]
    top_k: int,
    exact: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """The router and its mixture → [n, H]. With `exact`, a row has the same bits in every pass."""
    logits = linear(x, router_weight, router_bias, exact)
    return mixture(x, logits, gate_up, gate_up_bias, down, down_bias, top_k, alpha, limit)


def mixture(
    x: Tensor,  # [n, H]
    logits: Tensor,  # [n, E]: of the router
    gate_up: Tensor,
    gate_up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    top_k: int,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """The sum of the chosen experts' outputs, weighted by the softmax of their logits → [n, H]."""
    given = (x, logits, gate_up, gate_up_bias, down, down_bias, top_k, alpha, limit)
    if on_triton(x):
        from windfall.kernels.triton.experts import mixture as run

        return run(*given)
    return mixture_reference(*given)


def mixture_reference(
    x: Tensor,
    logits: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    top_k: int,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """`mixture` with torch. It copies the weights of every row's experts."""
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    shares = values[:, :top_k].softmax(-1)
    outputs = []
    for expert, share in zip(order[:, :top_k].T, shares.T, strict=True):
        inner = clamped_swiglu(torch.bmm(x[:, None], gate_up[expert])[:, 0] + gate_up_bias[expert], alpha, limit)
        output = torch.bmm(inner[:, None], down[expert])[:, 0] + down_bias[expert]
        outputs.append(output * share[:, None])
    return torch.stack(outputs, 1).sum(1)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """The activation of GPT-OSS: [n, 2m] → [n, m]."""
    gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))
