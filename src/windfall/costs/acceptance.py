"""Estimate how likely drafted tokens are to be accepted, from the drafter's confidence and past cycles."""

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
DEPTHS, RANKS = 6, 5  # deeper levels and higher ranks use the correction of the last one
MAX_LOG_ODDS = 5.0  # the drafter's log-odds are clipped to ± this
EVIDENCE_DECAY = 0.998  # per cycle: recent cycles weigh more, because the text changes
PRIOR_DRIFT = 0.9995  # share of the weights that is kept after a cycle without verified nodes
PRIOR_OBSERVATIONS = 4.0  # weight of the prior, for each parameter
CHANCE_BUCKETS = (0.35, 0.75)  # forecasts are kept for three ranges of the parent's acceptance probability
FORECAST_CHILDREN = 8  # number of children of a node that are forecast
FORECAST_DECAY = 0.97  # of a running mean, per expanded node
KAPPA_RANGE = (0.4, 2.5)
MAX_LOG_RATIO = 80.0  # of the probabilities of two siblings, against overflow
MAX_UNASKED_PASSES = 8  # upper bound of `min_draft_passes`
SPEEDUP_STEP = 0.02  # of the running mean, per time of a plain decoding step
FIT_EVERY_CYCLES = 4  # once EAGER_FIT_NODES nodes were observed
EAGER_FIT_NODES = 64  # up to this many observed nodes, the fit is updated after every cycle


class Forecast(NamedTuple):
    """Acceptance probabilities of the children of a node that is not expanded yet, by rank.

    Past expansions are split into two cases by the first child: `good` if its probability was high, else `bad`.
    """

    bad: list[float]  # [FORECAST_CHILDREN]
    good: list[float]  # [FORECAST_CHILDREN]
    good_share: float  # share of the expansions that were good

    @property
    def mean(self) -> list[float]:
        return [bad + self.good_share * (good - bad) for bad, good in zip(self.bad, self.good, strict=True)]


