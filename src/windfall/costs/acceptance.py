"""Draft confidence → acceptance probability, refitted every few cycles from what the target accepted."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windfall.core.tree import DraftTree
from windfall.core.types import Step

Floats = NDArray[np.float64]
DEPTHS, RANKS = 6, 5  # levels and siblings beyond these share the last one's correction
SURE = 5.0  # log-odds beyond which confidence is not believed
FORGET = 0.998  # of the evidence, per cycle: the text changes
RELAX = 0.9995  # of what was learnt, per cycle without evidence
PRIOR = 4.0  # observations that the prior is worth, in each direction
BUCKETS = (0.35, 0.75)  # of a parent's own chance
CHILDREN = 8  # siblings whose acceptance is foreseen
STEADY = 0.97  # of the outlook, per expanded node
KAPPA = (0.4, 2.5)
SHARP = 80.0  # log-odds between siblings beyond which one of them is all there is
MOST_SETTLED = 8  # draft passes that nobody is asked about, at the most
READ_EVERY = 4  # cycles of a text between two steps of the fit, once EAGER nodes were judged
EAGER = 64


class Outlook(NamedTuple):
    """The chances of a node's children yet to be drafted, by rank, when drafting goes badly and when it goes well."""

    bad: list[float]  # [CHILDREN]
    good: list[float]  # [CHILDREN]
    often: float  # how often it goes well

    @property
    def mean(self) -> list[float]:
        return [bad + self.often * (good - bad) for bad, good in zip(self.bad, self.good, strict=True)]


