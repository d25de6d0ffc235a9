"""The results of a round as the host reads them: each request's verified tree, and a sample of whole trees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windfall.core.tree import Arrays, DraftTree
from windfall.engine.gpu.batch.round import SAMPLED
from windfall.policies.budget import Outcome, Sizes

Published = Mapping[str, Any]  # numpy arrays by name, see `Round.published`


def read_tree(arrays: Published, seat: int, root: int, drafted: bool) -> tuple[DraftTree, Tensor, int]:
    """The verified tree of a request, its accepted path, and the target's next token."""
    start, end = arrays["starts"][seat : seat + 2].tolist()
    count = int(arrays["accepted"][seat])
    path, bonus = torch.from_numpy(arrays["path"][seat, :count] - start), int(arrays["tokens"][seat, count - 1])
    if not drafted:
        return DraftTree.root(root), path, bonus
    tokens, parents, logq, score, depth, rank = (
        arrays[name][start:end].copy() for name in ("row_tokens", "parents", "logq", "score", "depth", "rank")
    )
    parents -= start
    parents[0] = -1
    unknown = np.full(len(tokens), np.nan, np.float32)
    return DraftTree.of(Arrays(tokens, parents, logq, score, depth, rank, unknown)), path, bonus


def sampled_seats(turn: int, live: int) -> list[int]:
    """The seats whose whole trees are in the results of the round with this turn."""
    return [(turn + place) % live for place in range(min(SAMPLED, live))]


def read_outcome(arrays: Published, turn: int, live: int, sizes: Sizes, seconds: float) -> Outcome:
    """What became of the drafted nodes of the sampled requests."""
    seats = sampled_seats(turn, live)
    names = ("parents", "depth", "rank", "logq", "key", "taken")
    found: dict[str, list[Any]] = {name: [] for name in ("owner", "verified", "accepted", *names)}
    known = 0  # nodes of earlier requests
    for place, seat in enumerate(seats):
        count = int(arrays["sample_count"][place])
        tree = {name: arrays[f"sample_{name}"][place, 1:count] for name in names}
        real = tree["key"] > -np.inf
        number = np.concatenate([[-1], np.where(real, known + real.cumsum() - 1, -1)])  # of each node in the outcome
        verified = np.isin(np.arange(1, count), _nodes(arrays, seat))
        accepted = np.isin(np.arange(1, count), _nodes(arrays, seat, accepted=True))
        found["owner"].append(np.full(int(real.sum()), place))
        found["parents"].append(number[tree["parents"][real]])
        for name in names[1:]:
            found[name].append(tree[name][real])
        found["verified"].append(verified[real])
        found["accepted"].append(accepted[real])
        known += int(real.sum())
    joined = {name: np.concatenate(parts) if parts else np.zeros(0) for name, parts in found.items()}
    return Outcome(
        sizes=sizes,
        requests=len(seats),
        owner=joined["owner"].astype(np.int64),
        parents=joined["parents"].astype(np.int64),
        depth=joined["depth"].astype(np.int64),
        rank=joined["rank"].astype(np.int64),
        logq=joined["logq"].astype(np.float32),
        key=joined["key"].astype(np.float32),
        expanded=joined["taken"].astype(bool) & (joined["depth"] < sizes.passes),
        verified=joined["verified"].astype(bool),
        accepted=joined["accepted"].astype(bool),
        seconds=seconds,
    )


def _nodes(arrays: Published, seat: int, accepted: bool = False) -> Any:
    """The verified or the accepted nodes of a request, as numbers in its tree."""
    start, end = arrays["starts"][seat : seat + 2].tolist()
    if accepted:
        return arrays["nodes"][arrays["path"][seat, : arrays["accepted"][seat]]]
    return arrays["nodes"][start:end]
