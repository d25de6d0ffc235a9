"""Muon, an optimizer for the matrices inside layers (Keller Jordan, 2024), with the step size of Moonshot AI's version.

It computes what `torch.optim.Muon` computes one matrix at a time, but for matrices of a shape together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95  # of Nesterov's momentum
RMS = 0.2  # of an update, about that of AdamW
ROUNDS = 5  # of the Newton-Schulz iteration
COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of its polynomial a x + b x^3 + c x^5
SMALLEST_NORM = 1e-7
MAX_NUMBERS = 2**26  # of matrices that are updated together: more would take much memory


class Muon(torch.optim.Optimizer):
    """Every update has singular values of about 1."""

    def __init__(self, matrices: Iterable[Tensor], weight_decay: float):
        super().__init__(matrices, {"lr": 0.0, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape.setdefault(matrix.shape, []).append((matrix, matrix.grad))
            for shape, pairs in by_shape.items():
                size = max(1, MAX_NUMBERS // shape.numel())
                for start in range(0, len(pairs), size):
                    matrices, gradients = ([*own] for own in zip(*pairs[start : start + size], strict=True))
                    self._update(matrices, gradients, group["lr"], group["weight_decay"])

    def _update(self, matrices: list[Tensor], gradients: list[Tensor], rate: float, decay: float) -> None:
        """Update matrices of one shape."""
        momenta = [self._momentum(matrix) for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        updates = orthogonal(torch.stack(torch._foreach_lerp(gradients, momenta, MOMENTUM)))
        torch._foreach_mul_(matrices, 1 - rate * decay)
        torch._foreach_add_(matrices, list(updates), alpha=-rate * RMS * math.sqrt(max(matrices[0].shape)))

    def _momentum(self, matrix: Tensor) -> Tensor:
        state: dict[str, Any] = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        found: Tensor = state["momentum_buffer"]
        return found


def orthogonal(given: Tensor) -> Tensor:
    """Matrices [n, A, B] with their singular values moved close to 1, by a Newton-Schulz iteration in bfloat16."""
    a, b, c = COEFFICIENTS
    tall, found = given.shape[1] > given.shape[2], given.bfloat16()
    found = found.mT if tall else found
    found = found / torch.linalg.vector_norm(found, dim=(1, 2), keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(ROUNDS):
        gram = found @ found.mT
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.baddbmm(found, factor, found, beta=a)
    return (found.mT if tall else found).to(given.dtype, memory_format=torch.contiguous_format)
