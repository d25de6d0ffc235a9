"""SpecDec++ (Huang et al. 2025), on the beam that LTD compares itself with: a trained head counts the risk."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from windfall.core.options import option
from windfall.policies.beam import Beam
from windfall.policies.context import Context
from windfall.policies.papers import classifiers
from windfall.policies.plan import Decision, Plan, TreeView


@dataclass
class SpecDecPlusPlus(Beam):
    """A beam that ends when a classifier thinks that a token is rejected already: 1 − Π P(level) > threshold.

    The published head reads the drafter's last hidden state, which policies do not see. Ours reads what that state says
    about the next token: the probabilities and the entropy after the likeliest node, that node's path probability, and
    the depth. The network is LTD's: 1024 hidden units with SiLU, beside a direct way from the inputs.
    """

    depth: int = option(12, "maximum draft passes (LTD: 12; the release: 20, on chains)", low=1)
    least: int = option(2, "minimum draft passes", low=1)
    threshold: float = option(0.3, "end when a rejection is likelier than this", low=0, high=1)
    path: str | None = option(None, "classifier, a file or its folder; none: the one for the embedded model's head")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._classifier = classifiers.load("specdecpp", self.path)

    def plan(self) -> Plan:
        watches = ("logq", "score", "expanded", "entropy")
        return replace(super().plan(), watches=watches, decide=self.decide, asks=range(self.least, self.depth))

    def decide(self, level: int, view: TreeView, ctx: Context) -> Decision:
        """The path reaches level 1 for sure, as in the release, and each later one with the classifier's chance."""
        inputs = [classifiers.specdecpp_inputs(view, each) for each in range(2, level + 1)]
        reached = math.prod(self._classifier(np.stack(inputs)).tolist()) if inputs else 1.0
        return Decision(1 - reached <= self.threshold, self.nodes)
