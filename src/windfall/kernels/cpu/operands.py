"""What the C kernels compute with. They read and write memory, in float32, and nothing sees what they do."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def readable(*tensors: Tensor) -> bool:
    """Whether the kernels can read these tensors: in float32, on a CPU, and of no kind that has no memory of its own
    (of quantisation, of tracing)."""
    return all(type(x) in (Tensor, nn.Parameter) and x.dtype is torch.float32 and x.is_cpu for x in tensors)


def unobserved(gradients: bool | None = None) -> bool:
    """Whether torch would only compute, in float32: without gradients, traces and autocast.

    `gradients`: whether there are any; None: if torch may record them.
    """
    gradients = torch.is_grad_enabled() if gradients is None else gradients
    return not (gradients or recorded() or torch.is_autocast_enabled("cpu"))


def recorded() -> bool:
    """Whether a compiler or a tracer records what is computed."""
    return torch.compiler.is_compiling() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]
