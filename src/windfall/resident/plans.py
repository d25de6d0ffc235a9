"""Policies in a form that the device can follow: sizes that are fixed, a rule for what comes next, and what the host
must see of a tree to decide whether to go on. A test holds each to the policy it stands for."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

from windfall import flat
from windfall.calibration import CHILDREN, MOST_SETTLED
from windfall.classifiers import Floats, disco_shown, specdecpp_shown
from windfall.context import Context
from windfall.kernels.gate import Bounds
from windfall.kernels.top import MOST as MOST_CHILDREN
from windfall.policies.auto import Auto
from windfall.policies.base import TreePolicy
from windfall.policies.beam import Beam
from windfall.policies.c2t import C2T
from windfall.policies.chain import Chain
from windfall.policies.ddd import DDD
from windfall.policies.disco import Disco
from windfall.policies.dynatree import DynaTree
from windfall.policies.fixed_tree import FixedTree
from windfall.policies.gammatune import GammaTune
from windfall.policies.gt import GT
from windfall.policies.ltd import LTD, NOTHING, View
from windfall.policies.none import NoSpeculation
from windfall.policies.salf import Salf
from windfall.policies.specdecpp import SpecDecPlusPlus
from windfall.policies.svip import SVIP
from windfall.resident.judge import MOST as MOST_ROWS
from windfall.resident.judge import ROWS
from windfall.resident.parcel import Parcel
from windfall.resident.seen import Order, Seen
from windfall.resident.sieve import Sieve

MOST_PASSES, MOST_NODES = 32, 4096
MOST_GATED = 32  # nodes of a pass, most of which are there in case
SIZES = ROWS[2:]  # of verify passes over as many nodes as there are


class Plan:
    """`passes` at the most, each over `width` nodes with `k` children, and `rows` to verify at the most."""

    rule = "beam"  # or another of kernels/grow.py
    watches: tuple[str, ...] = ()  # what the host sees after a draft pass: arrays of seen.Seen
    gated = False  # whether children out of the bounds that `brief` brings are left out
    foresees = False  # whether `goes_on` decides about the pass after the next, which is then under way

    def __init__(self, policy: TreePolicy, passes: int, width: int, k: int, rows: int):
        self.policy, self.passes, self.width, self.k, self.rows = policy, passes, width, k, rows

    @classmethod
    def stands_for(cls, policy: Any) -> bool:
        """Whether it does so for a policy with these settings."""
        return True

    @property
    def key(self) -> tuple[object, ...]:
        """What recorded work depends on."""
        return (self.rule, self.watches, self.gated, self.passes, self.width, self.k, self.rows)

    def places(self, passes: int) -> int:
        """Of the nodes that so many passes draft, the root counted."""
        return 1 + self.k * (1 + self.width * max(passes - 1, 0))

    @property
    def nodes(self) -> int:
        """The same for all passes."""
        return self.places(self.passes)

    @property
    def capacity(self) -> int:
        """Places that the tree's arrays have: those of a pass more."""
        return self.nodes + self.width * self.k

    def sieve(self, device: torch.device) -> Sieve | None:
        """What decides which of the drafted nodes may be chosen at all; None: all may."""
        return None

    def suits(self, ctx: Context) -> bool:
        """Whether the plan does as the policy would, at these costs."""
        return True

    def brief(self, terms: Parcel, ctx: Context) -> None:
        """Bring the device what the rule needs in this cycle."""

    def settled(self, ctx: Context) -> int | None:
        """How many passes this cycle takes, where that is known before it begins."""
        return self.passes

    def least(self) -> int:
        """Passes before the host asks."""
        return 1

    def asks(self, level: int) -> bool:
        """Whether the plan must see what so many passes drafted; else drafting goes on up to the last pass."""
        return True

    def goes_on(self, level: int, seen: Seen, ctx: Context) -> bool:
        """Whether another pass follows, after `level` of them. The text may be a cycle longer than `ctx` knows."""
        return level < self.passes

    def verified(self, level: int) -> tuple[int, int]:
        """Rows to verify after this many passes, and how many of the passes brought the nodes they are chosen from."""
        return self.rows, level

    def openings(self) -> Iterable[int]:
        """Passes that `least` may say."""
        return (self.least(),)

    def sizes(self) -> Iterable[int]:
        """Rows that `verified` may say."""
        return (self.rows,)


class NonePlan(Plan):
    """Plain decoding."""

    def __init__(self, policy: TreePolicy):
        super().__init__(policy, 0, 1, 1, 1)


class ChainPlan(Plan):
    """A line of tokens, where its length is the same in all cycles."""

    def __init__(self, policy: Chain):
        super().__init__(policy, policy.depth, 1, 1, policy.depth + 1)

    @classmethod
    def stands_for(cls, policy: Chain) -> bool:
        return not policy.confidence and policy.schedule == "fixed"


