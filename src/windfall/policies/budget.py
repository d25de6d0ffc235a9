"""One decision for a batch of requests: the sizes of a round's passes, from what is known before the round.

Nothing is decided in the middle of a round, and a round's sizes come from a small set, so that a GPU can run it without
waiting for the host. After drafting, one fixed rule chooses the rows to verify among the nodes of all requests
(`policies/choice.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import cycle, islice
from typing import NamedTuple

from windfall.core.tree import Flags, Floats, Integers
from windfall.costs.acceptance import Calibrator
from windfall.costs.curves import Costs, Reals
from windfall.policies.plan import Plan

USUAL_PASSES = (1, 3, 7, 12)  # draft passes of rounds that are prepared
MOST_ROWS = 96  # of a request, in rounds that are prepared
CONTEXT_STEP = 256  # tokens; smaller differences in the batch's context do not change its costs


class Preparation:
    """How long a GPU needs to prepare passes that have not run yet: it captures a graph for each size.

    This one is for other devices, which prepare nothing.
    """

    def drafts(self, passes: int, width: int) -> float:
        """Seconds for these draft passes; 0 if they are prepared."""
        return 0.0

    def verify(self, rows: int) -> float:
        """Seconds for a verify pass; 0 if it is prepared."""
        return 0.0


NO_PREPARATION = Preparation()


class Load(NamedTuple):
    """What a budget knows about a batch before a round.

    Costs are measured with one text. In a batch, rows and nodes are those of all requests together, because they share
    the pass, and so is the context: each request's cached keys are read once.
    """

    requests: int  # that take part in the round
    context: int  # committed tokens of all requests together
    room: int  # tokens that may still be emitted, in the request where this is most
    costs: Costs
    calibrator: Calibrator  # forecasts the children of nodes that are not drafted yet
    max_rows: int | None = None  # of a verify pass; None: no limit
    preparation: Preparation = NO_PREPARATION

    def verify(self, rows: int) -> float:
        """Seconds of a verify pass over this many rows of all requests, with the overhead of a round."""
        return _verify(self.costs, rows, self.context // CONTEXT_STEP * CONTEXT_STEP) + self.costs.overhead

    def verify_over(self, rows: Integers) -> Reals:
        """`verify` for many numbers of rows."""
        return self.costs.verify_over(rows, self.context // CONTEXT_STEP * CONTEXT_STEP) + self.costs.overhead

    def drafting(self, passes: int, width: int) -> float:
        """Seconds of this many draft passes: the first expands the roots, later ones `width` nodes of each request."""
        if not passes:
            return 0.0
        first = self.costs.opening + self.costs.draft(self.requests)
        return first + (passes - 1) * self.costs.draft(self.requests * width)

    @property
    def stepped(self) -> bool:
        """Whether verify passes run in a few prepared sizes, so that rows up to the next size are free."""
        return self.costs.verifies[0][1].stepped

    def prepared(self, rows: int) -> int:
        """The smallest prepared size for this many rows; beyond all of them, the rows themselves."""
        return next((size for size in self.costs.verifies[0][1].sizes if size >= rows), rows)

    def sizes(self, most: int) -> list[int]:
        """Numbers of rows to consider, ascending, from plain decoding to about `most`."""
        if self.stepped:
            known = self.costs.verifies[0][1].sizes
            return [self.prepared(self.requests), *(size for size in known if self.requests < size <= most)]
        found = [self.requests]
        while found[-1] < most:
            found.append(found[-1] + max((found[-1] - self.requests) // 3, 1))
        return found


@lru_cache(maxsize=4096)
def _verify(costs: Costs, rows: int, context: int) -> float:
    return costs.verify(rows, context)


class Sizes(NamedTuple):
    """The sizes of a round, the same for every request."""

    passes: int  # draft passes; 0: plain decoding
    width: int  # nodes of each request that a draft pass expands; the first pass expands the root
    k: int  # children of an expanded node
    rows: int  # rows of the verify pass, of all requests together, the roots counted
    per_request: int | None = None  # rows of one request, its root counted; None: no limit
    floor: float = -math.inf  # drafted nodes with this key or less are not verified
    calibrated: bool = False  # keys are log-chances of acceptance of the path; else the drafter's log-probabilities


class Outcome(NamedTuple):
    """A finished round: its drafted nodes, request by request, each parent before its children."""

    sizes: Sizes
    requests: int
    owner: Integers  # [N] the request
    parents: Integers  # [N] the place of the parent in these arrays; -1: the root
    depth: Integers  # [N]
    rank: Integers  # [N]
    logq: Floats  # [N] the drafter's log-probability given the parent
    key: Floats  # [N] by which nodes were ranked
    expanded: Flags  # [N]
    verified: Flags  # [N]
    accepted: Flags  # [N]
    seconds: float  # of the round; 0: not known


class Budget:
    """Decides the sizes of each round of a batch. One object serves all requests that share it."""

    calibrator: Calibrator | None = None  # estimates acceptance instead of the engine's, for calibrated keys

    @property
    def largest(self) -> Sizes | None:
        """The most passes, width and children that `sizes` returns: a GPU allocates its buffers for them.

        None: they are not known, and the budget decides for the host loop only.
        """
        return None

    def sizes(self, load: Load) -> Sizes:
        """The sizes of the next round."""
        raise NotImplementedError

    def prepare(self, load: Load) -> None:
        """Compute what `sizes` will need for loads like this one. A GPU's runner calls this while the device works."""

    def plan(self, sizes: Sizes) -> Plan | None:
        """How each request's tree grows in a round of these sizes; None: by the plan of its own policy."""
        return _beam(sizes.passes, sizes.width, sizes.k, sizes.calibrated)

    def observe(self, outcome: Outcome) -> None:
        """Learn from a round. On a GPU this may come one round late."""

    def without_drafter(self) -> PlainRounds | None:
        """The budget of batches whose drafter works on the host, so that rounds on a GPU cannot draft.

        None: there is no such budget, and requests are drafted in the host loop.
        """
        return None

    def usual_sizes(self, requests: int, rows: Sequence[int]) -> list[Sizes]:
        """Sizes of rounds that a GPU should prepare for this number of requests.

        `rows`: the sizes of its verify passes. By default, trees of the largest width are assumed.
        """
        return usual_sizes(self.largest, () if self.largest is None else (self.largest.width,), requests, rows)