class Calibrator:
    """P(accepted | parent accepted) = σ(w · logit(q) + depth + rank), starting at q itself.

    The fit is one damped Newton step every few cycles on the logistic loss, with old evidence fading. Beside it the
    calibrator keeps an outlook: how likely the children of a node will be accepted, before they are drafted.
    """

    def __init__(self) -> None:
        self.weights = np.zeros(1 + DEPTHS + RANKS)
        self.weights[0] = 1.0
        self._prior = np.eye(len(self.weights)) * PRIOR
        self._evidence = np.zeros_like(self._prior)
        self.kappa = 1.0
        self.observed = 0
        self._unread: list[Step] = []
        moods = [[mood * 0.4**rank for rank in range(CHILDREN)] for mood in (0.25, 0.75)]
        self._outlook = [[[list(mood) for mood in moods] for _ in range(3)] for _ in range(DEPTHS)]
        # ^ by the parent's depth, its chance, bad or good, the child's rank
        self._good = [[0.5] * 3 for _ in range(DEPTHS)]  # how often it is good
        self.gain = 1.0  # tokens per second, as a multiple of plain decoding's, lately
        self.timed = True  # whether that follows the clock
        self.usual = 1.0  # draft passes that nearly all cycles have, lately
        self.version = 0  # of all the above, but for kappa and `usual`

    def chances(self, tree: DraftTree) -> Floats:
        """`accept` for the many nodes of a whole tree, [N - 1]."""
        logq, depth, rank = (x[1:] for x in (tree.arrays.logq, tree.arrays.depth, tree.arrays.rank))
        own, corrections = self.weights[0], self.weights[1:]
        scores = own * _odds(logq) + corrections[np.minimum(depth, DEPTHS) - 1]
        return _sigmoid(scores + corrections[DEPTHS + np.minimum(rank, RANKS - 1)])

    def accept(self, tree: DraftTree, start: int = 1) -> list[float]:
        """Each node's chance to be accepted if its parent is, from node `start` on."""
        slope, *corrections = self.weights.tolist()
        known = tree.arrays
        nodes = zip(*(x[start:].tolist() for x in (known.logq, known.depth, known.rank)), strict=True)
        scores = (
            slope * _log_odds(logq) + corrections[min(depth, DEPTHS) - 1] + corrections[DEPTHS + min(rank, RANKS - 1)]
            for logq, depth, rank in nodes
        )
        return [1 / (1 + math.exp(-max(-30.0, min(30.0, score)))) for score in scores]

    def outlook(self, depth: int, chance: float) -> Outlook:
        """What to expect of the children of a node at this depth that itself had this chance."""
        depth, bucket = min(depth, DEPTHS - 1), bisect_left(BUCKETS, chance)
        bad, good = self._outlook[depth][bucket]
        return Outlook(bad, good, self._good[depth][bucket])

    def means(self) -> list[list[list[float]]]:
        """The mean outlook: by the parent's depth, the bucket of its chance, the child's rank."""
        return [
            [
                [bad + often * (good - bad) for bad, good in zip(*moods, strict=True)]
                for moods, often in zip(buckets, shares, strict=True)
            ]
            for buckets, shares in zip(self._outlook, self._good, strict=True)
        ]

    def foresee(self, depth: int, chance: float, children: Sequence[float]) -> None:
        """Learn the outlook from children that were just drafted (none of them: an empty list)."""
        self.version += 1
        seen = [*children[:CHILDREN], *[0.0] * (CHILDREN - len(children))]
        depth, bucket = min(depth, DEPTHS - 1), bisect_left(BUCKETS, chance)
        moods = self._outlook[depth][bucket]
        good = int(2 * seen[0] > moods[0][0] + moods[1][0])
        moods[good] = [old + (1 - STEADY) * (new - old) for old, new in zip(moods[good], seen, strict=True)]
        self._good[depth][bucket] += (1 - STEADY) * (good - self._good[depth][bucket])

    def pace(self, tokens: float, seconds: float, plain: float) -> None:
        """Learn how much faster than plain decoding (one token in `plain` seconds) the cycles are."""
        if not self.timed:
            return
        self.gain += 0.02 * seconds / plain * (tokens * plain / seconds - self.gain)
        self.gain = max(self.gain, 1.0)
        self.version += 1

    @property
    def least(self) -> int:
        """Draft passes that need no decision, where each decision costs time."""
        return int(self.usual)

    def drafted(self, passes: int) -> None:
        """Learn how many passes cycles have: so many that one in five would rather have had fewer."""
        change = 0.1 if passes > self.least + 1 else -0.4
        self.usual = min(max(self.usual + change, 1.0), MOST_SETTLED)

    def observe(self, step: Step) -> None:
        """Learn from a cycle: every verified node whose parent was accepted was either accepted or not."""
        if len(step.tree) == 1:
            return
        self._unread.append(step)
        if len(self._unread) >= READ_EVERY or self.observed < EAGER or step.finish:
            self._read()

    def _read(self) -> None:
        """Take in the cycles seen since the last time, in one step of the fit."""
        cycles, self._unread = self._unread, []
        parts: list[tuple[NDArray[Any], ...]] = []
        nodes_before = 0
        for step in cycles:
            nodes, accepted = judged(step)
            known, own = step.tree.arrays, step.tree.arrays.parents[nodes] + nodes_before
            parts.append((known.logq[nodes], known.depth[nodes], known.rank[nodes], accepted, own))
            nodes_before += len(step.tree)
        logq, depth, rank, accepted, families = (np.concatenate(part) for part in zip(*parts, strict=True))
        self._fit_kappa(logq, accepted, families)
        features = self._features(logq, depth, rank)
        chance = _sigmoid(features @ self.weights)
        faded = FORGET ** len(cycles) * self._evidence
        self._evidence = faded + (features * (chance * (1 - chance))[:, None]).T @ features
        self.weights = self.weights + np.linalg.solve(self._prior + self._evidence, features.T @ (accepted - chance))
        self.observed += len(accepted)
        self.version += 1

    def relax(self) -> None:
        """Nothing was verified: drift back to the prior, so that one bad stretch does not end drafting for good."""
        self.version += 1
        self._evidence *= RELAX
        self.weights *= RELAX
        self.weights[0] += 1 - RELAX

    def _fit_kappa(self, logq: Floats, accepted: Floats, families: NDArray[np.int64]) -> None:
        """One step up the likelihood of which sibling was drawn, as a function of how sharp the drafter is taken to be.

        Only where one of the siblings was drawn: among them the softmax is exact, whatever lies outside the tree.
        """
        hits = np.flatnonzero(accepted)
        drawn = np.full(families.max() + 1, np.nan)  # by family
        drawn[families[hits]] = logq[hits]
        over = logq - drawn[families]  # a sibling's log-probability over that of the one that was drawn
        inside = over == over
        family, over = families[inside], over[inside]
        share = np.exp(np.minimum(over, SHARP))
        shares = np.bincount(family, share)
        surprise = np.bincount(family, share * over)[shares > 0] / shares[shares > 0]
        kappa = self.kappa * math.exp(0.02 * np.clip(surprise, -3.0, 3.0).sum())
        self.kappa = min(max(kappa, KAPPA[0]), KAPPA[1])

    @staticmethod
    def _features(logq: Floats, depth: Floats, rank: Floats) -> Floats:
        features = np.zeros((len(logq), 1 + DEPTHS + RANKS))
        features[:, 0] = _odds(logq)
        rows = np.arange(len(logq))
        features[rows, 1 + np.minimum(depth, DEPTHS) - 1] = 1
        features[rows, 1 + DEPTHS + np.minimum(rank, RANKS - 1)] = 1
        return features

    def as_dict(self) -> dict[str, Any]:
        """All that was learnt, as plain data."""
        if self._unread:
            self._read()
        return {
            "weights": self.weights.tolist(),
            "evidence": self._evidence.tolist(),
            "outlook": self._outlook,
            "good": self._good,
            "kappa": self.kappa,
            "gain": self.gain,
            "usual": self.usual,
            "observed": self.observed,
        }

    @classmethod
    def of_dict(cls, saved: dict[str, Any]) -> Calibrator:
        made = cls()
        arrays: dict[str, Any] = {
            "weights": made.weights,
            "evidence": made._evidence,
            "outlook": made._outlook,
            "good": made._good,
        }
        found = {name: np.asarray(saved[name], dtype=float) for name in arrays}
        for name, wanted in arrays.items():
            if found[name].shape != np.shape(wanted) or not np.isfinite(found[name]).all():
                raise ValueError(f"saved calibration: {name} is damaged")
        made.weights, made._evidence = found["weights"], found["evidence"]
        made._outlook, made._good = found["outlook"].tolist(), found["good"].tolist()
        made.kappa, made.gain, made.observed = float(saved["kappa"]), float(saved["gain"]), int(saved["observed"])
        made.usual = float(saved.get("usual", 1.0))
        return made