class Calibrator:
    """Estimates P(accepted | parent accepted) = σ(w · logit(q) + b[depth] + c[rank]) from the drafter's probability q.

    Before the first cycle w = 1 and b = c = 0, so the estimate is q. The parameters are fitted online: every few cycles
    by one Newton step on the logistic loss, with a prior, and older cycles weigh less.

    A calibrator also forecasts the acceptance probabilities of children before they are drafted, and tracks the recent
    speed-up over plain decoding and the number of draft passes that nearly all cycles have.
    """

    def __init__(self) -> None:
        self.weights = np.zeros(1 + DEPTHS + RANKS)
        self.weights[0] = 1.0
        self._prior = np.eye(len(self.weights)) * PRIOR_OBSERVATIONS
        self._evidence = np.zeros_like(self._prior)
        self.kappa = 1.0  # temperature of the drafter's distribution in coupled sampling, see `Dice.couple`
        self.observed = 0  # nodes
        self._unread: list[Step] = []
        cases = [[first * 0.4**rank for rank in range(FORECAST_CHILDREN)] for first in (0.25, 0.75)]
        self._forecast = [[[list(case) for case in cases] for _ in range(3)] for _ in range(DEPTHS)]
        # ^ indexed by the parent's depth, the range of its probability, bad (0) or good (1), the child's rank
        self._good_share = [[0.5] * 3 for _ in range(DEPTHS)]
        self.speedup = 1.0  # recent tokens per second over plain decoding's
        self.timed = True  # whether the speed-up is updated from measured seconds
        self.usual_passes = 1.0  # draft passes that nearly all recent cycles have
        self.version = 0  # increases when anything above changes, except kappa and usual_passes

    def chances(self, tree: DraftTree, shift: float = 0.0) -> Floats:
        """The same as `accept` for all nodes except the root, [N - 1], computed in numpy; faster for many nodes."""
        known = tree.arrays
        return self.probabilities(known.logq[1:], known.depth[1:], known.rank[1:], shift)

    def probabilities(
        self, logq: NDArray[Any], depth: NDArray[Any], rank: NDArray[Any], shift: Floats | float = 0.0
    ) -> Floats:
        """The same from arrays of any shape; `shift` is added to the log-odds."""
        slope, corrections = self.weights[0], self.weights[1:]
        scores = slope * _log_odds(logq) + corrections[np.minimum(depth, DEPTHS) - 1] + shift
        return _sigmoid(scores + corrections[DEPTHS + np.minimum(rank, RANKS - 1)])

    def accept(self, tree: DraftTree, start: int = 1, shift: float = 0.0) -> list[float]:
        """The probability of each node, from node `start` on, to be accepted if its parent is.

        `shift` is the correction of this request, in log-odds.
        """
        slope, *corrections = self.shifted(shift).tolist()
        known = tree.arrays
        nodes = zip(*(x[start:].tolist() for x in (known.logq, known.depth, known.rank)), strict=True)
        scores = (
            slope * _one_log_odds(logq)
            + corrections[min(depth, DEPTHS) - 1]
            + corrections[DEPTHS + min(rank, RANKS - 1)]
            for logq, depth, rank in nodes
        )
        return [1 / (1 + math.exp(-max(-30.0, min(30.0, score)))) for score in scores]

    def shifted(self, shift: float) -> Floats:
        """The weights with the correction of a request: every depth's correction grows by `shift`."""
        weights: Floats = self.weights.copy()
        weights[1 : 1 + DEPTHS] += shift
        return weights

    def forecast(self, depth: int, chance: float) -> Forecast:
        """The forecast for the children of a node at this depth with this acceptance probability."""
        depth, bucket = min(depth, DEPTHS - 1), bisect_left(CHANCE_BUCKETS, chance)
        bad, good = self._forecast[depth][bucket]
        return Forecast(bad, good, self._good_share[depth][bucket])

    def mean_forecasts(self) -> list[list[list[float]]]:
        """The mean of every forecast, by the parent's depth, the range of its probability, and the child's rank."""
        return [
            [Forecast(bad, good, share).mean for (bad, good), share in zip(buckets, shares, strict=True)]
            for buckets, shares in zip(self._forecast, self._good_share, strict=True)
        ]

    def update_forecast(self, depth: int, chance: float, children: Sequence[float]) -> None:
        """Update the forecast with the acceptance probabilities of the children of a node that was just expanded."""
        self.version += 1
        seen = [*children[:FORECAST_CHILDREN], *[0.0] * (FORECAST_CHILDREN - len(children))]
        depth, bucket = min(depth, DEPTHS - 1), bisect_left(CHANCE_BUCKETS, chance)
        cases, rate = self._forecast[depth][bucket], 1 - FORECAST_DECAY
        good = int(2 * seen[0] > cases[0][0] + cases[1][0])
        cases[good] = [old + rate * (new - old) for old, new in zip(cases[good], seen, strict=True)]
        self._good_share[depth][bucket] += rate * (good - self._good_share[depth][bucket])

    def update_speedup(self, tokens: float, seconds: float, plain: float) -> None:
        """Update the speed-up with a cycle of this many tokens and seconds; plain decoding takes `plain` per token."""
        if not self.timed:
            return
        self.speedup += SPEEDUP_STEP * seconds / plain * (tokens * plain / seconds - self.speedup)
        self.speedup = max(self.speedup, 1.0)
        self.version += 1

    @property
    def min_draft_passes(self) -> int:
        """The number of draft passes after which a policy is first asked whether to stop."""
        return int(self.usual_passes)

    def record_draft_passes(self, passes: int) -> None:
        """Update the usual number of passes. It settles where about one cycle in five has fewer."""
        change = 0.1 if passes > self.min_draft_passes + 1 else -0.4
        self.usual_passes = min(max(self.usual_passes + change, 1.0), MAX_UNASKED_PASSES)

    def observe(self, step: Step) -> None:
        """Learn from the verified nodes of a cycle whose parents were accepted."""
        if len(step.tree) == 1:
            return
        self._unread.append(step)
        if len(self._unread) >= FIT_EVERY_CYCLES or self.observed < EAGER_FIT_NODES or step.finish:
            self._fit()

    def _fit(self) -> None:
        """Update the parameters by one Newton step over the cycles since the last update."""
        cycles, self._unread = self._unread, []
        parts: list[tuple[NDArray[Any], ...]] = []
        nodes_before = 0
        for step in cycles:
            nodes, accepted = outcomes(step)
            known, families = step.tree.arrays, step.tree.arrays.parents[nodes] + nodes_before
            parts.append((known.logq[nodes], known.depth[nodes], known.rank[nodes], accepted, families))
            nodes_before += len(step.tree)
        logq, depth, rank, accepted, families = (np.concatenate(part) for part in zip(*parts, strict=True))
        self.learn(logq, depth, rank, accepted, families, len(cycles))

    def learn(
        self,
        logq: NDArray[Any],
        depth: NDArray[Any],
        rank: NDArray[Any],
        accepted: Floats,
        families: NDArray[np.int64],
        cycles: int,
    ) -> None:
        """Update the parameters with the verified nodes of some cycles whose parents were accepted.

        `families` has the same number for siblings only.
        """
        self._fit_kappa(logq, accepted, families)
        features = self._features(logq, depth, rank)
        chance = _sigmoid(features @ self.weights)
        decayed = EVIDENCE_DECAY**cycles * self._evidence
        self._evidence = decayed + (features * (chance * (1 - chance))[:, None]).T @ features
        self.weights = self.weights + np.linalg.solve(self._prior + self._evidence, features.T @ (accepted - chance))
        self.observed += len(accepted)
        self.version += 1

    def drift_to_prior(self) -> None:
        """Move the parameters slightly towards the prior.

        This is done after cycles that verified no drafted node, so that drafting is tried again at some time.
        """
        self.version += 1
        self._evidence *= PRIOR_DRIFT
        self.weights *= PRIOR_DRIFT
        self.weights[0] += 1 - PRIOR_DRIFT

    def _fit_kappa(self, logq: Floats, accepted: Floats, families: NDArray[np.int64]) -> None:
        """Update kappa by one gradient step that makes the accepted siblings likelier.

        `families` is the parent of each node. Families without an accepted child are ignored: in the others, the
        probabilities of siblings relative to each other are exact.
        """
        hits = np.flatnonzero(accepted)
        drawn = np.full(families.max() + 1, np.nan)  # by family
        drawn[families[hits]] = logq[hits]
        over = logq - drawn[families]  # each sibling's log-probability relative to the accepted one; NaN if none was
        inside = over == over
        family, over = families[inside], over[inside]
        share = np.exp(np.minimum(over, MAX_LOG_RATIO))
        shares = np.bincount(family, share)
        surprise = np.bincount(family, share * over)[shares > 0] / shares[shares > 0]
        kappa = self.kappa * math.exp(0.02 * np.clip(surprise, -3.0, 3.0).sum())
        self.kappa = min(max(kappa, KAPPA_RANGE[0]), KAPPA_RANGE[1])

    @staticmethod
    def _features(logq: NDArray[Any], depth: NDArray[Any], rank: NDArray[Any]) -> Floats:
        features = np.zeros((len(logq), 1 + DEPTHS + RANKS))
        features[:, 0] = _log_odds(logq)
        rows = np.arange(len(logq))
        features[rows, 1 + np.minimum(depth, DEPTHS) - 1] = 1
        features[rows, 1 + DEPTHS + np.minimum(rank, RANKS - 1)] = 1
        return features

    def as_dict(self) -> dict[str, Any]:
        """The learned state as plain data."""
        if self._unread:
            self._fit()
        return {
            "weights": self.weights.tolist(),
            "evidence": self._evidence.tolist(),
            "outlook": self._forecast,
            "good": self._good_share,
            "kappa": self.kappa,
            "gain": self.speedup,
            "usual": self.usual_passes,
            "observed": self.observed,
        }

    @classmethod
    def of_dict(cls, saved: dict[str, Any]) -> Calibrator:
        """The calibrator that `as_dict` described; damaged data is a ValueError, KeyError or TypeError."""
        made = cls()
        blank = made.as_dict()
        found = {name: np.asarray(saved[name], dtype=float) for name in ("weights", "evidence", "outlook", "good")}
        for name, array in found.items():
            if array.shape != np.shape(blank[name]) or not np.isfinite(array).all():
                raise ValueError(f"saved calibration: {name} is damaged")
        made.weights, made._evidence = found["weights"], found["evidence"]
        made._forecast, made._good_share = found["outlook"].tolist(), found["good"].tolist()
        made.kappa, made.speedup, made.observed = float(saved["kappa"]), float(saved["gain"]), int(saved["observed"])
        made.usual_passes = float(saved.get("usual", 1.0))
        return made


