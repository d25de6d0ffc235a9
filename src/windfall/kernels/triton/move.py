"""Programs for the caches, one a layer's head, and behind them programs for the states, one a stretch of a row."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import follows, power_of_two
from windfall.kernels.triton.chain import begin

ACROSS = 1024  # columns of states that a program copies
TILE = 8192  # numbers of the cache that a program holds at a time


@triton.jit
def _move(
    kv,
    source,
    goal,
    states,
    path,
    kept,
    heads,
    across,
    width,
    kv_head,
    kv_row,
    states_row,
    kept_row,
    STEPS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (head, then stretch of a row of states)."""
    begin(CHAINED)
    program = tl.program_id(0)
    if program < heads:
        kv += program.to(tl.int64) * kv_head
        dim = tl.arange(0, BLOCK_D)
        for start in range(0, STEPS, BLOCK_P):  # ascending: a later source is above every earlier goal
            step = start + tl.arange(0, BLOCK_P)
            old = tl.load(source + step, mask=step < STEPS, other=0)
            new = tl.load(goal + step, mask=step < STEPS, other=0)
            moved = (old != new)[:, None] & (dim < D)[None, :]
            rows = tl.load(kv + old[:, None] * kv_row + dim[None, :], mask=moved, other=0.0)
            tl.debug_barrier()  # all are read before any is written
            tl.store(kv + new[:, None] * kv_row + dim[None, :], rows, mask=moved)
            tl.debug_barrier()
    else:
        step = (program - heads) // across
        column = (program - heads) % across * BLOCK + tl.arange(0, BLOCK)
        row = tl.maximum(tl.load(path + step), 0)
        numbers = tl.load(states + row * states_row + column, mask=column < width, other=0.0)
        tl.store(kept + step.to(tl.int64) * kept_row + column, numbers, mask=column < width)


def move(
    kv: Tensor, source: Tensor, goal: Tensor, states: Tensor | None, path: Tensor | None, kept_states: Tensor | None
) -> None:
    (heads, _, d), steps = kv.shape, len(source)
    assert kv.stride(2) == 1 and source.is_contiguous() and goal.is_contiguous()
    width, across = 0, 0
    if states is not None:
        assert path is not None and kept_states is not None and path.is_contiguous()
        assert states.stride(1) == kept_states.stride(1) == 1
        width = states.shape[1]
        across = -(-width // ACROSS)
    block = power_of_two(d)
    _move[(heads + steps * across,)](
        kv,
        source,
        goal,
        kv if states is None else states,
        source if path is None else path,
        kv if kept_states is None else kept_states,
        heads,
        max(across, 1),
        width,
        *kv.stride()[:2],
        0 if states is None else states.stride(0),
        0 if kept_states is None else kept_states.stride(0),
        STEPS=steps,
        D=d,
        BLOCK_P=min(power_of_two(steps), max(TILE // block, 1)),
        BLOCK_D=block,
        BLOCK=ACROSS,
        num_warps=4,
        **follows(kv),
    )
