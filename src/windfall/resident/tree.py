"""A draft tree in fixed arrays on the device: grown by kernels, told to the host once a cycle."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from windfall.calibration import BUCKETS, CHILDREN, DEPTHS, RANKS
from windfall.kernels.grow import Ahead, Terms, TreeArrays
from windfall.resident.judge import MOST as MOST_ROWS
from windfall.resident.parcel import Parcel
from windfall.tree import DraftTree

OUTLOOK = (DEPTHS, len(BUCKETS) + 1, CHILDREN)
ARRAYS = ("tokens", "parents", "depth", "rank", "logq", "score")


def plant(device: torch.device, capacity: int, deepest: int) -> tuple[TreeArrays, Parcel]:
    """Arrays for this many nodes of at most this depth, a root in place; and the parcel that tells the host of them."""
    long, wide = torch.long, (capacity,)
    parcel = Parcel(
        device,
        tokens=(long, wide),
        parents=(long, wide),
        depth=(long, wide),
        rank=(long, wide),
        logq=(torch.float32, wide),
        score=(torch.float32, wide),
        kept=(long, (MOST_ROWS,)),  # the nodes that were verified, ascending; -1 behind them
        path=(long, (MOST_ROWS,)),  # the accepted ones, as rows of `kept`
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
        line=line,
        slot=torch.zeros(capacity, dtype=long, device=device),
        count=torch.ones(1, dtype=long, device=device),
    )
    return tree, parcel


def ahead(device: torch.device, width: int, staged: int, length: Tensor, promise: Tensor) -> Ahead:
    """Buffers for the rows of the next draft pass."""

    def integers(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.long, device=device)

    return Ahead(
        nodes=integers(width),
        tokens=integers(width),
        positions=integers(width),
        slots=integers(width),
        above=integers(width),
        here=integers(width),
        mask=torch.zeros(width, staged, dtype=torch.bool, device=device),
        expanded=integers(staged) - 1,
        staged=integers(1),
        length=length,
        promise=promise,
    )


def terms(device: torch.device) -> tuple[Terms, Parcel]:
    """What the calibrated rule reads, and the parcel that brings it."""
    number = torch.float32
    parcel = Parcel(device, weights=(number, (1 + DEPTHS + RANKS,)), outlook=(number, OUTLOOK), prices=(number, (2,)))
    return Terms(*(parcel.device[name] for name in ("weights", "outlook", "prices"))), parcel


def told(parcel: dict[str, Tensor], root: int) -> tuple[DraftTree, Tensor, Tensor, int]:
    """What a cycle told the host: the drafted tree without its empty places, kept nodes, path in them, bonus.

    By then the place of the root holds the next one, so the caller says what it was.
    """
    count, rows, accepted, bonus = parcel["figures"].tolist()
    tokens, parents, depth, rank, logq, score = (parcel[name][:count].clone() for name in ARRAYS)
    kept, path = parcel["kept"][:rows].clone(), parcel["path"][:accepted].clone()
    tokens[0] = root
    real = score > -math.inf
    if not bool(real.all()):
        place = real.cumsum(0) - 1  # each place's node
        tokens, parents, depth, rank, logq, score = (x[real] for x in (tokens, parents, depth, rank, logq, score))
        parents[1:] = place[parents[1:]]
        kept = place[kept]
    unknown = torch.full((len(tokens),), math.nan)
    return DraftTree(tokens, parents, logq, score, depth, rank, unknown), kept, path, bonus
