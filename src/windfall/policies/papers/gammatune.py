"""GammaTune (Gautam et al. 2025), on the beam that LTD compares itself with: depth follows what was accepted."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from windfall.core.options import option
from windfall.core.types import Step
from windfall.policies.beam import Beam
from windfall.policies.context import Context
from windfall.policies.plan import Opening, Plan


@dataclass
class GammaTune(Beam):
    """A beam that gets deeper after a path accepted to its end, and otherwise is as deep as accepted paths on average.

    The bounds are LTD's: half and one and a half of the default depth. LTD does not give the increment (2 is a third
    party's transcription), nor whether the depth is kept from one text to the next: `carry`.
    """

    depth: int = option(12, "maximum draft passes", low=1)
    start: int = option(8, "the default depth, which a text begins with", low=1)
    increment: int = option(2, "passes more after a path accepted whole; not in the paper", low=0)
    eta: float = option(0.2, "weight of the newest cycle in the average", low=0, high=1)
    carry: bool = option(False, "keep depth and average from one text to the next; not in the paper")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tuned = {"gamma": min(self.start, self.depth), "average": float(self.start)}

    def fresh(self) -> GammaTune:
        other = super().fresh()
        if self.carry:
            other._tuned = self._tuned
        return other

    @property
    def gamma(self) -> int:
        """Draft passes of the next cycle."""
        return int(self._tuned["gamma"])

    @property
    def bounds(self) -> tuple[int, int]:
        """The fewest and the most passes that cycles are tuned to."""
        return min(max(self.start // 2, 1), self.depth), min(self.start * 3 // 2, self.depth)

    def plan(self) -> Plan:
        least, most = self.bounds
        return replace(super().plan(), opening=self._opening, openings=range(least, most + 1))

    def _opening(self, ctx: Context) -> Opening:
        return Opening(self.gamma, self.nodes)

    def observe(self, step: Step) -> None:
        gamma, average = self.gamma, self._tuned["average"]
        if 0 < step.draft_passes <= step.accepted:  # this cycle's own depth: on a device another one may have begun
            gamma += self.increment
        else:
            average = (1 - self.eta) * average + self.eta * step.accepted
            gamma = math.ceil(average)
        least, most = self.bounds
        self._tuned.update(gamma=min(max(gamma, least), most), average=average)
