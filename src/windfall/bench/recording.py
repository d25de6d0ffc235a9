"""Turns the Steps of an answer into the record that a benchmark keeps."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windfall.core.types import Step
from windfall.engine.engine import Generation

REPEATED_TOKENS = 8  # that must occur again to count as repetition
Integers = NDArray[np.int64]


def turn_record(generation: Generation, prompt_tokens: int, timed: bool) -> dict[str, Any]:
    """One answer: how its cycles went and, where it was timed, how long they took."""
    steps, stats = generation.steps, generation.stats
    return {
        "prompt_tokens": prompt_tokens,
        "tokens": stats.tokens,
        "digest": digest(generation.token_ids),
        "finish": generation.finish_reason,
        "seconds": stats.seconds if timed else None,
        "ttft": stats.ttft if timed else None,
        "prefill": stats.prefill if timed else None,
        "split": stats.split._asdict() if timed else None,
        "committed": [len(step.tokens) for step in steps],
        "accepted": [step.accepted for step in steps],
        "rows": [len(step.tree) for step in steps],
        "drafted": [step.drafted_tokens for step in steps],
        "passes": [step.draft_passes for step in steps],
        "depth": [int(step.tree.depth.max()) for step in steps],
        "nodes": node_counts(steps),
        "tried": tried(steps),
    }


def digest(tokens: Sequence[int]) -> str:
    """A short hash of token ids."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()[:16]


def node_counts(steps: Sequence[Step]) -> list[list[int]]:
    """[depth, rank, layer rank, verified, judged, accepted] for every place at which nodes were verified."""
    parts = [_nodes(step) for step in steps if len(step.tree) > 1]
    if not parts:
        return []
    rows = np.concatenate(parts)  # [n, 5]
    places, inverse = np.unique(rows[:, :3], axis=0, return_inverse=True)
    counts = [np.bincount(inverse.ravel(), weights) for weights in (None, rows[:, 3], rows[:, 4])]
    found: list[list[int]] = np.column_stack([places, *counts]).astype(int).tolist()
    return found


def _nodes(step: Step) -> Integers:
    """[n, 5]: depth, rank, layer rank, judged, accepted of the verified nodes but the root."""
    tree = step.tree
    depth, rank, parents = (array.numpy() for array in (tree.depth, tree.rank, tree.parents))
    accepted = np.zeros(len(tree), dtype=np.int64)
    accepted[step.path.numpy()] = 1
    columns = depth[1:], rank[1:], layer_ranks(depth, tree.score.numpy())[1:], accepted[parents[1:]], accepted[1:]
    return np.column_stack(columns).astype(np.int64)


def layer_ranks(depth: Integers, score: NDArray[np.float32]) -> Integers:
    """Each node's rank by path probability among the nodes of its depth, 0 for the likeliest; ties keep their order."""
    order = np.lexsort((-score, depth))  # by depth, then by falling score; stable
    first = np.searchsorted(depth[order], depth[order])  # where each node's depth begins
    places = np.empty(len(depth), dtype=np.int64)
    places[order] = np.arange(len(depth)) - first
    return places


def tried(steps: Sequence[Step]) -> list[int]:
    """By depth from 1: the number of cycles in which a node there had an accepted parent."""
    deepest = max((int(step.tree.depth.max()) for step in steps), default=0)
    counts = [0] * deepest
    for step in steps:
        parents = set(step.tree.parents[1:].tolist())
        for depth, node in enumerate(step.path.tolist()):
            if node in parents:
                counts[depth] += 1
    return counts


def repeated_share(answers: Sequence[Sequence[int]]) -> float:
    """The share of the answers' 8-grams that occurred before in the same answer."""
    again = total = 0
    for tokens in answers:
        seen: set[tuple[int, ...]] = set()
        for start in range(len(tokens) - REPEATED_TOKENS + 1):
            gram = tuple(tokens[start : start + REPEATED_TOKENS])
            again, total = again + (gram in seen), total + 1
            seen.add(gram)
    return again / total if total else 0.0
