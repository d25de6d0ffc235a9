"""Beams that may end after every pass, by entropies or classifiers."""

from __future__ import annotations

import math
from functools import partial

import torch

from windfall.classifiers import Floats, disco_shown, specdecpp_shown
from windfall.context import Context
from windfall.policies.c2t import C2T
from windfall.policies.disco import Disco
from windfall.policies.specdecpp import SpecDecPlusPlus
from windfall.policies.svip import SVIP
from windfall.resident.plans.beams import BeamPlan
from windfall.resident.seen import Seen
from windfall.resident.sieve import Sieve


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