def shifted_weights(calibrators: Sequence[Calibrator], shifts: Sequence[float]) -> Floats:
    """`Calibrator.shifted` of several requests, one row for each."""
    weights = np.array([calibrator.weights for calibrator in calibrators])
    weights[:, 1 : 1 + DEPTHS] += np.array(shifts)[:, None]
    return weights


def outcomes(step: Step) -> tuple[NDArray[np.int64], Floats]:
    """The verified nodes whose parents were accepted, and 1.0 for each of them that was accepted too."""
    on_path = np.zeros(len(step.tree), dtype=bool)
    on_path[step.path.numpy()] = True
    nodes = np.flatnonzero(on_path[step.tree.arrays.parents[1:]]) + 1
    return nodes, on_path[nodes].astype(float)


class Reliability(NamedTuple):
    """Confidence and outcome of every verified node whose parent was accepted."""

    drafted: Floats  # the drafter's probability
    calibrated: Floats  # the calibrator's estimate before the outcome was known
    accepted: Floats  # 1.0 or 0.0

    @classmethod
    def of(cls, steps: Iterable[Step], calibrator: Calibrator) -> Reliability:
        """Replay cycles in order; each is predicted before the calibrator learns from it."""
        parts = []
        for step in steps:
            nodes, accepted = outcomes(step)
            if len(nodes):
                chances = np.array(calibrator.accept(step.tree))[nodes - 1]
                parts.append((np.exp(step.tree.logq.numpy()[nodes]), chances, accepted))
            calibrator.observe(step)
        return cls(*(np.concatenate([part[i] for part in parts]) if parts else np.zeros(0) for i in range(3)))

    def as_dict(self) -> dict[str, Any]:
        before, after = (expected_calibration_error(x, self.accepted) for x in (self.drafted, self.calibrated))
        bins = {"before": self.bins(self.drafted), "after": self.bins(self.calibrated)}
        return {"nodes": len(self.accepted), "ece_before": before, "ece_after": after, "bins": bins}

    def bins(self, chances: Floats) -> list[tuple[float, float, int]]:
        """`confidence_bins` of one of the two confidences."""
        return confidence_bins(chances, self.accepted, 10)


