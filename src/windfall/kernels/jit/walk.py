"""One program: the whole tree is a square of at most 128 × 128 bits."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import power_of_two


@triton.jit
def _walk(draws, tokens, parents, mask, valid_at, out, count, mask_row, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    node = tl.arange(0, BLOCK)
    inside = node < count
    parent = tl.maximum(tl.load(parents + node, mask=inside, other=0), 0)
    drawn = tl.load(draws + parent, mask=inside, other=0)
    missed = (tl.load(tokens + node, mask=inside, other=0) != drawn) & (node > 0)
    both = inside[:, None] & inside[None, :]
    above = tl.load(mask + node[:, None] * mask_row + node[None, :], mask=both, other=0).to(tl.int32)
    blocked = tl.max(above * missed.to(tl.int32)[None, :], 1)
    real = inside
    if PADDED:
        real = inside & ((node < tl.load(valid_at).to(tl.int32)) | (node == 0))
    accepted = real & (blocked == 0)
    kept = accepted.to(tl.int32)
    length = tl.sum(kept, 0)
    tl.store(out + tl.cumsum(kept, 0) - 1, node.to(tl.int64), mask=accepted)
    tl.store(out + node, tl.full([BLOCK], -1, tl.int64), mask=inside & (node >= length))
    last = tl.max(tl.where(accepted, node, 0), 0)
    tl.store(out + count, length.to(tl.int64))
    tl.store(out + count + 1, tl.load(draws + last))


def walk(draws: Tensor, tokens: Tensor, parents: Tensor, mask: Tensor, valid: Tensor | None, out: Tensor) -> None:
    count = len(draws)
    assert mask.stride(1) == 1 and all(x.is_contiguous() for x in (draws, tokens, parents, out))
    _walk[(1,)](
        draws,
        tokens,
        parents,
        mask.view(torch.uint8),
        out if valid is None else valid,
        out,
        count,
        mask.stride(0),
        PADDED=valid is not None,
        BLOCK=power_of_two(count),
        num_warps=4,
    )
