"""One program per head of the KV caches, several for many disjoint moves; then one per block of a row of states."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import pdl_launch, power_of_two
from windfall.kernels.triton.pdl import pdl_wait

STATE_BLOCK = 1024  # columns of states per program
TILE = 8192  # elements of the KV cache per iteration
MAX_SPAN = 128  # disjoint moves of a program, a power of two


@triton.jit(do_not_specialize=["steps", "movers"])
def _move(
    kv,
    source,
    goal,
    states,
    path,
    kept,
    heads,
    movers,
    state_blocks,
    width,
    kv_head,
    kv_row,
    states_row,
    kept_row,
    steps,
    SPAN: tl.constexpr,
    DISJOINT: tl.constexpr,
    D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (SPAN of the moves, head), or after these `movers` (row of states, block of columns)."""
    pdl_wait(PDL)
    program = tl.program_id(0)
    if program < movers:
        kv += (program % heads).to(tl.int64) * kv_head
        begin = program // heads * SPAN
        dim = tl.arange(0, BLOCK_D)
        for start in range(0, SPAN, BLOCK_P):  # ascending: later sources are above all earlier goals
            step = begin + start + tl.arange(0, BLOCK_P)
            old = tl.load(source + step, mask=step < steps, other=0)
            new = tl.load(goal + step, mask=step < steps, other=0)
            moved = (old != new)[:, None] & (dim < D)[None, :]
            rows = tl.load(kv + old[:, None] * kv_row + dim[None, :], mask=moved, other=0.0)
            if not DISJOINT:
                tl.debug_barrier()  # all rows are read before any is written
            tl.store(kv + new[:, None] * kv_row + dim[None, :], rows, mask=moved)
            if not DISJOINT:
                tl.debug_barrier()
    else:
        step = (program - movers) // state_blocks
        column = (program - movers) % state_blocks * BLOCK + tl.arange(0, BLOCK)
        row = tl.maximum(tl.load(path + step), 0)
        values = tl.load(states + row * states_row + column, mask=column < width, other=0.0)
        tl.store(kept + step.to(tl.int64) * kept_row + column, values, mask=column < width)


def move(
    kv: Tensor,
    source: Tensor,
    goal: Tensor,
    states: Tensor | None,
    path: Tensor | None,
    kept_states: Tensor | None,
    disjoint: bool = False,
) -> None:
    (heads, _, d), steps = kv.shape, len(source)
    assert kv.stride(2) == 1 and source.is_contiguous() and goal.is_contiguous()
    width, state_blocks = 0, 0
    if states is not None:
        assert path is not None and kept_states is not None and path.is_contiguous()
        assert states.stride(1) == kept_states.stride(1) == 1
        width = states.shape[1]
        state_blocks = -(-width // STATE_BLOCK)
    block = power_of_two(d)
    span = min(power_of_two(steps), MAX_SPAN) if disjoint else steps
    movers = heads * -(-steps // span)
    _move[(movers + steps * state_blocks,)](
        kv,
        source,
        goal,
        kv if states is None else states,
        source if path is None else path,
        kv if kept_states is None else kept_states,
        heads,
        movers,
        max(state_blocks, 1),
        width,
        *kv.stride()[:2],
        0 if states is None else states.stride(0),
        0 if kept_states is None else kept_states.stride(0),
        steps=steps,
        SPAN=span,
        DISJOINT=disjoint,
        D=d,
        BLOCK_P=min(power_of_two(span), max(TILE // block, 1)),
        BLOCK_D=block,
        BLOCK=STATE_BLOCK,
        num_warps=4,
        **pdl_launch(kv),
    )
