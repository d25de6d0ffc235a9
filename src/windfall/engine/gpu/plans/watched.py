"""Beams that may end after every pass, by entropies or classifiers."""

from __future__ import annotations

import math
from functools import partial

import torch

from windfall.engine.gpu.plans.beams import BeamPlan
from windfall.engine.gpu.sieve import Sieve
from windfall.engine.gpu.view import TreeView
from windfall.policies.context import Context
from windfall.policies.papers.c2t import C2T
from windfall.policies.papers.classifiers import Floats, disco_shown, specdecpp_shown
from windfall.policies.papers.disco import Disco
from windfall.policies.papers.specdecpp import SpecDecPlusPlus
from windfall.policies.papers.svip import SVIP


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

    def goes_on(self, level: int, seen: TreeView, ctx: Context) -> bool:
        return not self.policy.unsure(seen.entropy(level))


class DiscoPlan(WatchedBeamPlan):
    """It ends when a classifier thinks that the accepted path does not reach its last level."""

    policy: Disco
    watches = ("score", "entropy")

    def goes_on(self, level: int, seen: TreeView, ctx: Context) -> bool:
        return self.policy.reaches(disco_shown(seen.scores(level), seen.entropy(level), level))


class SpecDecPlan(WatchedBeamPlan):
    """It ends when the accepted path has probably left it."""

    policy: SpecDecPlusPlus
    watches = ("logq", "score", "expanded", "entropy")

    def least(self) -> int:
        return self.policy.least

    def goes_on(self, level: int, seen: TreeView, ctx: Context) -> bool:
        if level == self.least():
            self.policy.begin()
        return self.policy.risk(level, partial(self._shown, seen)) <= self.policy.threshold

    @staticmethod
    def _shown(seen: TreeView, level: int) -> Floats:
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

    def goes_on(self, level: int, seen: TreeView, ctx: Context) -> bool:
        return seen.promise[0] > -math.inf