class BeamPlan(Plan):
    """The best `k` of each level; the best rows of all."""

    policy: Beam

    def __init__(self, policy: Beam):
        super().__init__(policy, policy.depth, policy.k, policy.k, policy.nodes)


class DDDPlan(BeamPlan):
    """A beam that ends, at a few levels, when its nodes sum to too little."""

    policy: DDD
    watches = ("promise",)

    def settled(self, ctx: Context) -> int | None:
        return None

    def least(self) -> int:
        return max(min(self.policy.levels, default=self.passes), 1)

    def asks(self, level: int) -> bool:
        return level < self.passes and level in self.policy.levels

    def goes_on(self, level: int, seen: Seen, ctx: Context) -> bool:
        return seen.promise[1] >= self.policy.threshold


class GammaTunePlan(BeamPlan):
    """A beam as deep as the last cycles suggest."""

    policy: GammaTune

    def settled(self, ctx: Context) -> int | None:
        return min(self.policy.gamma, self.passes)


class GTPlan(Plan):
    """A beam that goes on while its best path is worth a draft step."""

    policy: GT
    watches = ("promise",)

    def __init__(self, policy: GT):
        super().__init__(policy, policy.cap, policy.k, policy.k, 1 + policy.nodes)
        self._counted = 0

    @classmethod
    def stands_for(cls, policy: GT) -> bool:
        return not policy.each

    def brief(self, terms: Parcel, ctx: Context) -> None:
        self.policy.follow(ctx)

    def settled(self, ctx: Context) -> int | None:
        return None

    def goes_on(self, level: int, seen: Seen, ctx: Context) -> bool:
        worth = seen.promise[0] > self.policy.least(ctx)
        self._counted = level if worth or self.policy.count_last else level - 1
        return level < self.passes and worth

    def verified(self, level: int) -> tuple[int, int]:
        return self._rows(self._counted), self._counted

    def _rows(self, levels: int) -> int:
        return 1 + min(levels * self.policy.k, self.policy.nodes)

    def sizes(self) -> Iterable[int]:
        return {self._rows(levels) for levels in range(self.passes + 1)}


class WatchedBeamPlan(BeamPlan):
    """A beam that may end after every pass."""

    def settled(self, ctx: Context) -> int | None:
        return None

    def asks(self, level: int) -> bool:
        return level < self.passes


class SVIPPlan(WatchedBeamPlan):
    """It ends when the drafter is unsure after its likeliest node."""

    policy: SVIP
    watches = ("entropy",)

    def goes_on(self, level: int, seen: Seen, ctx: Context) -> bool:
        return not self.policy.unsure(seen.entropy(level))


class DiscoPlan(WatchedBeamPlan):
    """It ends when a classifier thinks that the accepted path does not reach its last level."""

    policy: Disco
    watches = ("score", "entropy")

    def goes_on(self, level: int, seen: Seen, ctx: Context) -> bool:
        return self.policy.reaches(disco_shown(seen.scores(level), seen.entropy(level), level))


class SpecDecPlan(WatchedBeamPlan):
    """It ends when the accepted path has probably left it."""

    policy: SpecDecPlusPlus
    watches = ("logq", "score", "expanded", "entropy")

    def least(self) -> int:
        return self.policy.least

    def goes_on(self, level: int, seen: Seen, ctx: Context) -> bool:
        if level == self.least():
            self.policy.begin()
        return self.policy.risk(level, partial(self._shown, seen)) <= self.policy.threshold

    @staticmethod
    def _shown(seen: Seen, level: int) -> Floats:
        return specdecpp_shown(seen.logq(level), seen.leader(level), seen.entropy(level), level)


class C2TPlan(WatchedBeamPlan):
    """Nodes that a classifier thinks little of are neither expanded nor verified; it ends when none is left."""

    policy: C2T
    watches = ("promise",)

    @property
    def key(self) -> tuple[object, ...]:
        return (*super().key, id(self.policy.classifier), self.policy.beta)  # which lives as long as the plan

    def sieve(self, device: torch.device) -> Sieve | None:
        return Sieve(self.policy.classifier, self.policy.beta, device)

    def goes_on(self, level: int, seen: Seen, ctx: Context) -> bool:
        return seen.promise[0] > -math.inf


