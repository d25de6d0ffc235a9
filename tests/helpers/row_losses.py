"""The losses of rows as a function that autograd can differentiate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from windfall.train.mixtures import Mixture
from windfall.train.row_losses import RowTargets, mixed


def row_losses(logits: Tensor, targets: RowTargets, mixture: Mixture) -> Tensor:
    """The loss of each row [n], differentiable by the head's logits [n, Vd]."""
    found: Tensor = _RowLosses.apply(logits, targets, mixture)  # type: ignore[no-untyped-call]
    return found


class _RowLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: RowTargets, mixture: Mixture) -> Tensor:
        losses, slopes = mixed(logits, targets, mixture)
        ctx.save_for_backward(slopes.to(logits.dtype))
        return losses

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return slopes * given[:, None].to(slopes.dtype), None, None
