"""The budget of `auto`: the sizes with the most tokens per second of all requests together. See docs/auto.md."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from windfall.core.tree import Integers
from windfall.costs.acceptance import FORECAST_CHILDREN, Calibrator
from windfall.policies.budget import (
    CONTEXT_STEP,
    NO_PREPARATION,
    Budget,
    Load,
    Outcome,
    PlainRounds,
    Sizes,
    usual_sizes,
)
from windfall.policies.outlook import MAX_WIDTH, Outlook, Reals

WIDTHS = (1, 4, MAX_WIDTH)  # nodes of a request in one draft pass
PASSES = (1, 2, 3, 4, 6, 8, 12)  # draft passes of a round
MAX_PASSES = PASSES[-1]
KEPT_FACTOR = 1.02  # sizes stay as they are unless others should be faster by this factor
PREPARATION_SHARE = 0.25  # of a preparation's time that must be lost before it pays: an engine usually runs for long
EXPLORATION_SHARE = 0.005  # of the time that may be lost with drafts that should not pay
LEAST_LOSS = 0.05  # the smallest loss that is assumed for a probe, as a share of a plain round
LARGE_BATCH = 16  # requests
UPDATE_EVERY_ROUNDS = 8  # of the sizes in large batches, which change slowly, and on a GPU, whose rounds are short
SIMILAR_SHARE = 1 / 8  # of the requests: if fewer came or left, the sizes of a large batch stay
SHORTLY_SIMILAR_SHARE = 1 / 4  # the same where `prepare` is called: the sizes are updated a few rounds later
EAGER_ROUNDS = 8  # of a batch, at first: the sizes are computed in every round
NODES_PER_PASS = 32  # verified nodes after which a new drafter may draft one pass more
TRUST_MEMORY = 128.0  # accepted nodes that the evidence about the estimates comes from
TRUST_PRIOR = 8.0  # accepted nodes that the evidence is weighed against


class AutoBudget(Budget):
    """Maximises (requests + Σ acceptance of the verified nodes) / (draft passes + verify(rows)) over all sizes.

    The acceptance of nodes is taken from recent trees, and forecast where these were not deep or wide enough. Where
    plain decoding is fastest, there are no draft passes, except for probes, which should cost 0.5% of the time.
    """

    def __init__(self, nodes: int):
        """`nodes`: maximum rows of one request."""
        self._nodes = nodes
        self._outlook, self._trust = Outlook(), Trust()
        self._calibrator: Calibrator | None = None
        self._saved = 0.0  # seconds that may be lost with probes
        self._probe: tuple[Sizes, float] | None = None  # sizes of probes where plain decoding is faster, and their loss
        self._lost = 0.0  # seconds that rounds took longer because faster passes were not prepared
        self._rounds = 0
        self._stepped = False
        self._best: Sizes | None = None
        self._best_for = 0, 0  # requests and room
        self._best_since = 0  # the round of the last update
        self._prepares = False  # whether somebody calls `prepare`
        self._seconds, self._seconds_for = np.zeros(0), tuple[object, ...]()

    @property
    def largest(self) -> Sizes:
        return Sizes(MAX_PASSES, MAX_WIDTH, FORECAST_CHILDREN, 0, calibrated=True)

    def without_drafter(self) -> PlainRounds:
        return PlainRounds()

    def usual_sizes(self, requests: int, rows: Sequence[int]) -> list[Sizes]:
        return usual_sizes(self.largest, WIDTHS, requests, rows)

    def sizes(self, load: Load) -> Sizes:
        self._calibrator, self._stepped = load.calibrator, load.stepped
        self._rounds += 1
        if 2 * abs(load.requests - self._best_for[0]) > load.requests:  # another batch
            self._rounds, self._best_since = 1, 0
        best = self._best
        if best is None or not self._similar(load) or (self._due(load.requests) and not self._prepares):
            best = self._update(load)
        return self._limited(best, load) or self._explore(load) or _plain(load)

    def prepare(self, load: Load) -> None:
        self._prepares = True
        age = self._rounds - self._best_since
        outdated = self._rounds <= EAGER_ROUNDS or age >= self._period(load.requests)
        if outdated or self._best_for != (load.requests, _room(load)):
            self._update(load)

    def _update(self, load: Load) -> Sizes:
        kept = self._best if self._similar(load) else None
        self._best = self._fastest(load, kept)
        self._best_for, self._best_since = (load.requests, _room(load)), self._rounds
        return self._best

    def _similar(self, load: Load) -> bool:
        """Whether the batch is about the one that the sizes were computed for."""
        requests, room = self._best_for
        difference = abs(load.requests - requests)
        if self._prepares:  # the sizes will be updated soon
            return difference <= max(SHORTLY_SIMILAR_SHARE * requests, 1)
        return _room(load) == room and difference <= (SIMILAR_SHARE * requests if requests >= LARGE_BATCH else 0)

    def _due(self, requests: int) -> bool:
        """Whether a host loop records the trees of this round, and computes its sizes."""
        return self._rounds <= EAGER_ROUNDS or self._rounds % self._period(requests) == 0

    def _period(self, requests: int) -> int:
        return UPDATE_EVERY_ROUNDS if requests >= LARGE_BATCH or self._stepped else 1

    def _fastest(self, load: Load, kept: Sizes | None) -> Sizes:
        """The sizes with the most tokens per second; `kept` ones if these are about as fast."""
        requests, self._probe = load.requests, None
        nodes, trees = self._outlook.nodes(load.calibrator)
        known = 1 + load.calibrator.observed // NODES_PER_PASS
        deepest = min(MAX_PASSES, int(nodes.depth.max(initial=0)), load.room - 1, known)
        if deepest < 1:  # no node of the recent trees is likely
            self._set_probe(load, Sizes(1, 1, FORECAST_CHILDREN, load.prepared(requests + 1), self._nodes), requests)
            return _plain(load)
        shapes = [(passes, width) for width in WIDTHS for passes in PASSES if passes <= deepest]
        passes, widths = np.array(shapes).T[:, :, None]
        drafted = (nodes.depth <= passes) & (nodes.width <= widths)  # [shapes, nodes]
        share = requests / trees  # each remembered tree stands for this many requests
        rows = requests + np.ceil(share * np.cumsum(drafted, 1)).astype(np.int64)
        rows = np.minimum(rows, requests * self._nodes)
        if load.max_rows:
            rows = np.minimum(rows, load.max_rows + 1)  # those beyond the limit are all the same
        tokens = requests + self._trust.factor * share * np.cumsum(nodes.reach * drafted, 1)
        seconds = self._verify_seconds(load, int(rows.max()))
        drafting = np.array([load.drafting(*shape) for shape in shapes])[:, None]
        speed = tokens / (seconds[rows - requests] + drafting)
        speed[rows > (load.max_rows or math.inf)] = 0.0
        plain = requests / float(seconds[0])
        place = self._best_place(load, shapes, rows, tokens, speed, plain)
        chosen = place or _place_of_most(speed)
        shape, most = shapes[chosen[0]], float(speed[chosen])
        if not most:
            return _plain(load)
        best = self._of(load, *shape, int(rows[chosen]), seconds, most)
        if place is None or most <= plain * (1.0 if kept is None or kept.passes else KEPT_FACTOR):
            self._set_probe(load, best, float(tokens[chosen]))
            return _plain(load)
        if kept is not None and (kept.passes, kept.width) in shapes:
            own = shapes.index((kept.passes, kept.width))
            now = float(speed[own].max(where=rows[own] <= kept.rows, initial=0.0))
            if most <= now * KEPT_FACTOR and now > plain:
                return kept
        return best

    def _set_probe(self, load: Load, sizes: Sizes, tokens: float) -> None:
        """Probes have these sizes, and should bring this number of tokens."""
        if load.room > 1:
            seconds = load.drafting(sizes.passes, sizes.width) + load.verify(sizes.rows)
            preparing = load.preparation.drafts(sizes.passes, sizes.width) + load.preparation.verify(sizes.rows)
            lost = seconds - tokens * load.verify(load.requests) / load.requests
            self._probe = sizes._replace(calibrated=True), lost + preparing

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
        self._lost += max(self._rounds - self._best_since, 1) * made * max(1 / at_hand - 1 / float(speed[fastest]), 0.0)
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

    def _explore(self, load: Load) -> Sizes | None:
        """A probe, if the saved time covers its expected loss. The smaller the loss, the more frequent they are."""
        if self._probe is None:
            return None
        sizes, loss = self._probe
        plain = load.verify(load.requests)
        loss = max(loss, LEAST_LOSS * plain)
        self._saved += EXPLORATION_SHARE * plain
        if self._saved < loss:
            return None
        self._saved = 0.0
        return self._limited(sizes, load)

    def _limited(self, sizes: Sizes, load: Load) -> Sizes | None:
        """These sizes with as many passes as there is room for, and a row for each request; None: there is no room."""
        passes = max((each for each in PASSES if each <= sizes.passes and each < load.room), default=0)
        return sizes._replace(passes=passes, rows=max(sizes.rows, load.requests)) if passes else None

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
        kept = math.exp(-expected / TRUST_MEMORY)
        self._expected = kept * self._expected + expected
        self._accepted = kept * self._accepted + accepted

    @property
    def factor(self) -> float:
        """By which expected nodes are multiplied; at most 1."""
        return min((self._accepted + TRUST_PRIOR) / (self._expected + TRUST_PRIOR), 1.0)