class SalfPlan(Plan):
    """The likeliest nodes of all that are not yet expanded come next, until they promise too little."""

    rule = "best"
    watches = ("score", "expanded")
    policy: Salf

    def __init__(self, policy: Salf):
        super().__init__(policy, policy.cap, policy.width, policy.k or 0, policy.nodes)

    @classmethod
    def stands_for(cls, policy: Salf) -> bool:
        return policy.k is not None and policy.fill and policy.max_depth is None

    def settled(self, ctx: Context) -> int | None:
        return None

    def asks(self, level: int) -> bool:
        return level < self.passes

    def goes_on(self, level: int, seen: Seen, ctx: Context) -> bool:
        if level == 1:
            self.policy.begin()
        front = seen.expanded(level + 1)
        return self.policy.promising(seen.all_scores(level, root=True), front[front >= 0])


class GatedPlan(Plan):
    """Of each level the nodes that are likely enough are expanded, by bounds that the device has; all nodes are
    verified. Probabilities sum to 1, so that few nodes of a level can be likely: the device expands that many, and
    leaves out the children of the others."""

    watches = ("score",)
    gated = True
    policy: DynaTree | FixedTree

    def __init__(self, policy: DynaTree | FixedTree, passes: int, first: int, k: int):
        """`first` is for the root what `k` is for other nodes."""
        widths: list[int] = []
        for _ in range(1, passes):
            drafted = k * widths[-1] if widths else first
            widths.append(min(drafted, int(1.0001 / policy.least)))  # of rounded numbers one more may be likely
        super().__init__(policy, passes, max(widths, default=1), k, 1 + first + k * sum(widths))
        self._drafted = 0
        self._told: Bounds | None = None  # what the device goes by

    @classmethod
    def stands_for(cls, policy: Any) -> bool:
        """Not where the tree may be cut off at its largest size: the host's order of nodes decides what stays."""
        plan = cls(policy)  # type: ignore[call-arg]
        return plan.rows <= 1 + policy.nodes and plan.width <= MOST_GATED

    @property
    def bounds(self) -> Bounds:
        """As they are in this cycle."""
        raise NotImplementedError

    def brief(self, terms: Parcel, ctx: Context) -> None:
        if self.bounds != self._told:
            self._told = self.bounds
            terms.host["bounds"][:] = self._told  # the last copy is through: a pass behind it was waited for
            terms.send()

    def settled(self, ctx: Context) -> int | None:
        return None

    def goes_on(self, level: int, seen: Seen, ctx: Context) -> bool:
        self._drafted = int(np.count_nonzero(seen.all_scores(level) > -math.inf))
        return level < self.passes and bool(self.policy.goes_on(level, seen.scores(level)).any())

    def verified(self, level: int) -> tuple[int, int]:
        return min(SIZES[bisect_left(SIZES, 1 + self._drafted)], self.rows), level

    def sizes(self) -> Iterable[int]:
        return {min(size, self.rows) for size in SIZES}


class FixedTreePlan(GatedPlan):
    """One first token, then as many children for each likely node."""

    policy: FixedTree

    def __init__(self, policy: FixedTree):
        super().__init__(policy, policy.depth + 1, 1, policy.breadth)

    @property
    def bounds(self) -> Bounds:
        own = self.policy
        return Bounds(math.log(own.least), math.inf, 0.0, 0.0, 0.0, own.breadth, own.breadth, own.breadth, 1)


class DynaTreePlan(GatedPlan):
    """Breadth by confidence, and bounds that the last cycles move."""

    policy: DynaTree

    def __init__(self, policy: DynaTree):
        super().__init__(policy, policy.max_depth, policy.first, policy.widest)

    @property
    def bounds(self) -> Bounds:
        own, now = self.policy, self.policy.steering
        breadths = (own.narrow, own.middle, own.wide)
        return Bounds(math.log(own.least), int(now.depth), own.deep, now.sure, own.unsure, *breadths, own.first)


