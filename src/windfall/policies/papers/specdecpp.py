"""SpecDec++ (Huang et al. 2025), on the beam that LTD compares itself with: a trained head counts the risk."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from windfall.core.options import option
from windfall.core.tree import DraftTree
from windfall.core.types import Grow
from windfall.policies.beam import Beam
from windfall.policies.context import Context
from windfall.policies.papers import classifiers


@dataclass
class SpecDecPlusPlus(Beam):
    """A beam that ends when it is too likely that the accepted path has already left it: 1 − Π P(level) > threshold.

    The published head reads the drafter's last hidden state, which policies do not see. Ours reads what that state says
    about the next token: the probabilities and the entropy after the likeliest node, that node's path probability, and
    the depth. The network is LTD's: 1024 hidden units with SiLU, beside a direct way from the inputs.
    """

    depth: int = option(12, "draft passes at the most (LTD: 12; the release: 20, on chains)", low=1)
    least: int = option(2, "draft passes at the least", low=1)
    threshold: float = option(0.3, "end when a rejection is likelier than this", low=0, high=1)
    path: str | None = option(None, "classifier, a file or its folder; none: the one for the embedded model's head")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._classifier = classifiers.load("specdecpp", self.path)
        self._chances: dict[int, float] = {}  # by level, of this cycle

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        wish, level = super().grow(tree, ctx), int(tree.depth[-1])
        if not level:
            self.begin()
        if wish is None or self.risk(level, partial(classifiers.specdecpp_inputs, tree)) > self.threshold:
            return None
        return wish._replace(entropy=True)

    def begin(self) -> None:
        """Another cycle."""
        self._chances = {}

    def risk(self, level: int, shown: Callable[[int], classifiers.Floats]) -> float:
        """That the accepted path does not reach this level; the first is taken for sure, as in the release. `shown` is
        what the classifier sees of a level."""
        for each in range(2, level + 1):
            if each not in self._chances:
                self._chances[each] = float(self._classifier(shown(each)))
        return 1 - math.prod(self._chances.values()) if level >= self.least else 0.0
