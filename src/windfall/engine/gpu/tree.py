"""A draft tree in fixed arrays on the device. Kernels grow it, and publish it to the host once per cycle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windfall.core.tree import Arrays, DraftTree
from windfall.costs.acceptance import CHANCE_BUCKETS, DEPTHS, FORECAST_CHILDREN, RANKS
from windfall.engine.gpu.target import MAX_VERIFY_ROWS
from windfall.engine.gpu.transfer import PackedBuffer
from windfall.kernels.trees import NO_NODE, Calibration, NextPass, TreeArrays
from windfall.policies.plan import Bounds

FORECAST_SHAPE = (DEPTHS, len(CHANCE_BUCKETS) + 1, FORECAST_CHILDREN)
Array = np.ndarray[Any, Any]
ARRAYS = ("tokens", "parents", "depth", "rank", "logq", "score")


def tree_buffers(
    device: torch.device, capacity: int, passes: int, deepest: int, staged: int
) -> tuple[TreeArrays, PackedBuffer]:
    """A tree with room for `capacity` nodes that holds only a root, and the buffer to publish it with.

    Arrays that plans may watch lie side by side in the buffer.
    """
    long, number, wide = torch.long, torch.float32, (capacity,)
    buffer = PackedBuffer(
        device,
        tokens=(long, wide),
        parents=(long, wide),
        depth=(long, wide),
        rank=(long, wide),
        logq=(number, wide),
        score=(number, wide),
        expanded=(long, (staged,)),  # see NextPass
        entropy=(number, (staged + 1,)),  # nats, after each expanded node, by its slot; only where it is watched
        length=(long, (1,)),  # columns in the drafter's KV cache
        summary=(number, (passes + 1, 6)),  # see NextPass
        kept=(long, (MAX_VERIFY_ROWS,)),  # the nodes that were verified, ascending, then -1
        path=(long, (MAX_VERIFY_ROWS,)),  # the accepted ones, as rows of `kept`
        outcome=(long, (4,)),  # nodes, rows, accepted rows, the target's next token
    )
    there = buffer.device
    line = torch.full((capacity, deepest + 1), -1, dtype=long, device=device)
    line[0, 0] = 0
    there["parents"][0] = -1
    tree = TreeArrays(
        tokens=there["tokens"],
        parents=there["parents"],
        depth=there["depth"],
        rank=there["rank"],
        logq=there["logq"],
        score=there["score"],
        key=torch.zeros(capacity, device=device),
        chance=torch.ones(capacity, device=device),
        taken=torch.ones(capacity, dtype=torch.bool, device=device),
        ancestors=line,
        slot=torch.zeros(capacity, dtype=long, device=device),
        count=torch.ones(1, dtype=long, device=device),
    )
    return tree, buffer


def next_rows(width: int, published: PackedBuffer, length: Tensor) -> NextPass:
    """Buffers for the rows of the next draft pass."""
    expanded = published.device["expanded"].fill_(NO_NODE)

    def integers(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.long, device=expanded.device)

    return NextPass(
        nodes=integers(width),
        tokens=integers(width),
        positions=integers(width),
        slots=integers(width),
        parent_slots=integers(width),
        own_slots=integers(width),
        mask=torch.zeros(width, len(expanded), dtype=torch.bool, device=expanded.device),
        expanded=expanded,
        staged=integers(1),
        length=length,
        base=length,
        summary=published.device["summary"],
    )


def term_buffers(device: torch.device, shape: tuple[int, int] | None = None) -> tuple[Calibration, PackedBuffer]:
    """What the calibrated rule reads, and the buffer to send it with.

    The buffer also holds the bounds, the floor and, for plans with a shape, a table of this size for it.
    """
    number = torch.float32
    form = {} if shape is None else {"shape": (torch.long, shape)}
    buffer = PackedBuffer(
        device,
        **form,
        weights=(number, (1 + DEPTHS + RANKS,)),
        forecast=(number, FORECAST_SHAPE),
        prices=(number, (2,)),
        floor=(number, (1,)),
        bounds=(number, (len(Bounds._fields),)),
    )
    return Calibration(*(buffer.device[name] for name in ("weights", "forecast", "prices"))), buffer


def read_results(arrays: Mapping[str, Array], root: int, places: int) -> tuple[DraftTree, Tensor, Tensor, int]:
    """The results of a cycle: the drafted tree without empty places, the verified nodes, the accepted path as rows of
    these, and the bonus token.

    The caller gives the root's token, as the published arrays hold the next root already. Only the first `places`
    count: later ones come from draft passes that were launched before the decision to stop.
    """
    count, rows, accepted, bonus = arrays["outcome"].tolist()
    count = min(count, places)
    tokens, parents, depth, rank, logq, score = (arrays[name][:count].copy() for name in ARRAYS)
    kept, path = arrays["kept"][:rows].copy(), arrays["path"][:accepted].copy()
    tokens[0] = root
    real = score > -math.inf
    if not real.all():
        place = real.cumsum() - 1  # the node at each place
        tokens, parents, depth, rank, logq, score = (x[real] for x in (tokens, parents, depth, rank, logq, score))
        parents[1:] = place[parents[1:]]
        kept = place[kept]
    unknown = np.full(len(tokens), math.nan, np.float32)
    drafted = DraftTree.of(Arrays(tokens, parents, logq, score, depth, rank, unknown))
    return drafted, torch.from_numpy(kept), torch.from_numpy(path), bonus
