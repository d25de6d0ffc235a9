"""Programmatic dependent launch: a kernel starts before its predecessor has finished, which hides its launch latency.

It also holds a prefetch into the L2 cache, for loads that a kernel can request before it waits.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until the previous kernel's writes are visible, then let the next kernel start.

    Before this call, a kernel must not write anything, and must not read what the previous kernel may write. It may
    read what earlier kernels wrote: these have finished, since the previous kernel waited for them.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Request the cache lines of these addresses into L2, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
