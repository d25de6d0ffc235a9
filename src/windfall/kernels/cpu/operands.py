"""What the C kernels compute with. They read and write memory, in float32, and nothing sees what they do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

KINDS = (Tensor, nn.Parameter)  # others may have no memory of their own: those of quantisation, of tracing


def readable(*tensors: Tensor) -> bool:
    """Whether the kernels can read these tensors: plain ones, in float32, on a CPU."""
    for x in tensors:  # noqa: SIM110 — a loop is faster, and this runs many times in a pass
        if type(x) not in KINDS or x.dtype is not torch.float32 or not x.is_cpu:
            return False
    return True


def unobserved(gradients: bool | None = None) -> bool:
    """Whether torch would only compute, in float32: without gradients, traces and autocast.

    `gradients`: whether there are any; None: if torch may record them.
    """
    if torch.is_grad_enabled() if gradients is None else gradients:
        return False
    return not (recorded() or torch.is_autocast_enabled("cpu"))


def recorded() -> bool:
    """Whether a compiler or a tracer records what is computed."""
    return torch.compiler.is_compiling() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]
