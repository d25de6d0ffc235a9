"""Self-verification length (SVIP, Zhang et al. 2024), on the beam that LTD compares itself with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from windfall.core.options import option
from windfall.core.tree import DraftTree
from windfall.core.types import Grow
from windfall.policies.base import best
from windfall.policies.beam import Beam
from windfall.policies.context import Context


@dataclass
class SVIP(Beam):
    """A beam that ends when the drafter is unsure: sqrt(factor × entropy) above the threshold.

    SVIP drafts chains, and looks at the distribution its newest token came from. LTD does not say which entropy that
    is on a tree; here, the one after the likeliest node of the last pass, which on a beam of one is SVIP itself.
    """

    depth: int = option(12, "draft passes at the most (LTD: 12, which as a loop count would be 13)", low=1)
    factor: float = option(0.15, "what the entropy (in nats) is multiplied with", low=0)
    threshold: float = option(0.3, "end when the root of that is above this", low=0)

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        wish = super().grow(tree, ctx)
        if wish is None or self.unsure(self._entropy(tree)):
            return None
        return wish._replace(entropy=True)

    def unsure(self, entropy: float) -> bool:
        return math.sqrt(self.factor * max(entropy, 0.0)) > self.threshold

    def _entropy(self, tree: DraftTree) -> float:
        last = torch.nonzero((tree.depth == tree.depth[-1] - 1) & ~tree.entropy.isnan()).flatten()  # the last pass
        return float(tree.entropy[best(tree, last, 1)]) if len(last) else 0.0
