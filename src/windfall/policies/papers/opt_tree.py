"""Layers of the best nodes until another layer brings too little (OPT-Tree, Wang et al. 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from windfall.core.options import option
from windfall.policies.base import TreePolicy
from windfall.policies.context import Context
from windfall.policies.plan import Decision, Plan, TreeView


@dataclass
class OptTree(TreePolicy):
    """The tree of `nodes` nodes with the highest sum of path probabilities, drafted layer by layer.

    Nodes that fell out of the best `nodes` are not expanded: nothing below them could come back in. The release
    measures the gain without the newest layer and throws that layer away in the end, which wastes a draft pass a
    cycle (and drafts the first two layers always); `literal` does the same.
    """

    nodes: int = option(60, "drafted nodes to verify", low=1)
    threshold: float = option(0.5, "go on while a layer adds more than this to the expected tokens", low=0)
    depth: int = option(10, "maximum draft passes", low=1)
    k: int | None = option(16, "children of a node; none: as many as nodes, which makes the tree exact", low=1)
    literal: bool = option(False, "as the release: the newest layer is drafted but not used")

    def plan(self) -> Plan:
        return Plan(
            passes=self.depth,
            width=self.nodes,
            k=self.nodes if self.k is None else self.k,
            rows=1 + self.nodes,
            top=1 + self.nodes,
            watches=("summary",),
            decide=self.decide,
            asks=range(1, self.depth + 1),
        )

    def decide(self, level: int, view: TreeView, ctx: Context) -> Decision:
        measured = level - self.literal
        if measured < 1:
            return Decision(True, 1 + self.nodes, 0)
        before = view.summary(measured - 1).mass if measured > 1 else 1.0
        gain = view.summary(measured).mass - before
        more = gain > self.threshold and view.summary(level).best > -math.inf
        return Decision(more, 1 + self.nodes, measured)
