"""The speed of policies on a machine with given costs, replayed over recorded trees without running a model.

    windfall train record --out trees.npz …
    windfall profile --full --json > costs.json        (on the machine)
    python benchmarks/replay.py trees.npz costs.json beam:depth=7:k=10:nodes=60 auto [--texts N] [--json FILE]

A policy may expand what the recorded beams expanded; other nodes have no children. The time of
decisions is not counted. `drafted` and `verified` are means over cycles.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from provenance import publish

from windfall.bench.methods import parse_method
from windfall.core.tree import DraftTree
from windfall.core.types import Grow, Split, Step
from windfall.costs.acceptance import Calibrator
from windfall.costs.curves import Costs
from windfall.engine.host_loop import Growth
from windfall.policies.base import TreePolicy
from windfall.policies.context import Context
from windfall.train.rl.recording import Recording, Tree
from windfall.train.rl.replay import read_costs


class Position(NamedTuple):
    """A recorded tree, and its nodes' tokens and log-probabilities."""

    tree: Tree
    tokens: np.ndarray[Any, Any]
    logq: np.ndarray[Any, Any]


class GpuDrafter:
    """A tree that grows by what was recorded."""

    def __init__(self, position: Position):
        self._position = position
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(position.tree.parents[1:].tolist(), 1):
            self._children.setdefault(parent, []).append(node)
        self.tree = DraftTree.root(int(position.tokens[0]))
        self.recorded = [0]  # which recorded node each node is

    def expand(self, grow: Grow) -> None:
        found = [
            (node, child, rank)
            for node in grow.nodes.tolist()
            for rank, child in enumerate(self._children.get(self.recorded[node], [])[: grow.k])
        ]
        if found:
            parents, children, ranks = (torch.tensor(each) for each in zip(*found, strict=True))
            tokens, logq = (torch.from_numpy(array)[children] for array in (self._position.tokens, self._position.logq))
            self.tree = self.tree.extend(parents, tokens.long(), logq.float(), ranks)
            self.recorded += children.tolist()

    def accepted(self, keep: torch.Tensor) -> list[int]:
        """Which of these nodes the text goes through."""
        rows = {self.recorded[node]: row for row, node in enumerate(keep.tolist())}
        path = [0]
        for node in self._position.tree.path.tolist():
            if node not in rows:
                break
            path.append(rows[node])
        return path


def cycle(policy: TreePolicy, position: Position, costs: Costs, calibrator: Calibrator) -> Step:
    """What the policy does there, and what it takes."""
    about = position.tree
    context = Context(about.length, about.room, 0.0, costs, calibrator)
    draft, growth, drafting = GpuDrafter(position), Growth(policy, context), 0.0
    while (grow := growth.next(draft.tree)) is not None:
        drafting += costs.draft(len(grow.nodes)) + (0.0 if growth.passes > 1 else costs.opening)
        draft.expand(grow)
    keep = policy.select(draft.tree, context)
    path = draft.accepted(keep)
    emitted = (0,) * min(len(path), about.left)
    seconds = Split(draft=drafting, verify=costs.verify(len(keep), about.length) + costs.overhead)
    kept = draft.tree.select(keep)
    return Step(emitted, "", kept, torch.tensor(path), draft.tree, keep, growth.passes, seconds)


def play(method: str, texts: list[list[Position]], costs: Costs) -> dict[str, float]:
    """All texts, one after the other."""
    policy, calibrator, steps = parse_method(method).make(), Calibrator(), list[Step]()
    plain = 0.0
    for text in texts:
        at = 0
        while at < len(text):
            step = cycle(policy, text[at], costs, calibrator)
            policy.observe(step)
            calibrator.observe(step)
            plain += sum(
                costs.verify(1, each.tree.length) + costs.overhead for each in text[at : at + len(step.tokens)]
            )
            at += len(step.tokens)
            steps.append(step)
    tokens, seconds = sum(len(step.tokens) for step in steps), sum(step.seconds.total for step in steps)
    return {
        "tokens_per_second": tokens / seconds,
        "over_plain": plain / seconds,
        "tau": tokens / len(steps),
        "passes": sum(step.draft_passes for step in steps) / len(steps),
        "drafted": sum(len(step.drafted) for step in steps) / len(steps),
        "verified": sum(len(step.tree) for step in steps) / len(steps),
        "cycle_ms": 1000 * seconds / len(steps),
    }


def read(file: Path, most: int) -> tuple[Recording, list[list[Position]]]:
    recording, node = Recording.load(file), 0
    texts: list[list[Position]] = [[] for _ in recording.ids]
    for tree in recording.trees():
        own = slice(node, node + len(tree.parents))
        texts[tree.text].append(Position(tree, recording.arrays["tokens"][own], recording.arrays["logq"][own]))
        node = own.stop
    return recording, texts[:most]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("costs", type=Path)
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--json")
    given = parser.parse_args()
    recording, texts = read(given.recording, given.texts)
    costs = read_costs(given.costs)
    found = {method: play(method, texts, costs) for method in given.methods}
    about = {"recorded": {name: recording.about[name] for name in ("target", "drafter", "sampling", "depth", "k")}}
    publish({**about, "texts": len(texts), "costs": costs.as_dict(), "methods": found}, given.json)


if __name__ == "__main__":
    main()
