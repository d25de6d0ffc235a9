"""Errors of a GPU after which no work on it is possible in this process."""

from __future__ import annotations

import torch

LOST = (  # in the messages of CUDA
    "device-side assert triggered",
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "invalid program counter",
    "hardware stack error",
    "unspecified launch failure",
    "launch timed out",
    "uncorrectable ECC error",
)


def is_lost(device: torch.device, error: Exception) -> bool:
    """Whether this error, which a pass has raised, has ended all work on the device.

    CUDA repeats such an error in every later call, until the process ends.
    """
    if isinstance(error, RuntimeError) and "CUDA" in str(error) and any(words in str(error) for words in LOST):
        return True
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
