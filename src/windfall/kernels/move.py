"""Accepted rows go to where the committed ones end, in every layer's cache; their states are kept for the drafter."""

from __future__ import annotations

from torch import Tensor

from windfall.kernels.backend import on_triton


def move(
    kv: Tensor,  # [layers and heads of keys and values, capacity, d]
    source: Tensor,  # [P] long
    goal: Tensor,  # [P] long, ascending, nowhere above source
    states: Tensor | None = None,  # [n, F]; with it come the next two
    path: Tensor | None = None,  # [≥ P] long: rows of states, below 0: any
    kept_states: Tensor | None = None,  # [≥ P, F], written
) -> None:
    """kv[:, goal] = kv[:, source] as if all were read before any is written; kept_states[:P] = states[path[:P]]."""
    if on_triton(kv):
        from windfall.kernels.triton.move import move as compiled

        compiled(kv, source, goal, states, path, kept_states)
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
    kv.index_copy_(1, goal, kv.index_select(1, source))
    if states is not None:
        assert path is not None and kept_states is not None
        kept_states[: len(source)] = states[path[: len(source)].clamp(min=0)]
