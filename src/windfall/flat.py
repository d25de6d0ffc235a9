"""Where rows and draft passes are cheap, as on a GPU, the best tree per second has a simple form: a pass must be worth
its fee and a row its price. `auto` follows it there, and resident/plans.py has the device follow it."""

from __future__ import annotations

import numpy as np

from windfall.calibration import BUCKETS, DEPTHS, Calibrator
from windfall.context import Context
from windfall.cost import Costs
from windfall.records import Step
from windfall.tree import DraftTree

PASSES = 12  # draft passes at the most
WIDTH = 8  # nodes of a pass
LEAST = 2  # passes before anybody asks
ROWS = (1, 4, 8, 16, 24, 32, 48, 64)  # sizes of verify passes
STEEP = 2.0  # a pass over the most rows may cost so many times one row's
CHEAP = 0.12  # and a draft pass so much of it
FORESEE = 4  # cycles between two lessons about what children to expect


def is_flat(costs: Costs, length: int) -> bool:
    """Whether rows and draft passes are cheap here."""
    one = costs.verify(1, length)
    cheap = costs.draft(WIDTH) < CHEAP * one and costs.opening < 2 * CHEAP * one
    return cheap and costs.verify(ROWS[-1], length) < STEEP * one


def prices(ctx: Context) -> tuple[float, float]:
    """The fee of a draft pass and the price of a row, in tokens that the same time would earn elsewhere."""
    costs, length = ctx.costs, ctx.length
    one, most = costs.verify(1, length), costs.verify(ROWS[-1], length)
    rate = ctx.calibrator.gain / (one + costs.overhead)
    return costs.draft(WIDTH) * rate, max(most - one, 0.0) / (ROWS[-1] - 1) * rate


def rows(worth: int, most: int) -> int:
    """Rows of the verify pass, where so many nodes are worth one: the next size up, which costs the same."""
    if not worth:
        return 1
    return min(next((size for size in ROWS if size > worth), ROWS[-1]), most)


class Rule:
    """The plain form: what the device does, on the host, for a tree of this cycle."""

    def __init__(self, ctx: Context):
        self.fee, self.price = prices(ctx)
        self.calibrator = ctx.calibrator
        self.chance, self.reach = [1.0], [1.0]
        self.taken = {0}
        self.passes = 0

    def learn(self, tree: DraftTree) -> None:
        """Take in the nodes drafted last."""
        known = len(self.reach)
        chances, parents = self.calibrator.accept(tree, known), tree.parents[known:].tolist()
        families: dict[int, float] = {}
        for parent, chance in zip(parents, chances, strict=True):
            families[parent] = families.get(parent, 0.0) + chance
        for parent, chance in zip(parents, chances, strict=True):
            self.chance.append(chance / max(families[parent], 1.0))
            self.reach.append(self.reach[parent] * self.chance[-1])

    def frontier(self, tree: DraftTree) -> list[int]:
        """The nodes of the next pass, the likeliest first."""
        depth = tree.depth.tolist()
        nodes = [n for n in range(len(self.reach)) if n not in self.taken and depth[n] < PASSES and self.reach[n] > 0]
        return sorted(nodes, key=lambda node: (-self.reach[node], node))[:WIDTH]

    def gain(self, tree: DraftTree, nodes: list[int]) -> float:
        """What expanding these nodes earns, its fee paid, if their children are what children usually are."""
        means, depth = self.calibrator.means(), tree.depth.tolist()
        earned = 0.0
        for node in nodes:
            bucket = int(np.searchsorted(BUCKETS, self.chance[node]))
            for mean in means[min(depth[node], DEPTHS - 1)][bucket]:
                earned += max(self.reach[node] * mean - self.price, 0.0)
        return earned - self.fee

    @property
    def worth(self) -> int:
        """How many nodes are worth a row."""
        return sum(reach > self.price for reach in self.reach[1:])


def learn(step: Step, ctx: Context, foresee: bool) -> None:
    """Learn from a cycle what drafting earns and, now and then, what children to expect."""
    calibrator, costs = ctx.calibrator, ctx.costs
    if step.seconds.total > 0:
        calibrator.pace(len(step.tokens), step.seconds.total, costs.verify(1, ctx.length) + costs.overhead)
    if foresee and len(step.drafted) > 1:
        _foresee(step.drafted, calibrator)


def _foresee(tree: DraftTree, calibrator: Calibrator) -> None:
    """Teach the calibrator what children this tree's nodes turned out to have."""
    chances = [1.0, *calibrator.accept(tree)]
    children: dict[int, list[float]] = {}
    for node, parent in enumerate(tree.parents.tolist()[1:], 1):
        children.setdefault(parent, []).append(chances[node])
    depth = tree.depth.tolist()
    for parent, own in children.items():
        scale = max(sum(own), 1.0)
        calibrator.foresee(depth[parent], chances[parent], [chance / scale for chance in own])
