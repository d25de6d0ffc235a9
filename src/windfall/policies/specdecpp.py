"""SpecDec++ (Huang et al. 2025), on the beam that LTD compares itself with: a trained head counts the risk."""

from __future__ import annotations

from dataclasses import dataclass

from windfall import classifiers
from windfall.context import Context
from windfall.options import option
from windfall.policies.beam import Beam
from windfall.records import Grow
from windfall.tree import DraftTree


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
            self._chances = {}
        if wish is None or self._risk(tree, level) > self.threshold:
            return None
        return wish._replace(entropy=True)

    def _risk(self, tree: DraftTree, level: int) -> float:
        """That the accepted path does not reach this level; the first is taken for sure, as in the release."""
        if level > 1:
            self._chances[level] = float(self._classifier(classifiers.specdecpp_inputs(tree, level)))
        if level < self.least:
            return 0.0
        reached = 1.0
        for chance in self._chances.values():
            reached *= chance
        return 1 - reached
