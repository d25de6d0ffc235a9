"""The mixture of experts of gpt-oss, with torch.

All experts are computed for all rows, so that no shape depends on data.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def experts(
    x: Tensor,  # [n, H], normalised
    router_weight: Tensor,  # [E, H]
    router_bias: Tensor,  # [E]
    gate_up: Tensor,  # [E, H, 2I]: columns alternate between gate and up projection
    gate_up_bias: Tensor,  # [E, 2I]
    down: Tensor,  # [E, I, H]
    down_bias: Tensor,  # [E, H]
    top_k: int,
    exact: bool = False,  # whether the result of a row must not depend on the other rows; not yet supported
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """The sum of the `top_k` best experts' outputs, weighted by the softmax of their router scores → [n, H]."""
    top, chosen = F.linear(x, router_weight, router_bias).topk(top_k, -1)
    shares = torch.zeros(len(x), len(router_weight), dtype=x.dtype, device=x.device)
    shares.scatter_(1, chosen, top.softmax(-1))  # [n, E]
    both = x @ gate_up + gate_up_bias[:, None]  # [E, n, 2I]
    gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
    out = ((up + 1) * (gate * (gate * alpha).sigmoid())) @ down + down_bias[:, None]  # [E, n, H]
    return (out * shares.T[:, :, None]).sum(0)
