"""Top-k, top-p and min-p as one number for each row of logits: the lowest logit that is kept.

Probabilities are integer weights here, whose sum does not depend on the order of additions. So every device, and every
division of a row among programs, finds the same number.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE = 2.0**32  # the weight of the likeliest token


def weights(logits: Tensor, highest: Tensor, temperature: Tensor) -> Tensor:
    """exp((logits - highest) / temperature) * SCALE, rounded down → int64. All tensors are fp64 and broadcast."""
    below = (logits - highest).mul_(1.0 / temperature).nan_to_num_(0.0, torch.inf, -torch.inf)  # NaN: ∞ - ∞
    return below.exp_().mul_(SCALE).long()


def cutoffs(
    logits: Tensor,  # [n, V]
    temperature: Tensor,  # [n] or [1], as the others
    top_k: Tensor | None,  # 0 or None: off
    top_p: Tensor | None,  # 1 or None: off
    min_p: Tensor | None,  # 0 or None: off
) -> Tensor:
    """The lowest logit of each row that is kept, [n] fp32 (fp64 if the logits are); -inf without filters.

    Top-k is the highest value that k logits reach. Top-p is the highest value for which the tokens that reach it have
    at least this share of the weight of those that top-k leaves. Ties are all kept, and so is the likeliest token. At
    temperature 0 nothing is excluded.
    """
    if logits.device.type == "mps":  # has no fp64
        given = (None if x is None else x.cpu() for x in (top_k, top_p, min_p))
        return cutoffs(logits.cpu(), temperature.cpu(), *given).to(logits.device)
    (rows, width), made = logits.shape, torch.promote_types(logits.dtype, torch.float32)
    drawn = (temperature != 0)[:, None]
    heat = torch.where(drawn, temperature[:, None].double(), 1.0)
    lowest = torch.full((rows, 1), -torch.inf, dtype=torch.float64, device=logits.device)
    if top_k is None and top_p is None:
        ordered = logits.amax(-1, keepdim=True).double()
    else:
        ordered = logits.sort(dim=-1, descending=True).values.double()
    highest = ordered[:, :1]
    if top_k is not None:
        kth = ordered.gather(1, (top_k[:, None] - 1).clamp(0, width - 1).expand(rows, 1))
        lowest = torch.where(((top_k > 0) & (top_k < width))[:, None], kth, lowest)
    if top_p is not None:
        shares = weights(ordered, highest, heat)
        sums, share = shares.cumsum(-1), top_p[:, None].double()
        total = sums[:, -1:] if top_k is None else torch.where(ordered >= lowest, shares, 0).sum(-1, keepdim=True)
        wanted = (share * total.double()).ceil().long().clamp(min=1)
        place = torch.searchsorted(sums, wanted).clamp(max=width - 1)  # the first whose sum suffices
        lowest = torch.where(share < 1, ordered.gather(1, place), lowest)
    found = lowest.to(made)
    if min_p is not None:
        likely = (highest + heat * min_p[:, None].double().log()).to(made)
        found = torch.maximum(found, torch.where(min_p[:, None] > 0, likely, -torch.inf))
    return torch.where(drawn, found, -torch.inf)[:, 0]
