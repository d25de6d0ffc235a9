"""A draft tree in fixed arrays on the device: grown by kernels, told to the host once a cycle."""

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
from windfall.kernels.gate import Bounds
from windfall.kernels.trees import NO_NODE, Calibration, NextPass, TreeArrays

FORECAST_SHAPE = (DEPTHS, len(CHANCE_BUCKETS) + 1, FORECAST_CHILDREN)
Array = np.ndarray[Any, Any]
ARRAYS = ("tokens", "parents", "depth", "rank", "logq", "score")


def plant(
    device: torch.device, capacity: int, passes: int, deepest: int, staged: int
) -> tuple[TreeArrays, PackedBuffer]:
    """Arrays for this many nodes of at most this depth, a root in place; and the parcel that tells the host of them,
    what plans watch side by side in it."""
    long, number, wide = torch.long, torch.float32, (capacity,)
    parcel = PackedBuffer(
        device,
        tokens=(long, wide),
        parents=(long, wide),
        depth=(long, wide),
        rank=(long, wide),
        logq=(number, wide),
        score=(number, wide),
        expanded=(long, (staged,)),  # see NextPass
        entropy=(number, (staged + 1,)),  # nats, after each expanded node, by its slot; only where it is watched
        length=(long, (1,)),  # columns that the drafter has taken in
        summary=(number, (passes + 1, 6)),  # see NextPass
        kept=(long, (MAX_VERIFY_ROWS,)),  # the nodes that were verified, ascending; -1 behind them
        path=(long, (MAX_VERIFY_ROWS,)),  # the accepted ones, as rows of `kept`
        figures=(long, (4,)),  # nodes, rows, accepted rows, the target's next token
    )
    there = parcel.device
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
    return tree, parcel


def ahead(width: int, told: PackedBuffer, length: Tensor) -> NextPass:
    """Buffers for the rows of the next draft pass."""
    expanded = told.device["expanded"].fill_(NO_NODE)

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
        summary=told.device["summary"],
    )


def terms(device: torch.device, shape: tuple[int, int] | None = None) -> tuple[Calibration, PackedBuffer]:
    """What the calibrated rule reads, and the parcel that brings it, what a gate reads, and the form of a tree where
    there is one of this size."""
    number = torch.float32
    form = {} if shape is None else {"shape": (torch.long, shape)}
    parcel = PackedBuffer(
        device,
        **form,
        weights=(number, (1 + DEPTHS + RANKS,)),
        forecast=(number, FORECAST_SHAPE),
        prices=(number, (2,)),
        floor=(number, (1,)),
        bounds=(number, (len(Bounds._fields),)),
    )
    return Calibration(*(parcel.device[name] for name in ("weights", "forecast", "prices"))), parcel


def told(parcel: Mapping[str, Array], root: int, places: int) -> tuple[DraftTree, Tensor, Tensor, int]:
    """What a cycle told the host: the drafted tree without its empty places, kept nodes, path in them, bonus.

    By then the place of the root holds the next one, so the caller says what it was. Only the first `places` count:
    what lies behind them was drafted before it was known that nobody wants it.
    """
    count, rows, accepted, bonus = parcel["figures"].tolist()
    count = min(count, places)
    tokens, parents, depth, rank, logq, score = (parcel[name][:count].copy() for name in ARRAYS)
    kept, path = parcel["kept"][:rows].copy(), parcel["path"][:accepted].copy()
    tokens[0] = root
    real = score > -math.inf
    if not real.all():
        place = real.cumsum() - 1  # each place's node
        tokens, parents, depth, rank, logq, score = (x[real] for x in (tokens, parents, depth, rank, logq, score))
        parents[1:] = place[parents[1:]]
        kept = place[kept]
    unknown = np.full(len(tokens), math.nan, np.float32)
    drafted = DraftTree.of(Arrays(tokens, parents, logq, score, depth, rank, unknown))
    return drafted, torch.from_numpy(kept), torch.from_numpy(path), bonus
