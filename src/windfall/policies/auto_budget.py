"""The budget of `auto`: the sizes with the most tokens per second of all requests together."""

from __future__ import annotations

import math

import numpy as np

from windfall.costs.acceptance import DEPTHS, FORECAST_CHILDREN, Calibrator
from windfall.policies.budget import Budget, Load, Outcome, Sizes
from windfall.policies.outlook import MAX_WIDTH, Outlook

WIDTHS = (1, 2, 4, MAX_WIDTH)  # nodes of a request in one draft pass
MAX_PASSES = 12  # draft passes of a round
EXPLORATION_SHARE = 0.01  # of the time that may be spent on drafts that should not pay
PROBED_NODES = 8  # drafted nodes that a probe verifies, where rows are not free
MAX_FAMILIES = 16  # groups of siblings that one round's update of the forecasts learns from
UPDATE_EVERY_ROUNDS = 4  # of the sizes, once some rounds have been seen
EAGER_ROUNDS = 8  # at first the sizes are computed in every round
NODES_PER_PASS = 32  # verified nodes after which a new drafter may draft one pass more
TRUST_MEMORY = 0.98  # share of the evidence about the estimates that is kept per round
TRUST_PRIOR = 8.0  # accepted nodes that the evidence is weighed against


class AutoBudget(Budget):
    """Maximises (requests + Σ acceptance of the verified nodes) / (draft passes + verify(rows)) over all sizes.

    The acceptance of nodes is taken from recent trees, and forecast where these were not deep or wide enough. Where
    plain decoding is fastest, there are no draft passes, except for probes in a hundredth of the time.
    """

    def __init__(self, nodes: int):
        """`nodes`: maximum rows of one request."""
        self._nodes = nodes
        self._outlook = Outlook()
        self._calibrator: Calibrator | None = None
        self._trust = Trust()
        self._saved = 0.0  # seconds that may be spent on probes
        self._rounds = 0
        self._best: Sizes | None = None
        self._seen: tuple[object, ...] = ()  # what the best sizes were computed for

    def sizes(self, load: Load) -> Sizes:
        self._calibrator = load.calibrator
        self._rounds += 1
        seen = (load.requests, load.costs, load.room > MAX_PASSES)
        due = self._rounds <= EAGER_ROUNDS or self._rounds % UPDATE_EVERY_ROUNDS == 0
        if self._best is None or due or seen != self._seen:
            self._best, self._seen = self._compute(load), seen
        if self._best.passes or load.room < 2:
            return self._best
        return self._probe(load) or self._best

    def _compute(self, load: Load) -> Sizes:
        """The fastest sizes."""
        requests, trust = load.requests, self._trust.factor
        nodes, trees = self._outlook.nodes(load.calibrator)
        rows = np.array(load.sizes(min(requests * self._nodes, requests + len(nodes.reach) * requests // trees + 1)))
        seconds = np.array([load.verify(int(size)) for size in rows])
        share = requests / trees  # each remembered tree stands for this many requests
        wanted = (rows - requests) / share  # nodes of the remembered trees
        best, most = Sizes(0, 1, 1, int(rows[0])), requests / float(seconds[0])
        known = 1 + load.calibrator.observed // NODES_PER_PASS
        deepest = min(MAX_PASSES, int(nodes.depth.max(initial=0)), load.room - 1, known)
        for width in WIDTHS:
            narrow = nodes.width <= width
            for passes in range(1, deepest + 1):
                reach = nodes.reach[narrow & (nodes.depth <= passes)]
                sums = np.concatenate([[0.0], np.cumsum(reach)])
                tokens = requests + trust * share * np.interp(wanted, np.arange(len(sums)), sums)
                speed = tokens / (seconds + load.drafting(passes, width))
                place = int(np.argmax(speed))
                if float(speed[place]) > most:
                    most = float(speed[place])
                    best = self._of(load, passes, width, rows, seconds, place, most)
        return best

    def _of(
        self, load: Load, passes: int, width: int, rows: np.ndarray, seconds: np.ndarray, place: int, speed: float
    ) -> Sizes:
        """These sizes. Where rows are not free up to the next prepared size, only nodes worth their price are taken."""
        floor, limit = -math.inf, int(rows[place])
        if not load.stepped and place:
            wider = min(place + max(len(rows) // 8, 1), len(rows) - 1)
            narrower = max(place - max(len(rows) // 8, 1), 0)
            price = (seconds[wider] - seconds[narrower]) / (rows[wider] - rows[narrower]) * speed
            floor, limit = math.log(max(price, 1e-9)), int(rows[wider])
        return Sizes(passes, width, FORECAST_CHILDREN, limit, self._nodes, floor, calibrated=True)

    def _probe(self, load: Load) -> Sizes | None:
        """A small draft that should not pay, if there is time to spend on it."""
        plain = load.verify(load.requests)
        self._saved += EXPLORATION_SHARE * plain
        rows = next(
            size
            for size in [*load.sizes(load.requests + PROBED_NODES * 8), load.requests + PROBED_NODES]
            if size > load.requests
        )
        rows = rows if load.stepped else load.requests + PROBED_NODES
        seconds = load.drafting(1, 1) + load.verify(rows) - plain
        if self._saved < seconds:
            return None
        self._saved = 0.0
        return Sizes(1, 1, FORECAST_CHILDREN, rows, self._nodes, calibrated=True)

    def observe(self, outcome: Outcome) -> None:
        self._trust.learn(float(np.exp(outcome.key[outcome.verified]).sum()), int(outcome.accepted.sum()))
        if self._calibrator is None or not len(outcome.owner):
            return
        self._update_forecasts(outcome, self._calibrator)
        self._outlook.record(outcome, self._calibrator)

    def _update_forecasts(self, outcome: Outcome, calibrator: Calibrator) -> None:
        """Teach the calibrator which children some of the expanded nodes had."""
        reach = np.exp(outcome.key.astype(float))
        family = np.where(outcome.parents >= 0, outcome.parents, -1 - outcome.owner)  # siblings have the same
        above = np.where(outcome.parents >= 0, reach[outcome.parents], 1.0)
        chance = reach / np.maximum(above, 1e-12)
        starts = np.flatnonzero(outcome.rank == 0)
        stride = -(-len(starts) // MAX_FAMILIES)
        for start in starts[self._rounds % stride :: stride].tolist():
            end = start + 1
            while end < len(family) and family[end] == family[start]:
                end += 1
            parent, depth = int(outcome.parents[start]), int(outcome.depth[start]) - 1
            own = 1.0 if parent < 0 else float(chance[parent])
            last = DEPTHS if depth == outcome.sizes.passes - 1 else depth + 1  # deeper levels are like the deepest
            for level in range(depth, max(last, depth + 1)):
                calibrator.update_forecast(level, own, chance[start:end].tolist())


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
