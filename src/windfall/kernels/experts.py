"""A mixture-of-experts MLP: each row goes through the `top_k` experts that a router chooses for it.

Routers and experts are those of GPT-OSS, Qwen3-MoE, Mixtral and OLMoE in transformers. Results are rounded where
transformers rounds them, except that the sum over a row's experts is rounded once, as in transformers' `grouped_mm`
(its default); its `eager` form rounds after every expert. Of experts with equal logits, the one with the lowest index
is chosen.

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
    shares = (values[:, : own.top_k] if own.normalised else values).softmax(-1, torch.float32)[:, : own.top_k]
    outputs = []
    for expert, share in zip(order[:, : own.top_k].T, shares.to(torch.float32 if own.wide else x.dtype).T, strict=True):
        inner = gate(project(x, own.gate_up, own.gate_up_bias, expert, own.linear), own)
        outputs.append(project(inner, own.down, own.down_bias, expert, own.linear) * share[:, None])
    return torch.stack(outputs, 1).sum(1).to(x.dtype)


def project(x: Tensor, weight: Tensor, bias: Tensor | None, expert: Tensor, linear: bool) -> Tensor:
    """Rows of x times the weights of one expert each, with torch."""
    own = weight[expert]
    made = torch.bmm(x[:, None], own.mT if linear else own)[:, 0]
    return made if bias is None else made + bias[expert]


def gate(gate_up: Tensor, own: Experts) -> Tensor:
    """The activation of experts, [n, 2m] → [n, m], with torch."""
    opened, up = gate_up.chunk(2, -1) if own.linear else (gate_up[:, ::2], gate_up[:, 1::2])
    if own.limit is None:
        return F.silu(opened) * up
    opened, up = opened.clamp(max=own.limit), up.clamp(-own.limit, own.limit)
    return (up + 1) * (opened * torch.sigmoid(opened * own.alpha))
