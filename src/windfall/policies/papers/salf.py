"""Stopping at low further gains (SALF & TALF, Algorithm 2): a best-first tree, until going on promises too little."""

from __future__ import annotations

import math
from dataclasses import dataclass

from windfall.core.options import option
from windfall.policies.base import NEVER, TreePolicy
from windfall.policies.context import Context
from windfall.policies.plan import Decision, Plan, TreeView


@dataclass
class Salf(TreePolicy):
    """Expands the `width` likeliest unexpanded nodes of any depth; stops when their path probabilities sum below `th`.

    At th=0, with k=none and a `cap` as large as `nodes`, this is the optimal tree search: the `nodes` likeliest nodes
    of the whole infinite tree. The paper leaves open whether unexpanded candidates fill the tree after an early stop
    (its listing returns expanded ones only, its guarantee reads as if they did): `fill`. It states a depth limit but
    uses none: `max_depth`. `k` and `cap` are ours: within them, the tree can grow on a GPU.
    """

    nodes: int = option(60, "rows of the verify pass, the root counted", low=1)
    width: int = option(10, "nodes expanded in one draft pass", low=1)
    th: float = option(0.6, "stop when the path probabilities of the nodes to expand sum below this", low=0, high=1)
    fill: bool = option(True, "fill the tree with the best unexpanded nodes; false: verify expanded nodes only")
    max_depth: int | None = option(None, "longest drafted path; none: no limit", low=1)
    k: int | None = option(10, "maximum children of a node; none: as many as can matter", low=1)
    cap: int = option(16, "maximum draft passes; the paper has no limit", low=1)

    def plan(self) -> Plan:
        return Plan(
            passes=self.cap,
            width=self.width,
            k=self.nodes if self.k is None else self.k,
            rows=self.nodes,
            order="best",
            top=self.nodes,
            include_last=True,
            max_depth=self.max_depth,
            expanded_only=not self.fill,
            watches=("summary",),
            decide=self.decide,
        )

    def decide(self, level: int, view: TreeView, ctx: Context) -> Decision:
        return Decision(view.summary(level).total >= self._least, self.nodes)

    @property
    def _least(self) -> float:
        return math.log(max(self.th, NEVER))
