"""Top-k, top-p and min-p as one number for each row of logits: the lowest logit that is kept."""

from __future__ import annotations

from torch import Tensor

from windfall.core import cutoff
from windfall.kernels.backend import on_triton


def cutoffs(
    logits: Tensor,  # [n, V]
    temperature: Tensor,  # [1] fp32
    top_k: Tensor,  # [1] long; 0: off
    top_p: Tensor,  # [1] fp32; 1: off
    min_p: Tensor,  # [1] fp32; 0: off
    owners: Tensor | None = None,  # [n] int32: the request of each row; then the settings are [R]
) -> Tensor:
    """The cutoff of each row, as `core.cutoff` defines it → [n] fp32; -inf without filters, or at temperature 0.

    The settings are device tensors, so one captured graph serves all their values.
    """
    if on_triton(logits):
        from windfall.kernels.triton.cutoff import cutoffs as compiled

        return compiled(logits, temperature, top_k, top_p, min_p, owners)
    return reference(logits, temperature, top_k, top_p, min_p, owners)


def reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, owners: Tensor | None = None
) -> Tensor:
    """`cutoffs` with torch, which sorts."""
    settings = [temperature, top_k, top_p, min_p]
    if owners is not None:
        settings = [x[owners.long()] for x in settings]
    return cutoff.cutoffs(logits, *settings)
