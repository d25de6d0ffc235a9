"""A draft tree in device memory, as the kernels see it: its arrays, the next draft pass, and the calibration.

For a batch of requests, all arrays have one more dimension, the first, which is the request.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

NO_NODE = -1


class TreeArrays(NamedTuple):
    """A tree in arrays of capacity C. The first `count` entries are in use.

    An entry whose key is -inf holds no node. Entries from `count` on have arbitrary content.
    """

    tokens: Tensor  # [C] long
    parents: Tensor  # [C] long, NO_NODE for the root
    depth: Tensor  # [C] long
    rank: Tensor  # [C] long: index among the children of its parent, likeliest first
    logq: Tensor  # [C] fp32: the drafter's log-probability
    score: Tensor  # [C] fp32: the sum of logq from the root
    key: Tensor  # [C] fp32: nodes with higher keys are chosen first; never above the parent's key
    chance: Tensor  # [C] fp32: probability of being accepted if the parent is accepted
    taken: Tensor  # [C] bool: already expanded, or a row of the next draft pass
    ancestors: Tensor  # [C, D + 1] long: the node on its path at each depth, itself included; NO_NODE below it
    slot: Tensor  # [C] long: row of an expanded node among the drafter's features; 0 for the root
    count: Tensor  # type: ignore[assignment]  # [1] long


class NextPass(NamedTuple):
    """The W rows of the next draft pass, and the S rows that the draft passes of this cycle can stage."""

    nodes: Tensor  # [W] long, NO_NODE for an empty row
    tokens: Tensor  # [W] long
    positions: Tensor  # [W] long
    slots: Tensor  # [W] long: rows of the drafter's KV cache
    parent_slots: Tensor  # [W] long: `TreeArrays.slot` of each row's parent
    own_slots: Tensor  # [W] long: `TreeArrays.slot` of each row
    mask: Tensor | None  # [W, S] bool: which staged rows are ancestors of a row, or the row itself
    expanded: Tensor  # [S] long: the node of each staged row, NO_NODE after the last
    staged: Tensor  # [1] long: number of staged rows
    length: Tensor  # [1] long: committed rows of the drafter's KV cache, only read
    base: Tensor  # [1] long: the row of the drafter's KV cache where staged rows begin, only read
    summary: Tensor  # [passes + 1, 6] fp32: policies.plan.Summary after each pass; entry [0, 0] counts the passes
    lineage: Tensor | None = None  # [W, D] int32: the KV rows of a row's ancestors from depth 1 on, itself included


class Calibration(NamedTuple):
    """Calibrated acceptance probabilities and costs, for calibrated rules. In a batch, one for all or one for each."""

    weights: Tensor  # [1 + DEPTHS + RANKS] fp32: see Calibrator.accept
    forecast: Tensor  # [DEPTHS, 3, children] fp32: mean chances of future children, see Calibrator.forecast
    prices: Tensor  # [2] fp32: cost of a draft pass and of a verified row, in tokens


def tree_of(trees: TreeArrays, request: int) -> TreeArrays:
    """The tree of one request of a batch."""
    return TreeArrays._make(_of_request(array, request) for array in trees)


def pass_of(passes: NextPass, request: int) -> NextPass:
    """The rows of one request of a batch."""
    return NextPass._make(None if array is None else _of_request(array, request) for array in passes)


def first_rows(rows: NextPass, seats: int) -> NextPass:
    """The rows of the first requests."""
    return NextPass._make(None if array is None else array[:seats] for array in rows)


def _of_request(array: Tensor, request: int) -> Tensor:
    """The part of one request; a number keeps a dimension."""
    return array[request] if array.dim() > 1 else array[request : request + 1]
