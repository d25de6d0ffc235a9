"""Products of a few rows on a CPU, in float32.

torch's products of 2 rows can take three times as long as those of 1. The C kernel reads the weights once. It is
compiled for this machine when it is first needed. Where that fails, or where torch is faster, torch is used.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windfall.core.errors import InputError
from windfall.core.files import replace_text
from windfall.kernels.cpu.compile import library

SOURCE = Path(__file__).parent / "cpu" / "few_rows.c"
TRIAL_ROWS = (2, 4, 8, 16, 32, 64)  # for which the kernel is compared with torch
TRIAL_WEIGHT = (4096, 1024)
TRIALS = 9
MOST_INPUTS = 64 * 1024  # numbers of all rows together; more do not stay in the cache of a core
MOST_ERROR = 1e-5  # of a sum, as a share of the largest


class Kernel:
    """The compiled kernel. It computes products of 2 to `most_rows` rows."""

    def __init__(self, compiled: ctypes.CDLL, most_rows: int):
        self._function, self.most_rows = compiled.few_rows, most_rows
        self._function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 3 + [ctypes.c_int]
        self._function.restype = None

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [.., K] and a contiguous weight [N, K] → [.., N]"""
        x = x.contiguous()
        outputs, inputs = weight.shape
        found = x.new_empty(*x.shape[:-1], outputs)
        places = x.data_ptr(), weight.data_ptr(), found.data_ptr()
        self._function(*places, x.shape[:-1].numel(), outputs, inputs, torch.get_num_threads())
        return found

    def takes(self, x: Tensor, weight: Tensor) -> bool:
        """Whether it computes this product. It has no gradients, and reads memory, which other kinds of tensors (of
        quantisation, of tracing) do not have."""
        if _recorded() or torch.is_grad_enabled():
            return False
        if not 1 < x.shape[:-1].numel() <= self.most_rows or x.numel() > MOST_INPUTS:
            return False
        plain = type(x) is Tensor and type(weight) in (Tensor, nn.Parameter) and x.is_cpu and weight.is_cpu
        numbers = plain and x.dtype is weight.dtype is torch.float32 and weight.is_contiguous()
        return numbers and x.shape[-1] == weight.shape[-1] and not torch.is_autocast_enabled("cpu")


def _recorded() -> bool:
    """Whether a compiler or a tracer records what is computed."""
    return torch.compiler.is_compiling() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


_kernels: list[Kernel] = []  # the one that is used; empty: torch computes all products


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, by the kernel where there is one that takes this product."""
    if not _kernels or not _kernels[0].takes(x, weight):
        return F.linear(x, weight, bias)
    found = _kernels[0](x, weight)
    return found if bias is None else found.add_(bias)


class FewRowsLinear(nn.Linear):
    """An `nn.Linear` that uses the kernel."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def use_few_rows(model: nn.Module) -> None:
    """Let the linear layers of this model use the kernel, if one is prepared."""
    for layer in model.modules() if _kernels else ():
        plain = (
            type(layer) is nn.Linear and type(layer.weight) is nn.Parameter
        )  # other classes are quantised, for example
        if plain and layer.weight.is_cpu and layer.weight.dtype is torch.float32:
            layer.__class__ = FewRowsLinear


def most_rows() -> int:
    """The number of rows up to which the kernel is used; 0: there is none."""
    return _kernels[0].most_rows if _kernels else 0


@cache
def prepare_few_rows(folder: Path) -> None:
    """Compile and load the kernel, if it works here and is faster than torch. It is kept in this folder."""
    if not _kernels and (found := library(SOURCE, folder)) is not None:
        compiled, file = found
        if most := _known_most_rows(compiled, file.with_suffix(f".{torch.__version__}.{torch.get_num_threads()}.json")):
            _kernels.append(Kernel(compiled, most))


def _known_most_rows(compiled: ctypes.CDLL, file: Path) -> int:
    """`_most_rows`, kept in a file: later runs must choose the same kernels, or their texts could differ."""
    if (known := _read(file)) is not None:
        return known
    most = _most_rows(Kernel(compiled, TRIAL_ROWS[-1]))
    if (known := _read(file)) is not None:  # another process was faster
        return known
    with suppress(InputError):  # a cache that cannot be written to only costs time
        replace_text(file, json.dumps({"most_rows": most}))
    return most


def _read(file: Path) -> int | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads(file.read_text("utf-8"))["most_rows"])
    return None


@torch.inference_mode()
def _most_rows(kernel: Kernel) -> int:
    """The number of rows up to which the kernel is faster than torch; 0: there is none, or it is wrong."""
    chance, most = torch.Generator().manual_seed(0), 0
    weight = torch.randn(TRIAL_WEIGHT, generator=chance)
    for rows in TRIAL_ROWS:
        x = torch.randn(rows, TRIAL_WEIGHT[1], generator=chance)
        exact = F.linear(x.double(), weight.double())
        if (kernel(x, weight) - exact).abs().max() > MOST_ERROR * exact.abs().max():
            return 0
        if not _is_faster(partial(kernel, x, weight), partial(F.linear, x, weight)):
            break
        most = rows
    return most


def _is_faster(work: Callable[[], Tensor], other: Callable[[], Tensor]) -> bool:
    """Whether the fastest run of `work` is faster than that of `other`. They take turns, since machines get busy."""
    taken: list[list[float]] = [[], []]
    for _ in range(TRIALS):
        for each, own in zip((work, other), taken, strict=True):
            started = time.perf_counter()
            each()
            own.append(time.perf_counter() - started)
    return min(taken[0]) < min(taken[1])
