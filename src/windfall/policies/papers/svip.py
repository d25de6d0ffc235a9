"""Self-verification length (SVIP, Zhang et al. 2024), on the beam that LTD compares itself with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from windfall.core.options import option
from windfall.policies.beam import Beam
from windfall.policies.context import Context
from windfall.policies.plan import Decision, Plan, TreeView


@dataclass
class SVIP(Beam):
    """A beam that ends when the drafter is unsure: sqrt(factor × entropy) above the threshold.

    SVIP drafts chains, and looks at the distribution its newest token came from. LTD does not say which entropy that
    is on a tree; here, the one after the likeliest node of the last pass, which on a beam of one is SVIP itself.
    """

    depth: int = option(12, "maximum draft passes (LTD: 12, which as a loop count would be 13)", low=1)
    factor: float = option(0.15, "factor on the entropy (in nats)", low=0)
    threshold: float = option(0.3, "end when the square root of factor × entropy is above this", low=0)

    def plan(self) -> Plan:
        return replace(super().plan(), watches=("entropy",), decide=self.decide)

    def decide(self, level: int, view: TreeView, ctx: Context) -> Decision:
        entropy = max(float(view.entropies(level)[0]), 0.0)
        return Decision(math.sqrt(self.factor * entropy) <= self.threshold, self.nodes)
