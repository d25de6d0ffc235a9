"""The C kernel of products on a CPU, compiled once for all tests of a process."""

from __future__ import annotations

import pytest

from windfall.checkpoints.find import cache_dir
from windfall.kernels.few_rows import Kernel, cpu_kernel, prepare_few_rows, prepared_kernel


def compiled() -> Kernel:
    """The kernel; the test is skipped where it cannot be compiled."""
    kernel = cpu_kernel(cache_dir() / "kernels")
    if kernel is None:
        pytest.skip("there is no C compiler, or torch's OpenMP library is not known")
    return kernel


def use_compiled() -> Kernel:
    """The kernel in use, as engines use it."""
    compiled()
    prepare_few_rows(cache_dir() / "kernels")
    kernel = prepared_kernel()
    assert kernel is not None
    return kernel
