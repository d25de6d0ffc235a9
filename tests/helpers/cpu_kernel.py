"""The C kernel of products on a CPU, compiled once for all tests of a process."""

from __future__ import annotations

import shutil
import sys
from typing import NoReturn

import pytest

from windfall.checkpoints.find import cache_dir
from windfall.kernels.few_rows import Kernel, cpu_kernel, prepare_few_rows, prepared_kernel


def compiled() -> Kernel:
    """The kernel; the test is skipped where there is no compiler."""
    kernel = cpu_kernel(cache_dir() / "kernels")
    return no_kernel() if kernel is None else kernel


def use_compiled() -> Kernel:
    """The kernel in use, as engines use it."""
    compiled()
    prepare_few_rows(cache_dir() / "kernels")
    kernel = prepared_kernel()
    assert kernel is not None
    return kernel


def no_kernel() -> NoReturn:
    """End a test because there is no kernel; it fails if there is a compiler."""
    if sys.platform == "linux" and shutil.which("gcc"):
        pytest.fail("a C kernel cannot be compiled, or torch's OpenMP library is not known")
    pytest.skip("there is no C compiler")
