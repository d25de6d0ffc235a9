"""The budget of `auto`: the sizes with the most tokens per second of all requests together. See docs/auto.md."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from windfall.core.tree import Integers
from windfall.costs.acceptance import FORECAST_CHILDREN, Calibrator
from windfall.policies.budget import CONTEXT_STEP, NO_PREPARATION, Budget, Load, Outcome, Sizes, usual_sizes
from windfall.policies.outlook import MAX_WIDTH, Outlook, Reals

WIDTHS = (1, 4, MAX_WIDTH)  # nodes of a request in one draft pass
PASSES = (1, 2, 3, 4, 6, 8, 12)  # draft passes of a round
MAX_PASSES = PASSES[-1]
KEPT_FACTOR = 1.02  # sizes stay as they are unless others should be faster by this factor
PREPARATION_SHARE = 0.25  # of a preparation's time that must be lost before it pays: an engine usually runs for long
EXPLORATION_SHARE = 0.005  # of the time that may be spent on drafts that should not pay
PROBED_NODES = 8  # drafted nodes that a probe verifies, where rows are not free
LARGE_BATCH = 16  # requests
UPDATE_EVERY_ROUNDS = 8  # of the sizes in large batches, which change slowly, and on a GPU, whose rounds are short
SIMILAR_SHARE = 1 / 8  # of the requests: if fewer came or left, the sizes of a large batch stay
EAGER_ROUNDS = 8  # of a batch, at first: the sizes are computed in every round
NODES_PER_PASS = 32  # verified nodes after which a new drafter may draft one pass more
TRUST_MEMORY = 0.98  # share of the evidence about the estimates that is kept per round
TRUST_PRIOR = 8.0  # accepted nodes that the evidence is weighed against


class AutoBudget(Budget):
    """Maximises (requests + Σ acceptance of the verified nodes) / (draft passes + verify(rows)) over all sizes.

    The acceptance of nodes is taken from recent trees, and forecast where these were not deep or wide enough. Where
    plain decoding is fastest, there are no draft passes, except for probes in 0.5% of the time.
    """

    def __init__(self, nodes: int):
        """`nodes`: maximum rows of one request."""
        self._nodes = nodes
        self._outlook, self._trust = Outlook(), Trust()
        self._calibrator: Calibrator | None = None
        self._saved = 0.0  # seconds that may be spent on probes
        self._lost = 0.0  # seconds that rounds took longer because faster passes were not prepared
        self._rounds = 0
        self._stepped = False
        self._best: Sizes | None = None
        self._best_for = 0, 0  # requests and room
        self._seconds, self._seconds_for = np.zeros(0), tuple[object, ...]()

    @property
    def largest(self) -> Sizes:
        return Sizes(MAX_PASSES, MAX_WIDTH, FORECAST_CHILDREN, 0, calibrated=True)

    def usual_sizes(self, requests: int, rows: Sequence[int]) -> list[Sizes]:
        return usual_sizes(self.largest, WIDTHS, requests, rows)

    def sizes(self, load: Load) -> Sizes:
        self._calibrator, self._stepped = load.calibrator, load.stepped
        self._rounds += 1
        if 2 * abs(load.requests - self._best_for[0]) > load.requests:  # another batch
            self._rounds = 1
        similar = self._similar(load)
        if self._best is None or self._due(load.requests) or not similar:
            kept = self._best if similar else None
            self._best, self._best_for = self._fastest(load, kept), (load.requests, _room(load))
        if self._best.passes:
            return self._best._replace(rows=max(self._best.rows, load.requests))
        return (self._probe(load) if load.room > 1 else None) or _plain(load)

    def _similar(self, load: Load) -> bool:
        """Whether the batch is about the one that the sizes were computed for."""
        requests, room = self._best_for
        few = SIMILAR_SHARE if requests >= LARGE_BATCH else 0
        return _room(load) == room and abs(load.requests - requests) <= few * requests

    def _due(self, requests: int) -> bool:
        """Whether this round's trees are recorded, and the sizes of this round computed."""
        return self._rounds <= EAGER_ROUNDS or self._rounds % self._period(requests) == 0

    def _period(self, requests: int) -> int:
        return UPDATE_EVERY_ROUNDS if requests >= LARGE_BATCH or self._stepped else 1

    def _fastest(self, load: Load, kept: Sizes | None) -> Sizes:
        """The sizes with the most tokens per second; `kept` ones if these are about as fast."""
        requests = load.requests
        nodes, trees = self._outlook.nodes(load.calibrator)
        known = 1 + load.calibrator.observed // NODES_PER_PASS
        deepest = min(MAX_PASSES, int(nodes.depth.max(initial=0)), load.room - 1, known)
        if deepest < 1:
            return _plain(load)
        shapes = [(passes, width) for width in WIDTHS for passes in PASSES if passes <= deepest]
        passes, widths = np.array(shapes).T[:, :, None]
        drafted = (nodes.depth <= passes) & (nodes.width <= widths)  # [shapes, nodes]
        share = requests / trees  # each remembered tree stands for this many requests
        rows = requests + np.ceil(share * np.cumsum(drafted, 1)).astype(np.int64)
        rows = np.minimum(rows, requests * self._nodes)
        tokens = requests + self._trust.factor * share * np.cumsum(nodes.reach * drafted, 1)
        seconds = self._verify_seconds(load, int(rows.max()))
        drafting = np.array([load.drafting(*shape) for shape in shapes])[:, None]
        speed = tokens / (seconds[rows - requests] + drafting)
        speed[rows > (load.max_rows or math.inf)] = 0.0
        plain = requests / float(seconds[0])
        place = self._best_place(load, shapes, rows, tokens, speed, plain)
        if place is None:
            return _plain(load)
        shape, count = place
        most = float(speed[shape, count])
        if most <= plain * (1.0 if kept is None or kept.passes else KEPT_FACTOR):
            return _plain(load)
        if kept is not None and (kept.passes, kept.width) in shapes:
            own = shapes.index((kept.passes, kept.width))
            now = float(speed[own].max(where=rows[own] <= kept.rows, initial=0.0))
            if most <= now * KEPT_FACTOR and now > plain:
                return kept
        depth, width = shapes[shape]
        return self._of(load, depth, width, int(rows[shape, count]), seconds, most)

    def _best_place(
        self, load: Load, shapes: list[tuple[int, int]], rows: Integers, tokens: Reals, speed: Reals, plain: float
    ) -> tuple[int, int] | None:
        """The place of the highest speed among the passes that a GPU has prepared; None if there is none.

        Others are prepared once rounds have lost a good part of the time without them that their preparation takes.
        """
        fastest = _place_of_most(speed)
        if not speed[fastest]:
            return None
        if load.preparation is NO_PREPARATION or not load.stepped:
            return fastest
        sizes = load.costs.verifies[0][1].sizes
        verify = np.array([load.preparation.verify(size) for size in sizes])
        drafts = np.array([load.preparation.drafts(*shape) for shape in shapes])
        preparing = drafts[:, None] + verify[np.minimum(np.searchsorted(sizes, rows), len(sizes) - 1)]
        if not preparing[fastest]:
            return fastest
        ready = np.where(preparing > 0, 0.0, speed)
        prepared = _place_of_most(ready)
        at_hand, made = max((plain, load.requests), (float(ready[prepared]), float(tokens[prepared])))
        rounds = self._period(load.requests) if self._rounds > EAGER_ROUNDS else 1
        self._lost += rounds * made * max(1 / at_hand - 1 / float(speed[fastest]), 0.0)
        if self._lost < PREPARATION_SHARE * preparing[fastest]:
            return prepared if ready[prepared] else None
        self._lost = 0.0
        return fastest

    def _verify_seconds(self, load: Load, rows: int) -> Reals:
        """Seconds of verify passes over the roots and 0, 1, 2, … drafted nodes, at least up to `rows` in total."""
        situation = (load.requests, load.costs, load.context // CONTEXT_STEP)
        if situation != self._seconds_for or len(self._seconds) <= rows - load.requests:
            self._seconds = load.verify_over(np.arange(load.requests, 2 * rows + 1))
            self._seconds_for = situation
        return self._seconds

    def _of(self, load: Load, passes: int, width: int, rows: int, seconds: Reals, speed: float) -> Sizes:
        """These sizes. Where every row has its price, only nodes that are worth it are verified."""
        floor = -math.inf
        if load.stepped:
            rows = load.prepared(rows)
        else:
            extra = rows - load.requests
            less, more = extra - (extra + 3) // 4, extra + (extra + 3) // 4
            price = float(seconds[more] - seconds[less]) / (more - less) * speed
            floor, rows = math.log(max(price, 1e-9)), load.requests + more
        return Sizes(passes, width, FORECAST_CHILDREN, rows, self._nodes, floor, calibrated=True)

    def _probe(self, load: Load) -> Sizes | None:
        """A small draft that should not pay, if there is time to spend on it."""
        plain = load.verify(load.requests)
        self._saved += EXPLORATION_SHARE * plain
        rows = load.prepared(load.requests + 1) if load.stepped else load.requests + PROBED_NODES
        seconds = load.drafting(1, 1) + load.verify(rows) - plain
        seconds += load.preparation.drafts(1, 1) + load.preparation.verify(rows)
        if self._saved < seconds:
            return None
        self._saved = 0.0
        return Sizes(1, 1, FORECAST_CHILDREN, rows, self._nodes, calibrated=True)

    def observe(self, outcome: Outcome) -> None:
        self._trust.learn(float(np.exp(outcome.key[outcome.verified]).sum()), int(outcome.accepted.sum()))
        probed = self._best is not None and not self._best.passes
        recorded = probed or self._stepped or self._due(outcome.requests)  # a GPU's runner learns from some rounds only
        if self._calibrator is None or not len(outcome.owner) or not recorded:
            return
        self._outlook.record(outcome, self._calibrator)


def _place_of_most(table: Reals) -> tuple[int, int]:
    row, column = divmod(int(np.argmax(table)), table.shape[1])
    return row, column


def _room(load: Load) -> int:
    return min(load.room, MAX_PASSES + 1)


def _plain(load: Load) -> Sizes:
    return Sizes(0, 1, 1, load.requests)


class Trust:
    """Accepted nodes over expected ones in recent rounds: estimates that are too high are found out in one round."""

    def __init__(self) -> None:
        self._expected = self._accepted = 0.0

    def learn(self, expected: float, accepted: float) -> None:
        """Learn from the verified nodes of a round."""
        self._expected = TRUST_MEMORY * self._expected + expected
        self._accepted = TRUST_MEMORY * self._accepted + accepted

    @property
    def factor(self) -> float:
        """By which expected nodes are multiplied; at most 1."""
        return min((self._accepted + TRUST_PRIOR) / (self._expected + TRUST_PRIOR), 1.0)
