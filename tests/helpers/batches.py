"""Rounds of a batch without models: texts with known acceptance under a cost curve, for any budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windfall import registry
from windfall.costs.acceptance import Calibrator
from windfall.costs.correction import Correction
from windfall.costs.curves import Costs, Curve
from windfall.policies.budget import NO_PREPARATION, Budget, Load, Outcome, Preparation, Sizes
from windfall.policies.choice import choose

Reals = NDArray[np.float64]
PREPARED = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
TEXT_TOKENS = 200
WARM_UP_ROUNDS = 12
CHANGE_TOKENS = 50  # after which a changing text becomes easy or hard
CONFIDENCE = {"easy": (6.0, 1.2), "fair": (2.0, 1.6), "hard": (1.0, 5.0)}  # Beta, of a node's best child
FALSE_CONFIDENCE = 0.12  # chance of a token that the drafter is sure of, in texts that it cannot follow
SIBLING_SHARE = 0.5  # of the rest, for each next child


def _curve(flat: float, until: int, per_row: float) -> Curve:
    return Curve(PREPARED, tuple(flat + per_row * max(size - until, 0) for size in PREPARED), stepped=True)


CURVES = {  # seconds
    "small": Costs(_curve(60e-6, 64, 0.1e-6), ((0, _curve(500e-6, 64, 0.7e-6)),), 50e-6, 30e-6),
    "8B": Costs(_curve(300e-6, 64, 3e-6), ((0, _curve(5e-3, 64, 5e-3 / 64)),), 100e-6, 50e-6),
}
MIXES = {
    "mixed": ("easy", "hard", "wrong", "fair", "changing"),
    "easy": ("easy",),
    "hard": ("hard",),
    "wrong": ("wrong",),
    "changing": ("changing",),
}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("none", {}),
    "chain of 2": ("chain", {"depth": 2}),
    "chain of 4": ("chain", {"depth": 4}),
    "tree of 8": ("beam", {"depth": 3, "k": 4, "nodes": 8}),
    "tree of 24": ("beam", {"depth": 5, "k": 8, "nodes": 24}),
    "tree of 64": ("beam", {"depth": 6, "k": 8, "nodes": 64}),
    "tetris": ("tetris", {}),
    "batch-gt": ("batch-gt", {}),
    "smart": ("smart", {}),
    "survival": ("survival", {}),
    "auto": ("auto", {}),
}


def speeds(
    curve: str, mix: str, requests: int, length: int, methods: Iterable[str] = METHODS, seed: int = 1
) -> dict[str, float]:
    """Tokens per second of these methods, over `length` tokens for each request."""
    found = {}
    for method in methods:
        name, settings = METHODS[method]
        budget = registry.policy(name, **settings).budget()
        found[method] = Batch(CURVES[curve], requests, MIXES[mix], seed).speed(budget, length)
    return found


@dataclass
class Batch:
    """`requests` texts at a time; a text that has ended makes room for the next of the mix."""

    costs: Costs
    requests: int
    mix: tuple[str, ...]
    seed: int = 0
    calibrator: Calibrator = field(default_factory=Calibrator)
    preparation: Preparation = NO_PREPARATION

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self._kinds = [self.mix[i % len(self.mix)] for i in range(self.requests)]
        self._next = self.requests
        self._progress = np.array([TEXT_TOKENS * i / self.requests for i in range(self.requests)])
        self._corrections = [Correction() for _ in range(self.requests)]

    def speed(self, budget: Budget, length: int) -> float:
        """Tokens per second until each request has had this many tokens on average, after some rounds of learning."""
        for _ in range(WARM_UP_ROUNDS):
            self.round(budget)
        tokens = seconds = 0.0
        while tokens < self.requests * length:
            done = self.round(budget)
            tokens, seconds = tokens + done.tokens, seconds + done.seconds
        return tokens / seconds

    def round(self, budget: Budget) -> Done:
        """Expected tokens and seconds of a round; what is learned from it is drawn."""
        load = Load(self.requests, 0, 256, self.costs, self.calibrator, preparation=self.preparation)
        sizes = budget.sizes(load)
        tree = self._draft(sizes, budget.calibrator or self.calibrator)
        tree.verified[:] = choose(tree.owner, tree.key, self.requests, sizes)
        rows = self.requests + int(tree.verified.sum())
        seconds = load.drafting(sizes.passes, sizes.width) + load.verify(rows)
        gained = np.bincount(tree.owner, tree.true_reach * tree.verified, self.requests) + 1
        accepted = self._walk(tree)
        self._learn(tree, accepted)
        names = ("owner", "parents", "depth", "rank", "logq", "key", "expanded", "verified")
        nodes = (getattr(tree, name) for name in names)
        budget.observe(Outcome(sizes, self.requests, *nodes, accepted, seconds))
        self._advance(gained)
        return Done(sizes, float(gained.sum()), seconds, tree)

    def _draft(self, sizes: Sizes, calibrator: Calibrator) -> Tree:
        shift = np.array([own.shift for own in self._corrections])
        owner = np.arange(self.requests)
        levels: list[Tree] = []
        start, front = 0, Tree.roots(self.requests)
        places = np.full(self.requests, -1)
        for depth in range(1, sizes.passes + 1):
            logq, true = self._children(owner, sizes.k)
            ranks = np.broadcast_to(np.arange(sizes.k), logq.shape)
            step = logq
            if sizes.calibrated:
                chance = calibrator.probabilities(logq, np.full(logq.shape, depth), ranks, shift[owner][:, None])
                step = np.log(chance / np.maximum(chance.sum(1, keepdims=True), 1.0))
            level = Tree.of(
                owner, places, depth, ranks, logq, front.key[:, None] + step, front.true_reach[:, None] * true
            )
            level.chance[:] = true.ravel()
            levels.append(level)
            best = self._frontier(level, sizes.width)
            if depth < sizes.passes:
                level.expanded[best] = True
            owner, places, front = level.owner[best], start + best, level.take(best)
            start += len(level.owner)
        return Tree.join(levels).sorted()

    @staticmethod
    def _frontier(level: Tree, width: int) -> NDArray[np.int64]:
        order = np.lexsort((-level.key, level.owner))
        counts = np.bincount(level.owner)
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        place = np.arange(len(order)) - starts[level.owner[order]]
        return np.asarray(order[place < width])

    def _children(self, owner: NDArray[np.int64], k: int) -> tuple[Reals, Reals]:
        """[nodes, k]: the drafter's log-probabilities of children, and their true chances."""
        kinds = [self._kind(i) for i in range(self.requests)]
        shapes = np.array([CONFIDENCE[{"wrong": "easy"}.get(kind, kind)] for kind in kinds])[owner]
        confidence = np.clip(self._random.beta(shapes[:, 0], shapes[:, 1]), 0.02, 0.995)[:, None]
        shares = SIBLING_SHARE ** np.arange(1, k) * (1 - SIBLING_SHARE) / SIBLING_SHARE
        q = np.concatenate([confidence, (1 - confidence) * shares], 1)
        q = -np.sort(-q, 1)
        wrong = np.array([kind == "wrong" for kind in kinds])[owner][:, None]
        return np.log(q), np.where(wrong, FALSE_CONFIDENCE * q, q)

    def _kind(self, request: int) -> str:
        kind = self._kinds[request]
        if kind != "changing":
            return kind
        return "easy" if int(self._progress[request] // CHANGE_TOKENS) % 2 == 0 else "hard"

    def _walk(self, tree: Tree) -> NDArray[np.bool_]:
        """Which nodes are accepted: at most one child of an accepted node."""
        family = np.unique(np.where(tree.parents >= 0, tree.parents, -1 - tree.owner), return_inverse=True)[1]
        before = np.cumsum(tree.chance) - tree.chance
        starts = np.full(family.max(initial=-1) + 1, np.inf)
        np.minimum.at(starts, family, before)
        draw = self._random.random(len(starts))[family] + starts[family]
        accepted = (before <= draw) & (draw < before + tree.chance)
        for depth in range(2, int(tree.depth.max(initial=0)) + 1):
            here = np.flatnonzero(tree.depth == depth)
            accepted[here] &= accepted[tree.parents[here]]
        return accepted & tree.verified

    def _learn(self, tree: Tree, accepted: NDArray[np.bool_]) -> None:
        known = (tree.parents < 0) | accepted[tree.parents]
        seen = np.flatnonzero(known & tree.verified)
        family = np.where(tree.parents >= 0, tree.parents, len(tree.owner) + tree.owner)[seen]
        owner, parts = tree.owner[seen], (tree.logq[seen], tree.depth[seen], tree.rank[seen])
        outcome = accepted[seen].astype(float)
        shift = np.array([own.shift for own in self._corrections])
        chances = self.calibrator.probabilities(*parts, shift[owner])
        for request, own in enumerate(self._corrections):
            mine = owner == request
            own.learn(chances[mine], outcome[mine])
        if len(seen):
            self.calibrator.learn(*parts, outcome, np.unique(family, return_inverse=True)[1], self.requests)

    def _advance(self, gained: Reals) -> None:
        self._progress += gained
        for request in np.flatnonzero(self._progress >= TEXT_TOKENS):
            self._progress[request] -= TEXT_TOKENS
            self._kinds[request] = self.mix[self._next % len(self.mix)]
            self._corrections[request] = Correction()
            self._next += 1


class Done(NamedTuple):
    """A simulated round."""

    sizes: Sizes
    tokens: float  # expected, of all requests
    seconds: float
    tree: Tree


@dataclass
class Tree:
    """The drafted nodes of all requests, flat."""

    owner: NDArray[np.int64]
    parents: NDArray[np.int64]
    depth: NDArray[np.int64]
    rank: NDArray[np.int64]
    logq: Reals
    key: Reals
    true_reach: Reals
    chance: Reals  # true, given the parent
    expanded: NDArray[np.bool_]
    verified: NDArray[np.bool_]

    @classmethod
    def roots(cls, count: int) -> Tree:
        zero, no = np.zeros(count), np.zeros(count, bool)
        return cls(
            np.arange(count), np.full(count, -1), *[np.zeros(count, int)] * 2, zero, zero, zero + 1, zero, no, no
        )

    @classmethod
    def of(
        cls,
        owner: NDArray[np.int64],
        parents: NDArray[np.int64],
        depth: int,
        rank: NDArray[np.int64],
        logq: Reals,
        key: Reals,
        reach: Reals,
    ) -> Tree:
        k, count = logq.shape[1], logq.size
        owners, above = np.repeat(owner, k), np.repeat(parents, k)
        flags = [np.zeros(count, bool) for _ in range(2)]
        return cls(
            owners,
            above,
            np.full(count, depth),
            rank.ravel().copy(),
            logq.ravel(),
            key.ravel(),
            reach.ravel(),
            np.zeros(count),
            *flags,
        )

    def take(self, nodes: NDArray[np.int64]) -> Tree:
        return Tree(*(part[nodes] for part in vars(self).values()))

    @classmethod
    def join(cls, levels: list[Tree]) -> Tree:
        levels = levels or [cls.roots(0)]
        return cls(*(np.concatenate(parts) for parts in zip(*(vars(level).values() for level in levels), strict=True)))

    def sorted(self) -> Tree:
        """Request by request."""
        order = np.argsort(self.owner, kind="stable")
        place = np.empty(len(order) + 1, np.int64)
        place[order], place[-1] = np.arange(len(order)), -1
        made = self.take(order)
        made.parents = place[made.parents]
        return made
