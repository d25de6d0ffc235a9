"""A custom tree policy in one file: every likely node gets two children.

python examples/custom_policy.py "Count from one to ten."
windfall generate "Count from one to ten." --policy examples/custom_policy.py:Likely --set least=0.1
"""

import math
import sys
from dataclasses import dataclass

import torch

import windfall
from windfall.core.types import Grow
from windfall.policies.context import Context


@dataclass
class Likely(windfall.TreePolicy):
    """Expand every node whose path is likelier than a threshold; verify the whole tree."""

    least: float = windfall.option(0.2, "path probability below which a node is not expanded", low=0.001, high=1)
    depth: int = windfall.option(6, "largest number of levels", low=1)

    def grow(self, tree: windfall.DraftTree, ctx: Context) -> Grow | None:
        level = int(tree.depth.max())
        likely = (tree.depth == level) & (tree.score >= math.log(self.least))  # score: log-probability of the path
        nodes = torch.nonzero(likely).flatten()
        return Grow(nodes, k=2) if level < self.depth and len(nodes) else None


if __name__ == "__main__":
    engine = windfall.load(policy=Likely(least=0.1))
    answer = engine.generate(" ".join(sys.argv[1:]) or "Count from one to ten.", max_new_tokens=48)
    rows = answer.stats.rows / answer.stats.cycles
    print(answer.text)
    print(f"{answer.stats.tau:.2f} tokens per pass, {rows:.1f} rows verified per pass")
