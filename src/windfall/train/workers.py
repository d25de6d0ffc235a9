"""One process or several (`accelerate launch`): who I am, and gradients that agree."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Workers:
    """A group of training processes; of one, unless a launcher says otherwise."""

    def __init__(self, accelerator: Any = None):
        self._accelerator = accelerator
        self.rank: int = accelerator.process_index if accelerator else 0
        self.count: int = accelerator.num_processes if accelerator else 1

    @classmethod
    def join(cls) -> Workers:
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return cls()
        from accelerate import Accelerator

        return cls(Accelerator())

    def average(self, parameters: Sequence[Tensor]) -> None:
        """Give every worker the mean gradient."""
        if self.count > 1:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = self._accelerator.reduce(parameter.grad, "mean")

    def agree(self, number: float) -> float:
        """The first worker's number, so that all follow one clock."""
        if self.count == 1:
            return number
        from accelerate.utils import broadcast

        shared = broadcast(torch.tensor([number], device=self._accelerator.device, dtype=torch.float64))
        return float(shared)
