"""The rows of passes over several requests, and what a verify pass adds to each text."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class BatchRows(NamedTuple):
    """The N rows of a verify pass, request by request, parents before children, then padding."""

    tokens: Tensor  # [N] long, 0 for padding
    owners: Tensor  # [N] int32: the request of each row, 0 for padding
    nodes: Tensor  # [N] long: its node in the request's tree, NO_NODE for padding
    parents: Tensor  # [N] long: the row of its parent; a root's and padding's own row
    depth: Tensor  # [N] long, 0 for padding
    positions: Tensor  # [N] long
    slots: Tensor  # [N] long: where its keys and values go
    reach: Tensor  # [N] long: keys that it sees, its own included; 0 for padding
    lineage: Tensor  # [N, D + 1] int32: the slot of its ancestor at each depth, itself included
    starts: Tensor  # [R + 1] long: the first row of each request, then the number of rows that are not padding
    tiles: Tensor  # [T + 1] int32: see `pages.tiles_of`


class Outcome(NamedTuple):
    """What a verify pass adds to each text; at most P tokens."""

    accepted: Tensor  # [R] long: accepted rows, the root included: new tokens; 0 for requests that are not in use
    tokens: Tensor  # [R, P] long: accepted tokens after the root, the target's next token, then 0
    path: Tensor  # [R, P] long: accepted rows of the pass, then NO_NODE
    source: Tensor  # [R, P] long: slots of the accepted rows
    goal: Tensor  # [R, P] long: slots that they move to; equal to `source` where nothing moves


class Appended(NamedTuple):
    """Rows that are appended to several texts at once, P for each; the last of a request may be padding."""

    positions: Tensor  # [R * P] long
    slots: Tensor  # [R * P] long; in UNUSED_PAGE for padding
    reach: Tensor  # [R * P] long; 0 for padding
    last: Tensor  # [R] long: the last row of each request that is not padding; any if there is none


class Described(NamedTuple):
    """What the drafter thought of the rows of a verify pass; arbitrary for padding."""

    rank: Tensor  # [N] long
    logq: Tensor  # [N] fp32
    score: Tensor  # [N] fp32


class Sampled(NamedTuple):
    """The whole trees of some requests, S of them."""

    count: Tensor  # type: ignore[assignment]  # [S] long: entries of each tree; later ones are arbitrary
    parents: Tensor  # [S, C] int16
    depth: Tensor  # [S, C] int16
    rank: Tensor  # [S, C] int16
    taken: Tensor  # [S, C] bool
    logq: Tensor  # [S, C] fp32
    key: Tensor  # [S, C] fp32
