"""Kernels that are there before the one ahead of them has ended: the launch of the second costs nothing then."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl


@triton.jit
def begin(CHAINED: tl.constexpr):
    """Wait for all that the kernel before this one does, then let the next one come, which waits in its turn. Before
    this, nothing is written, and nothing read that the kernel before may write: those before it have ended."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch(at):
    """Ask for the cache lines that hold these places, and do not wait."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
