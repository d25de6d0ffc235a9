"""C2T (Huo et al. 2025), on the beam that LTD compares itself with: a trained classifier prunes the tree."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from windfall.core.options import option
from windfall.policies.beam import Beam
from windfall.policies.context import Context
from windfall.policies.papers import classifiers
from windfall.policies.plan import Decision, Plan, TreeView


@dataclass
class C2T(Beam):
    """A beam of the nodes that a classifier accepts; the others are neither expanded nor verified.

    LTD's release asks its classifier about the last level alone, whose nodes it then does not verify, so that nothing
    changes; here every node is asked about as soon as it is drafted, before beam and rerank choose among what is left.
    """

    depth: int = option(8, "maximum draft passes", low=1)
    beta: float = option(0.2, "a node stays if the classifier gives it more than this; not in LTD", low=0, high=1)
    path: str | None = option(None, "classifier, a file or its folder; none: the one for the embedded model's head")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.classifier = classifiers.load("c2t", self.path)

    def plan(self) -> Plan:
        return replace(super().plan(), keep=NodeClassifier(self), watches=("summary",), decide=self.decide)

    def decide(self, level: int, view: TreeView, ctx: Context) -> Decision:
        return Decision(view.summary(level).best > -math.inf, self.nodes)


class NodeClassifier:
    """Keeps the nodes that the classifier gives more than beta."""

    def __init__(self, policy: C2T):
        self.entropy = policy.classifier.entropy
        self.key = (id(policy.classifier), policy.beta)
        self._classifier = policy.classifier
        beta = policy.beta
        self._least = math.log(beta / (1 - beta)) if 0 < beta < 1 else math.inf if beta else -math.inf  # log-odds

    def weights(self) -> dict[str, Any]:
        return dict(self._classifier.weights)

    def keeps(self, weights: dict[str, Any], score: Any, depth: Any, entropy: Any) -> Any:
        """The classifier's network, in operations that numpy and torch share."""
        inputs = [math.e**score, depth / classifiers.SCALE]
        if self.entropy:
            inputs.insert(1, entropy)
        columns = weights["hidden"].T
        hidden = sum(value[..., None] * column for value, column in zip(inputs, columns, strict=True))
        hidden = (hidden + weights["hidden_bias"]).clip(min=0)
        return hidden @ weights["output"] + weights["output_bias"] > self._least