def confidence_bins(chances: Floats, outcomes: Floats, count: int) -> list[tuple[float, float, int]]:
    """Mean confidence, frequency of acceptance and number of nodes in each non-empty bin of equal width."""
    place = np.minimum((chances * count).astype(int), count - 1)
    inside = [place == b for b in range(count) if (place == b).any()]
    return [(float(chances[i].mean()), float(outcomes[i].mean()), int(i.sum())) for i in inside]


def expected_calibration_error(chances: Floats, outcomes: Floats, bins: int = 15) -> float:
    """Mean gap between confidence and acceptance frequency over bins of equal width (Guo et al. 2017)."""
    found = confidence_bins(chances, outcomes, bins)
    return sum(abs(confidence - frequency) * size / len(chances) for confidence, frequency, size in found)


def _one_log_odds(logq: float) -> float:
    return max(-MAX_LOG_ODDS, min(MAX_LOG_ODDS, logq - math.log(-math.expm1(min(logq, -1e-6)))))


def _log_odds(logq: NDArray[Any]) -> Floats:
    exact = logq.astype(float)
    odds: Floats = exact - np.log(-np.expm1(np.minimum(exact, -1e-6)))
    return np.maximum(np.minimum(odds, MAX_LOG_ODDS), -MAX_LOG_ODDS)


def _sigmoid(x: Floats) -> Floats:
    odds: Floats = np.exp(np.maximum(np.minimum(x, 30), -30))
    return np.divide(odds, 1 + odds)
