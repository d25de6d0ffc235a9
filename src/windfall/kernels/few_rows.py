"""Products of a few rows on a CPU, in float32.

torch's products of 2 or 4 rows can take two to three times as long as those of 1. The C kernel reads the weights once.
It is compiled for this machine when it is first needed. Where that fails, or where torch is faster, torch is used.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windfall.core.errors import InputError
from windfall.core.files import replace_text
from windfall.kernels.cpu.compile import library
from windfall.kernels.cpu.operands import readable, unobserved
from windfall.kernels.panels import Panels, of_halves, samples

SOURCE = Path(__file__).parent / "cpu" / "few_rows.c"
FLOAT32 = 0  # the number of this format in panels.h
LEAST_OUTPUTS, INPUT_STEP = 4, 16  # the kernel takes at least this many outputs, and inputs in multiples of this
TRIAL_ROWS = (2, 4, 8, 16, 32, 64)  # for which the kernel is compared with torch
TRIAL_INPUTS, TRIAL_OUTPUTS, MANY_OUTPUTS = 1024, 64, 4096
LARGE_OUTPUTS = 16384  # whose weights do not stay in the cache of most CPUs
TRIALS = 9
MOST_INPUTS = 64 * 1024  # numbers of all rows together; more do not stay in the cache of a core
MOST_ERROR = 1e-5  # of a sum, as a share of the largest


class Kernel:
    """The compiled kernel, and its file."""

    def __init__(self, compiled: ctypes.CDLL, file: Path):
        self.file = file
        pointer, long = ctypes.c_void_p, ctypes.c_long
        self._multiply, self._unpack = compiled.few_rows, compiled.unpack
        self._multiply.argtypes = [pointer] * 3 + [long] * 3 + [ctypes.c_int] * 2
        self._unpack.argtypes = [pointer] * 2 + [long] * 2 + [ctypes.c_int]
        self._multiply.restype, self._unpack.restype = ctypes.c_int, None

    def __reduce__(self) -> tuple[Callable[[Path], Kernel | None], tuple[Path]]:
        return cpu_kernel, (self.file.parent,)  # a copy of a model, or one from a file, uses this machine's

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [.., K] and a contiguous weight [N, K], both in float32 → [.., N]"""
        return self._product(x, weight, len(weight), FLOAT32)

    def product_of_panels(self, x: Tensor, weight: Panels) -> Tensor:
        """x [.., inputs] in float32 → [.., outputs]"""
        return self._product(x, weight.bytes, weight.outputs, weight.format)

    def _product(self, x: Tensor, weight: Tensor, outputs: int, format: int) -> Tensor:
        x, inputs = x.contiguous(), x.shape[-1]
        found = x.new_empty(*x.shape[:-1], outputs)
        places = x.data_ptr(), weight.data_ptr(), found.data_ptr()
        if not self._multiply(*places, x.shape[:-1].numel(), outputs, inputs, format, torch.get_num_threads()):
            raise MemoryError("there is no memory for a matrix product")
        return found

    def unpack(self, weight: Panels) -> Tensor:
        """The weight [outputs, inputs] in float32."""
        sizes = weight.outputs, weight.inputs
        found = torch.from_numpy(np.empty(sizes, np.float32))  # a tracer would record torch.empty
        self._unpack(weight.bytes.data_ptr(), found.data_ptr(), *sizes, weight.format)
        return found


@cache
def cpu_kernel(folder: Path) -> Kernel | None:
    """The kernel, compiled into this folder. None: it cannot be compiled here, or its results are wrong."""
    found = library(SOURCE, folder)
    kernel = None if found is None else Kernel(*found)
    return kernel if kernel is not None and _is_right(kernel) else None


class FewRows(NamedTuple):
    """The kernel for weights in float32, and the numbers of rows for which it is used."""

    kernel: Kernel
    rows: range

    def takes(self, x: Tensor, weight: Tensor) -> bool:
        """Whether it computes this product."""
        if not unobserved() or x.shape[:-1].numel() not in self.rows or x.numel() > MOST_INPUTS:
            return False
        sizes = x.shape[-1] == weight.shape[-1] and fits(*weight.shape)
        return sizes and readable(x, weight) and weight.is_contiguous()


def fits(outputs: int, inputs: int) -> bool:
    """Whether the kernel takes weights of this size."""
    return outputs >= LEAST_OUTPUTS and inputs % INPUT_STEP == 0


