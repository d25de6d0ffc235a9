"""DISCO (Mamou et al. 2024), on the beam that LTD compares itself with: a trained classifier ends the draft."""

from __future__ import annotations

from dataclasses import dataclass

from windfall.core.options import option
from windfall.core.tree import DraftTree
from windfall.core.types import Grow
from windfall.policies.beam import Beam
from windfall.policies.context import Context
from windfall.policies.papers import classifiers


@dataclass
class Disco(Beam):
    """A beam that ends when a classifier thinks that the accepted path will not reach its last level.

    DISCO drafts chains, and shows its classifier the newest token's probabilities, entropy and place. LTD gives the
    size of the inputs on a tree (10 probabilities, entropy, depth), not what they are of; here, the path probabilities
    of the level's likeliest nodes, and the entropy after the likeliest node of the level before.
    """

    depth: int = option(12, "draft passes at the most (LTD: 12, which as a loop count would be 13)", low=1)
    threshold: float = option(0.5, "end when the classifier's probability is below this; not in LTD", low=0, high=1)
    path: str | None = option(None, "classifier, a file or its folder; none: the one for the embedded model's head")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._classifier = classifiers.load("disco", self.path)

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        wish, level = super().grow(tree, ctx), int(tree.depth[-1])
        if wish is None or (level and not self.reaches(classifiers.disco_inputs(tree, level))):
            return None
        return wish._replace(entropy=True)

    def reaches(self, shown: classifiers.Floats) -> bool:
        """Whether the accepted path should reach the level that the classifier is shown."""
        return float(self._classifier(shown)) >= self.threshold