def judged(step: Step) -> tuple[NDArray[np.int64], Floats]:
    """The verified nodes whose parents were accepted, and 1.0 for those that were accepted too."""
    on_path = np.zeros(len(step.tree), dtype=bool)
    on_path[step.path.numpy()] = True
    nodes = np.flatnonzero(on_path[step.tree.arrays.parents[1:]]) + 1
    return nodes, on_path[nodes].astype(float)


class Reliability(NamedTuple):
    """For every judged node: what the drafter said, what the calibrator made of it beforehand, and what came."""

    said: Floats
    made: Floats
    came: Floats

    @classmethod
    def of(cls, steps: Iterable[Step], calibrator: Calibrator) -> Reliability:
        """Run through cycles as they happened, believing before learning."""
        parts = []
        for step in steps:
            nodes, came = judged(step)
            if len(nodes):
                parts.append(
                    (np.exp(step.tree.logq.numpy()[nodes]), np.array(calibrator.accept(step.tree))[nodes - 1], came)
                )
            calibrator.observe(step)
        return cls(*(np.concatenate([part[i] for part in parts]) if parts else np.zeros(0) for i in range(3)))

    def as_dict(self) -> dict[str, Any]:
        said, made = (expected_calibration_error(x, self.came) for x in (self.said, self.made))
        bins = {"before": self.bins(self.said), "after": self.bins(self.made)}
        return {"nodes": len(self.came), "ece_before": said, "ece_after": made, "bins": bins}

    def bins(self, chances: Floats, count: int = 10) -> list[tuple[float, float, int]]:
        """Mean confidence, frequency of acceptance and number of nodes, by confidence."""
        place = np.minimum((chances * count).astype(int), count - 1)
        inside = [place == b for b in range(count) if (place == b).any()]
        return [(float(chances[i].mean()), float(self.came[i].mean()), int(i.sum())) for i in inside]


def _log_odds(logq: float) -> float:
    return max(-SURE, min(SURE, logq - math.log(-math.expm1(min(logq, -1e-6)))))


def _odds(logq: NDArray[Any]) -> Floats:
    """The same of many."""
    exact = logq.astype(float)
    odds: Floats = exact - np.log(-np.expm1(np.minimum(exact, -1e-6)))
    return np.maximum(np.minimum(odds, SURE), -SURE)


def _sigmoid(x: Floats) -> Floats:
    odds: Floats = np.exp(np.maximum(np.minimum(x, 30), -30))
    return np.divide(odds, 1 + odds)


def expected_calibration_error(chances: Floats, outcomes: Floats, bins: int = 15) -> float:
    """Mean gap between confidence and frequency over bins of equal width (Guo et al. 2017)."""
    place = np.minimum((chances * bins).astype(int), bins - 1)
    gaps = [
        abs(float(chances[place == b].mean()) - float(outcomes[place == b].mean())) * float((place == b).mean())
        for b in range(bins)
        if (place == b).any()
    ]
    return sum(gaps)
