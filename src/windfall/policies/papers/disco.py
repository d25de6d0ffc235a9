"""DISCO (Mamou et al. 2024), on the beam that LTD compares itself with: a trained classifier ends the draft."""

from __future__ import annotations

from dataclasses import dataclass, replace

from windfall.core.options import option
from windfall.policies.beam import Beam
from windfall.policies.context import Context
from windfall.policies.papers import classifiers
from windfall.policies.plan import Decision, Plan, TreeView


@dataclass
class Disco(Beam):
    """A beam that ends when a classifier thinks that the accepted path will not reach its last level.

    DISCO drafts chains, and shows its classifier the newest token's probabilities, entropy and place. LTD gives the
    size of the inputs on a tree (10 probabilities, entropy, depth), not what they are of; here, the path probabilities
    of the level's likeliest nodes, and the entropy after the likeliest node of the level before.
    """

    depth: int = option(12, "maximum draft passes (LTD: 12, which as a loop count would be 13)", low=1)
    threshold: float = option(0.5, "end when the classifier's probability is below this; not in LTD", low=0, high=1)
    path: str | None = option(None, "classifier, a file or its folder; none: the one for the embedded model's head")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._classifier = classifiers.load("disco", self.path)

    def plan(self) -> Plan:
        return replace(super().plan(), watches=("score", "entropy"), decide=self.decide)

    def decide(self, level: int, view: TreeView, ctx: Context) -> Decision:
        inputs = classifiers.disco_inputs(view, level)
        return Decision(float(self._classifier(inputs)) >= self.threshold, self.nodes)
