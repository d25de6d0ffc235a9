"""How the request at each seat draws its tokens, as arrays that the host writes and kernels read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from windfall.core.sampling import signed
from windfall.core.types import SamplingParams
from windfall.engine.gpu.transfer import ArraySpec, QueuedBuffer
from windfall.kernels.cutoff import cutoffs

FILTERS = ("top_k", "top_p", "min_p")


def sampling_arrays(seats: int) -> dict[str, ArraySpec]:
    """The arrays of a buffer for this number of seats."""
    long, number = torch.long, torch.float32
    types = {"seed": long, "temperature": number, "kappa": number, "top_k": long, "top_p": number, "min_p": number}
    return {name: (dtype, (seats,)) for name, dtype in types.items()}


def write_sampling(arrays: Mapping[str, Any], seat: int, params: SamplingParams) -> None:
    """Write everything but `kappa` into the host's arrays."""
    arrays["seed"][seat] = signed(params.noise_seed)
    arrays["temperature"][seat] = 0.0 if params.greedy else params.temperature
    for name in FILTERS:
        arrays[name][seat] = getattr(params, name)


def seat_cutoffs(arrays: Mapping[str, Tensor], logits: Tensor, owners: Tensor) -> Tensor:
    """The lowest logit of each row [n, V] that the filters of its request keep, [n]."""
    return cutoffs(logits, **{name: arrays[name] for name in ("temperature", *FILTERS)}, owners=owners)


class SeatSampling:
    """These arrays in a buffer of their own."""

    def __init__(self, device: torch.device, seats: int):
        self._settings = QueuedBuffer(device, **sampling_arrays(seats))

    def __getitem__(self, name: str) -> Tensor:
        return self._settings.device[name]

    def write(self, seat: int, params: SamplingParams, kappa: float = 1.0) -> None:
        """`kappa` is the weight of the noise in coupled drafting."""
        here = self._settings.wait_writable()
        write_sampling(here, seat, params)
        here["kappa"][seat] = kappa

    def write_greedy(self, seat: int) -> None:
        """The request at this seat draws the likeliest token."""
        self._settings.wait_writable()["temperature"][seat] = 0.0

    def send(self) -> None:
        self._settings.send()

    def cutoffs(self, logits: Tensor, owners: Tensor) -> Tensor:
        """The lowest logit of each row [n, V] that the filters of its request keep, [n]."""
        return seat_cutoffs(self._settings.device, logits, owners)