_used: list[FewRows] = []  # empty: torch computes all products in float32


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, by the kernel where there is one that takes this product."""
    if not _used or not _used[0].takes(x, weight):
        return F.linear(x, weight, bias)
    found = _used[0].kernel.product(x, weight)
    return found if bias is None else found.add_(bias)


class FewRowsLinear(nn.Linear):
    """An `nn.Linear` that uses the kernel."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def use_few_rows(model: nn.Module) -> None:
    """Let the linear layers of this model use the kernel, if one is prepared."""
    for layer in model.modules() if _used else ():
        plain = type(layer) is nn.Linear and type(layer.weight) is nn.Parameter  # others are quantised, for example
        if plain and layer.weight.is_cpu and layer.weight.dtype is torch.float32:
            layer.__class__ = FewRowsLinear


def prepared_kernel() -> Kernel | None:
    """The kernel, if its results are correct on this machine."""
    return _used[0].kernel if _used else None


def rows_of_kernel() -> range:
    """The numbers of rows for which the kernel is used."""
    return _used[0].rows if _used else range(0)


@cache
def prepare_few_rows(folder: Path) -> None:
    """Compile and load the kernel, if that works here. It is kept in this folder."""
    kernel = None if _used else cpu_kernel(folder)
    if kernel is not None:
        known = kernel.file.with_suffix(f".{torch.__version__}.{torch.get_num_threads()}.json")
        _used.append(FewRows(kernel, _known_rows(kernel, known)))


def _known_rows(kernel: Kernel, file: Path) -> range:
    """`_faster_rows`, kept in a file: later runs must choose the same kernels, or their texts could differ."""
    if (known := _read(file)) is not None:
        return known
    rows = _faster_rows(kernel)
    if (known := _read(file)) is not None:  # another process was faster
        return known
    with suppress(InputError):  # a cache that cannot be written to only costs time
        replace_text(file, json.dumps({"rows": [rows.start, rows.stop]}))
    return rows


@cache
@torch.inference_mode()
def bf16_is_faster(kernel: Kernel) -> bool:
    """Whether one row times a large weight is faster in bf16 than in float32. The answer is kept in a file."""
    file = kernel.file.with_suffix(f".{torch.__version__}.{torch.get_num_threads()}.bf16.json")
    with suppress(OSError, ValueError):
        return bool(json.loads(file.read_text("utf-8")))
    x, weight = _trial(1, LARGE_OUTPUTS)
    faster = is_faster(partial(kernel.product_of_panels, x, of_halves(weight.bfloat16())), partial(F.linear, x, weight))
    with suppress(InputError):
        replace_text(file, json.dumps(faster))
    return faster


def _read(file: Path) -> range | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return range(*map(int, json.loads(file.read_text("utf-8"))["rows"]))
    return None


@torch.inference_mode()
def _is_right(kernel: Kernel) -> bool:
    """Whether its products, with weights in all formats, are what torch computes."""
    x, weight = _trial(TRIAL_ROWS[-1], TRIAL_OUTPUTS)
    pairs = [(kernel.product(x, weight), weight)]
    for panels, decoded in samples(weight):
        if not torch.equal(kernel.unpack(panels), decoded):
            return False
        pairs.append((kernel.product_of_panels(x, panels), decoded))
    exact = [F.linear(x.double(), own.double()) for _, own in pairs]
    return all(
        bool((found - wanted).abs().max() <= MOST_ERROR * wanted.abs().max())
        for (found, _), wanted in zip(pairs, exact, strict=True)
    )


@torch.inference_mode()
def _faster_rows(kernel: Kernel) -> range:
    """The numbers of rows for which the kernel is faster than torch, which may have a fast product for 2 or 3 rows."""
    faster: list[int] = []
    many, weight = _trial(TRIAL_ROWS[-1], MANY_OUTPUTS)
    for rows in TRIAL_ROWS:
        x = many[:rows]
        if is_faster(partial(kernel.product, x, weight), partial(F.linear, x, weight)):
            faster.append(rows)
        elif faster:
            break
    return range(faster[0], faster[-1] + 1) if faster else range(0)


def _trial(rows: int, outputs: int) -> tuple[Tensor, Tensor]:
    """Some rows, and a weight."""
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(rows, TRIAL_INPUTS, generator=chance)
    return x, torch.randn(outputs, TRIAL_INPUTS, generator=chance)


def is_faster(work: Callable[[], Tensor], other: Callable[[], Tensor]) -> bool:
    """Whether the fastest run of `work` is faster than that of `other`. They take turns, since machines get busy."""
    taken: list[list[float]] = [[], []]
    for _ in range(TRIALS):
        for each, own in zip((work, other), taken, strict=True):
            started = time.perf_counter()
            each()
            own.append(time.perf_counter() - started)
    return min(taken[0]) < min(taken[1])
