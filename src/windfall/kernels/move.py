"""Move accepted rows to the end of the committed rows in every layer's KV cache; copy their states for the drafter."""

from __future__ import annotations

from torch import Tensor

from windfall.kernels.backend import on_triton


def move(
    kv: Tensor,  # [layers * 2 * kv_heads, capacity, d]
    source: Tensor,  # [P] long
    goal: Tensor,  # [P] long
    states: Tensor | None = None,  # [n, F]; needs the next two arguments
    path: Tensor | None = None,  # [≥ P] long: rows of states; negative entries select any row
    kept_states: Tensor | None = None,  # [≥ P, F], written
    disjoint: bool = False,  # no source is the goal of another move: many moves are shared among programs
) -> None:
    """kv[:, goal] = kv[:, source], reading all rows before writing any; kept_states[:P] = states[path[:P]].

    Nothing moves where source and goal are equal; the goals of rows that move differ. No source may be the goal of an
    earlier move, so goals that ascend and are never above their sources are right. For `disjoint` it may not be the
    goal of any other move, as where sources are staged rows and goals lie in pages; such moves may come in any order.
    """
    if on_triton(kv):
        from windfall.kernels.triton.move import move as compiled

        compiled(kv, source, goal, states, path, kept_states, disjoint)
    else:
        reference(kv, source, goal, states, path, kept_states)


def reference(
    kv: Tensor,
    source: Tensor,
    goal: Tensor,
    states: Tensor | None = None,
    path: Tensor | None = None,
    kept_states: Tensor | None = None,
) -> None:
    """`move` with torch."""
    kv.index_copy_(1, goal, kv.index_select(1, source))
    if states is not None:
        assert path is not None and kept_states is not None
        kept_states[: len(source)] = states[path[: len(source)].clamp(min=0)]