class LTDPlan(Plan):
    """A beam of which two networks choose the depth and the rows to verify."""

    policy: LTD

    def __init__(self, policy: LTD):
        pair, rules, width = policy.pair, policy.pair.rules, policy.width
        passes = rules.max_depth if pair.depth else min(rules.fixed_depth, rules.max_depth)
        super().__init__(policy, passes, width, width, 1 + (rules.sizes[-1] if pair.size else rules.fixed_size))
        self.watches = ("score", "length")
        self._order: Order | None = None
        if rules.layout != "ranked" or policy.entropy:  # then the order of nodes matters
            self.watches += ("expanded", "entropy") if policy.entropy else ("expanded",)
            self._order = Order(self.nodes, width)
        self._verified = min(self.rows, self.nodes)

    def settled(self, ctx: Context) -> int | None:
        return None if self.policy.pair.depth or self.policy.pair.size else self.passes

    def least(self) -> int:
        return next(level for level in range(1, self.passes + 1) if self.asks(level))

    def asks(self, level: int) -> bool:
        pair = self.policy.pair
        return level >= self.passes or (pair.depth is not None and pair.rules.asks(level))

    def goes_on(self, level: int, seen: Seen, ctx: Context) -> bool:
        pair = self.policy.pair
        if self._order is not None and level == self.least():
            self._order.begin()
        if level < self.passes and not pair.stops(self._newest(level, seen)):
            return True
        self._verified = min(1 + pair.nodes(self._whole(level, seen)), self.places(level))
        return False

    def _newest(self, level: int, seen: Seen) -> View:
        """What the depth policy looks at."""
        if self._order is None:
            return View(seen.scores(level), seen.length, level, NOTHING)
        scores, entropies = self._order.follow(level, seen, self.policy.entropy)
        return View(scores[-1], seen.length, level, entropies[-1])

    def _whole(self, level: int, seen: Seen) -> View:
        """What the size policy looks at."""
        if self._order is None:
            every = seen.all_scores(level)
            if every[every.argmin()] == -math.inf:
                every = every[every > -math.inf]
            return View(every, seen.length, level, NOTHING)
        scores, entropies = self._order.follow(level, seen, self.policy.entropy)
        return View(np.concatenate(scores), seen.length, level, np.concatenate(entropies))

    def verified(self, level: int) -> tuple[int, int]:
        return self._verified, level

    def sizes(self) -> Iterable[int]:
        rules, levels = self.policy.pair.rules, range(self.least(), self.passes + 1)
        chosen = rules.sizes if self.policy.pair.size else (rules.fixed_size,)
        return {min(1 + size, self.places(level)) for size in chosen for level in levels}


class AutoPlan(Plan):
    """The nodes most likely to be accepted come next, while they earn more than the pass costs; then as many rows as
    are worth theirs. The rule of `flat.py`, which `auto` follows where rows are cheap."""

    rule = "calibrated"
    watches = ("promise",)
    foresees = True
    policy: Auto

    def __init__(self, policy: Auto):
        super().__init__(policy, flat.PASSES, flat.WIDTH, CHILDREN, min(policy.nodes, flat.ROWS[-1]))
        self._worth, self._fee, self._first, self._before = 0, 0.0, 0.0, 0.0
        self._least = 1
        self._told: object = None  # what the device goes by

    def suits(self, ctx: Context) -> bool:
        return flat.suits(ctx)

    def brief(self, terms: Parcel, ctx: Context) -> None:
        self.policy.follow(ctx)
        calibrator, (fee, price) = ctx.calibrator, flat.prices(ctx)
        told = (calibrator, calibrator.version, fee, price)
        if told != self._told:
            host, means = terms.host, calibrator.means()  # the last copy is through: a pass behind it was waited for
            host["weights"][:], host["outlook"][:], host["prices"][:] = calibrator.weights, means, (fee, price)
            terms.send()
            self._told, self._fee, self._first = told, fee, flat.first(calibrator, price)
        self._before, self._least = self._first, calibrator.least

    def settled(self, ctx: Context) -> int | None:
        return None

    def least(self) -> int:
        return self._least

    def goes_on(self, level: int, seen: Seen, ctx: Context) -> bool:
        _, _, gain, worth = seen.promise
        self._worth, before = int(worth), self._before
        self._before = gain + self._fee
        return level + 1 < self.passes and flat.pays(self._before, before, self._fee)

    def verified(self, level: int) -> tuple[int, int]:
        return flat.rows(self._worth, level, self.rows), level

    def openings(self) -> Iterable[int]:
        return range(1, MOST_SETTLED + 1)

    def sizes(self) -> Iterable[int]:
        return {min(size, self.rows) for size in flat.ROWS}


PLANS: dict[type[TreePolicy], Any] = {  # its Plan, made of the policy alone
    NoSpeculation: NonePlan,
    Chain: ChainPlan,
    Beam: BeamPlan,
    DDD: DDDPlan,
    GammaTune: GammaTunePlan,
    GT: GTPlan,
    SVIP: SVIPPlan,
    Disco: DiscoPlan,
    Salf: SalfPlan,
    FixedTree: FixedTreePlan,
    DynaTree: DynaTreePlan,
    SpecDecPlusPlus: SpecDecPlan,
    C2T: C2TPlan,
    LTD: LTDPlan,
    Auto: AutoPlan,
}


def plan_of(policy: TreePolicy) -> Plan | None:
    """The plan that stands for this policy, where there is one that fits fixed buffers."""
    made = PLANS.get(type(policy))
    if made is None or not made.stands_for(policy):
        return None
    plan: Plan = made(policy)
    fits = plan.rows <= MOST_ROWS and plan.k <= MOST_CHILDREN and plan.passes <= MOST_PASSES
    return plan if fits and plan.capacity <= MOST_NODES else None