def usual_sizes(largest: Sizes | None, widths: Sequence[int], requests: int, rows: Sequence[int]) -> list[Sizes]:
    """Plain decoding, and rounds that draft: few and many passes, each twice in a row, since the tokens that a round
    accepts are taken in by the next one; and every number of rows."""
    plain = Sizes(0, 1, 1, requests)
    if largest is None or not largest.passes:
        return [plain]
    depths = sorted({min(passes, largest.passes) for passes in USUAL_PASSES})
    shapes = [(passes, width) for width in widths for passes in depths for _ in range(2)]
    most = requests * min(MOST_ROWS, 1 + largest.k * largest.width * largest.passes)
    fitting = [size for size in rows if requests < size <= most] or [requests]
    turns = max(len(shapes), len(fitting))
    chosen = zip(islice(cycle(shapes), turns), islice(cycle(fitting), turns), strict=True)
    return [plain, *(Sizes(*shape, largest.k, size, calibrated=largest.calibrated) for shape, size in chosen)]


@lru_cache(maxsize=256)
def _beam(passes: int, width: int, k: int, calibrated: bool) -> Plan:
    rows = 1 + passes * width * k
    prices = (lambda ctx: (0.0, 0.0)) if calibrated else None
    return Plan(passes=passes, width=width, k=k, rows=rows, calibrated=calibrated, prices=prices)


class PlainRounds(Budget):
    """Plain decoding in every round."""

    largest = Sizes(0, 1, 1, 1)

    def sizes(self, load: Load) -> Sizes:
        return Sizes(0, 1, 1, load.requests)


class OwnSizes(Budget):
    """Every request gets the fixed sizes of its own plan; nothing is shared but the passes."""

    def __init__(self, plan: Plan):
        self._plan = plan

    @property
    def largest(self) -> Sizes:
        return self.sizes_of(1)

    def sizes(self, load: Load) -> Sizes:
        return self.sizes_of(load.requests)

    def sizes_of(self, requests: int) -> Sizes:
        """The sizes of a round of this number of requests."""
        own = self._plan
        return Sizes(own.passes, own.width, own.k, requests * own.rows, own.rows, calibrated=own.calibrated)

    def plan(self, sizes: Sizes) -> None:
        return None

    def usual_sizes(self, requests: int, rows: Sequence[int]) -> list[Sizes]:
        return [self.sizes_of(requests)]
