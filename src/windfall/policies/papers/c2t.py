"""C2T (Huo et al. 2025), on the beam that LTD compares itself with: a trained classifier prunes the tree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from windfall.core.options import option
from windfall.core.tree import DraftTree
from windfall.core.types import Grow
from windfall.policies.base import best
from windfall.policies.beam import Beam
from windfall.policies.context import Context
from windfall.policies.papers import classifiers


@dataclass
class C2T(Beam):
    """A beam of the nodes that a classifier thinks worth it; the others are neither expanded nor verified.

    LTD's release asks its classifier about the last level alone, whose nodes it then does not verify, so that nothing
    changes; here every node is asked about as soon as it is drafted, before beam and rerank choose among what is left.
    """

    depth: int = option(8, "draft passes at the most", low=1)
    beta: float = option(0.2, "a node stays if the classifier gives it more than this; not in LTD", low=0, high=1)
    path: str | None = option(None, "classifier, a file or its folder; none: the one for the embedded model's head")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.classifier = classifiers.load("c2t", self.path)
        self._kept = torch.zeros(1, dtype=torch.long)  # [n] nodes that stay, ascending
        self._seen = 1  # nodes that were asked about

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        layer = self._layer(tree)
        if not len(layer) or int(tree.depth[-1]) >= self.depth:
            return None
        return Grow(best(tree, layer, self.k), k=self.k, entropy=self.classifier.entropy)

    def _layer(self, tree: DraftTree) -> Tensor:
        """What stays of the newest nodes; in a new cycle, the root."""
        if len(tree) == 1:
            self._kept, self._seen = torch.zeros(1, dtype=torch.long), 1
            return self._kept
        new, self._seen = torch.arange(self._seen, len(tree)), len(tree)
        if len(new):
            inputs = classifiers.c2t_inputs(tree, new, self.classifier.entropy)
            new = new[torch.from_numpy(self.classifier(inputs) > self.beta)]
        self._kept = torch.cat([self._kept, new])
        return new

    def select(self, tree: DraftTree, ctx: Context) -> Tensor:
        return best(tree, self._kept, self.nodes)
