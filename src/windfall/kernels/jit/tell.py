"""A copy, eight bytes at a time; the host's memory is written as if it were the device's."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import follows, power_of_two
from windfall.kernels.jit.chain import begin

MOST = 512  # numbers of a program


@triton.jit
def _tell(there, here, size, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """Program (stretch)."""
    begin(CHAINED)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(here + at, tl.load(there + at, mask=at < size), mask=at < size)


def tell(there: Tensor, here: Tensor) -> None:
    there, here = there.view(torch.int64), here.view(torch.int64)
    block = min(MOST, power_of_two(len(there)))
    warps = max(1, min(4, block // 64))
    _tell[(-(-len(there) // block),)](there, here, len(there), BLOCK=block, num_warps=warps, **follows(there))
