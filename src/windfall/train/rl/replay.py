"""A backend that replays recorded trees under a cost profile: no model runs, thousands of cycles a second."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from windfall.core.errors import InputError
from windfall.core.files import read_text
from windfall.costs.curves import Costs
from windfall.policies.papers.ltd import NOTHING, View
from windfall.train.rl.config import Config
from windfall.train.rl.recording import Recording, Tree
from windfall.train.rl.rollout import Outcome, split_texts

Array = np.ndarray[Any, Any]
CONTEXT_STEP = 32  # context lengths are rounded down to a multiple of this for verify costs
DECISION_SECONDS = 0.03e-3  # of a decision, unless it is configured


@dataclass(frozen=True)
class Position:
    """A recorded tree, prepared so that the outcome of any depth and size can be looked up."""

    length: int
    room: int
    left: int  # tokens of the text from here on
    scores: Array  # [N - 1] of the drafted nodes
    ends: tuple[int, ...]  # drafted nodes after each level, ends[0] == 0
    ranks: Array  # [levels + 1, a] rank of each path node among the nodes up to that level; N: not drafted yet
    widths: tuple[int, ...]  # nodes expanded by each pass
    entropy: Array  # of the expanded nodes
    measured: tuple[int, ...]  # number of expanded nodes after each pass

    @classmethod
    def of(cls, tree: Tree, k: int) -> Position:
        levels = int(tree.depth[-1])
        ends = np.searchsorted(tree.depth, np.arange(levels + 1), side="right") - 1
        sizes = [1, *(int(size) for size in np.diff(ends))]
        known = ~np.isnan(tree.entropy)
        measured = [0, *np.cumsum(np.bincount(tree.depth[known], minlength=levels + 1))]
        return cls(
            tree.length,
            tree.room,
            tree.left,
            tree.score[1:],
            tuple(map(int, ends)),
            _ranks(tree, ends),
            tuple(min(size, k) for size in sizes),
            tree.entropy[known],
            tuple(map(int, measured)),
        )

    @property
    def levels(self) -> int:
        return len(self.ends) - 1


def _ranks(tree: Tree, ends: Array) -> Array:
    """[levels + 1, a]: the number of drafted nodes up to a level that precede each path node, by score and index."""
    nodes, scores = np.arange(1, len(tree.score)), tree.score[1:]
    ranks = np.full((len(ends), len(tree.path)), len(tree.score), dtype=np.int32)
    for place, node in enumerate(tree.path):
        own = tree.score[node]
        before = np.concatenate([[0], np.cumsum((scores > own) | ((scores == own) & (nodes < node)))])
        drafted = int(tree.depth[node])
        ranks[drafted:, place] = before[ends[drafted:]]
    return ranks


class Replay:
    """A backend over the positions of some recorded texts."""

    def __init__(self, texts: Sequence[Sequence[Position]], costs: Costs, depth: int, seed: int | None = None):
        """`depth`: of the recorded beams. With a seed, texts come endlessly in random order, otherwise once each."""
        if not any(texts):
            raise InputError("the recording has no texts to replay")
        self._texts, self._costs, self._depth = [text for text in texts if text], costs, depth
        self._random = None if seed is None else np.random.default_rng(seed)
        self._order = iter(range(len(self._texts)))
        self._text: Sequence[Position] = ()
        self._place = 0
        self._verify_costs: dict[tuple[int, int], float] = {}
        self.passes = self._level = 0
        self._seconds = 0.0

    def begin(self) -> bool:
        if self._place >= len(self._text):
            place = next(self._order, None) if self._random is None else self._random.integers(len(self._texts))
            if place is None:
                return False
            self._text, self._place = self._texts[int(place)], 0
        self._now = self._text[self._place]
        self.passes = self._level = 0
        self._seconds = self._costs.overhead
        return True

    def draft(self) -> bool:
        now = self._now
        if self._level >= min(now.room - 1, self._depth):
            return False
        self._seconds += self._costs.draft(now.widths[self._level]) + (0.0 if self.passes else self._costs.opening)
        self.passes += 1
        if self._level >= now.levels:  # the pass added no candidates
            return False
        self._level += 1
        return True

    def view(self, newest: bool) -> View:
        now, level = self._now, self._level
        start = now.ends[max(level - 1, 0)] if newest else 0
        first = now.measured[max(level - 1, 0)] if newest else 0
        entropy = now.entropy[first : now.measured[level]] if level else NOTHING
        return View(now.scores[start : now.ends[level]], now.length, level, entropy)

    def verify(self, nodes: int, decision_seconds: float) -> Outcome:
        now = self._now
        nodes = min(nodes, now.ends[self._level])
        accepted = int((now.ranks[self._level] < nodes).sum())
        tokens = min(accepted + 1, now.left)
        self._place += tokens
        seconds = self._seconds + self._verify_seconds(nodes + 1, now.length) + decision_seconds
        return Outcome(tokens, seconds, self.passes, nodes)

    def _verify_seconds(self, rows: int, length: int) -> float:
        key = (rows, length // CONTEXT_STEP)
        if key not in self._verify_costs:
            self._verify_costs[key] = self._costs.verify(rows, length // CONTEXT_STEP * CONTEXT_STEP)
        return self._verify_costs[key]

    def close(self) -> None:
        pass


class ReplaySource:
    """Replays of a recording under a cost profile."""

    def __init__(self, recording: Recording, costs: Costs, config: Config, name: str = "the recording"):
        about = recording.about
        if about["depth"] < config.max_depth or about["k"] != config.k:
            raise InputError(
                f"{name} holds beams of depth {about['depth']} and width {about['k']}; "
                f"record with --depth {config.max_depth} --k {config.k}"
            )
        self.environments = config.environments
        milliseconds = config.decision_ms
        self.decision_seconds: float | None = DECISION_SECONDS if milliseconds is None else milliseconds / 1000
        self.about = {"costs": costs.as_dict(), "target": about["target"], "sampling": about["sampling"]}
        self._costs, self._depth = costs, int(about["depth"])
        self._texts = split_texts(positions(recording))

    def training_backend(self, seed: int) -> Replay:
        return Replay(self._texts["train"], self._costs, self._depth, seed)

    def evaluation_backend(self, split: str) -> Replay:
        return Replay(self._texts[split], self._costs, self._depth)


def positions(recording: Recording) -> list[list[Position]]:
    """The positions of each text."""
    texts: list[list[Position]] = [[] for _ in recording.ids]
    for tree in recording.trees():
        texts[tree.text].append(Position.of(tree, recording.about["k"]))
    return texts


def read_costs(file: Path) -> Costs:
    """From the JSON of `Costs.as_dict` or of `windfall profile --json`."""
    try:
        given = json.loads(read_text(file))
        return Costs.of_dict(given.get("costs", given))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"'{file}' holds no cost profile; `windfall profile --json` writes one") from error
