"""Runs a Plan on the host, over a DraftTree."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from windfall.core.tree import Arrays, DraftTree, Flags, Floats, Integers
from windfall.core.types import Grow
from windfall.costs.acceptance import CHANCE_BUCKETS, DEPTHS
from windfall.policies.context import Context
from windfall.policies.plan import Decision, NotWatched, Plan, Summary
from windfall.policies.ranking import best_places, lowest_of_best

ROOT: Integers = np.zeros(1, np.int64)


class PlannedTree:
    """One cycle of a plan: which nodes each draft pass expands, and which nodes are verified.

    It is also the TreeView of the plan's decisions.
    """

    def __init__(self, plan: Plan, ctx: Context):
        self.plan, self.ctx = plan, ctx
        self._opening, rows = plan.begin(ctx)
        self._decision = Decision(False, rows)
        self._shape = plan.shape(ctx) if plan.shape else None
        self._bounds = plan.bounds() if plan.bounds else None
        self._max_depth = plan.passes + 1 if plan.max_depth is None else plan.max_depth
        if plan.order == "best":  # deeper nodes could not be emitted; they must not take the place of others
            self._max_depth = min(self._max_depth, ctx.room - 1)
        self._plain = plan.order == "level" and not (
            plan.shape or plan.bounds or plan.selective or plan.floor or plan.keep or plan.calibrated
        )  # a beam: every node stays, and the best of the newest level come next
        self._by_score = self._plain and plan.decay == 1.0  # keys are path log-probabilities
        self._fronts: list[Integers] = []  # the nodes that each pass expanded, likeliest first
        self._starts = [0, 1]  # the first node of each level; the root is level 0
        self._summaries: list[Summary] = []  # by level
        self._tree: DraftTree
        self._keys: Floats = np.zeros(1, np.float32)
        self._alive: Flags | None = None  # [N] nodes that may be expanded or verified; None: all
        self._chance = np.ones(1)  # [N] calibrated: of being accepted if the parent is
        self._taken = ROOT  # nodes chosen for expansion so far
        if plan.calibrated:
            self._forecasts = np.asarray(ctx.calibrator.mean_forecasts())

    def grow(self, tree: DraftTree) -> Grow | None:
        """The next draft pass, or None to stop drafting."""
        plan, level = self.plan, len(self._fronts)
        if level:
            self._take_in(tree)
        self._tree = tree
        nodes = self._frontier(tree) if level else ROOT[: self._max_depth]
        if "summary" in plan.watches:
            self._summaries.append(self._summarize(nodes))
        if not self._goes_on(level) or not len(nodes):
            return None
        self._fronts.append(nodes)
        return Grow(torch.from_numpy(nodes), self._children(level, nodes), self._wants_entropy())

    def _goes_on(self, level: int) -> bool:
        plan, seen = self.plan, level - self.plan.lookahead
        if plan.decide is None:
            return level < self._opening
        if level and seen >= self._opening:
            self._decision = plan.decision(seen, self, self.ctx)
            return self._decision.go_on and level < plan.passes
        return level < plan.passes

    def _wants_entropy(self) -> bool:
        return "entropy" in self.plan.watches or (self.plan.keep is not None and self.plan.keep.entropy)

    def select(self, tree: DraftTree) -> Tensor:
        """The nodes to verify, ascending."""
        nodes, keys = self.candidates(tree)
        rows = self._decision.rows
        if self.plan.shape is None and rows < len(nodes):
            nodes = np.sort(nodes[best_places(keys, rows)])
        return torch.from_numpy(nodes)

    def candidates(self, tree: DraftTree) -> tuple[Integers, Floats]:
        """The nodes that may be verified, ascending, and their keys, which do not rise from parent to child."""
        plan, levels = self.plan, self._decision.levels
        if len(tree) > self._starts[-1]:  # the last pass was not followed by a question
            self._take_in(tree)
        end = len(tree) if levels is None else self._starts[min(levels + 1, len(self._starts) - 1)]
        nodes = np.arange(end) if self._alive is None else self._alive[:end].nonzero()[0]
        if plan.expanded_only:
            nodes = np.sort(self._taken)
        return nodes, -nodes.astype(np.float32) if plan.first_come else self._keys[nodes]

    @property
    def expanded(self) -> Integers:
        """The nodes that draft passes expanded."""
        return np.concatenate([ROOT[:0], *self._fronts])

    # ---- the newest nodes

    def _take_in(self, tree: DraftTree) -> None:
        """Give the nodes of the last pass their keys, and drop those that the plan does not want."""
        plan, known, start = self.plan, tree.arrays, self._starts[-1]
        self._starts.append(len(tree))
        if self._by_score:
            self._keys = known.score
            return
        new = np.arange(start, len(tree))
        if self._shape is not None:
            places = np.array(self._shape.places(tree))
            self._keys, self._alive = -places.astype(np.float32), places >= 0
            return
        if plan.calibrated:
            self._calibrate(tree, new)
        elif plan.decay != 1.0:
            self._keys = known.score + np.float32(math.log(plan.decay)) * known.depth.astype(np.float32)
        else:
            self._keys = known.score
        dropped = [self._too_broad(tree, new)] if self._bounds else []
        if plan.floor is not None:
            dropped.append(self._keys[new] <= plan.floor(self.ctx))
        if plan.keep is not None:
            entropy = known.entropy[known.parents[new]] if plan.keep.entropy else None
            dropped.append(~plan.keep.keeps(plan.keep.weights(), known.score[new], known.depth[new], entropy))
        if dropped or plan.layer is not None:
            before = np.ones(1, bool) if self._alive is None else self._alive
            self._alive = np.concatenate([before, ~np.any(dropped, 0) if dropped else np.ones(len(new), bool)])

    def _calibrate(self, tree: DraftTree, new: Integers) -> None:
        """Keys are the logarithm of a path's chance to be accepted; at most one sibling is."""
        chance = np.array(self.ctx.calibrator.accept(tree, len(self._keys), self.ctx.shift))
        parents = tree.arrays.parents[new]
        chance = chance / np.maximum(np.bincount(parents, chance, len(tree))[parents], 1.0)
        self._chance = np.concatenate([self._chance, chance])
        with np.errstate(divide="ignore"):
            self._keys = np.concatenate([self._keys, self._keys[parents] + np.log(chance)])

    def _too_broad(self, tree: DraftTree, new: Integers) -> Flags:
        """Which of the newest nodes are beyond the breadth that the drafter's confidence allows their parent."""
        bounds, known = self._bounds, tree.arrays
        assert bounds is not None
        parents, rank = known.parents[new], known.rank[new]
        first = new[rank == 0]
        confidence = np.zeros(len(tree), np.float32)
        confidence[known.parents[first]] = np.exp(known.logq[first])
        sure = confidence[parents]
        breadth = np.where(sure >= bounds.sure, bounds.narrow, bounds.middle)
        breadth = np.where(sure < bounds.unsure, bounds.wide, breadth)
        return rank >= np.where(parents == 0, np.minimum(breadth, bounds.first), breadth)

    # ---- the nodes of the next pass

    def _frontier(self, tree: DraftTree) -> Integers:
        """The nodes of the next pass, likeliest first."""
        plan, keys, known = self.plan, self._keys, tree.arrays
        if self._plain and self._max_depth > len(self._fronts):
            start = self._starts[-2]
            return start + best_places(keys[start:], plan.width)
        if plan.order == "level":
            nodes = np.arange(self._starts[-2], len(tree))
            allowed = None if self._alive is None else self._alive[nodes]
        else:
            allowed = np.ones(len(tree), bool) if self._alive is None else self._alive.copy()
            allowed[self._taken] = False
            nodes = np.arange(len(tree))
        if self._shape is not None:
            inner = self._shape.levels[len(self._fronts)] if len(self._fronts) < len(self._shape.levels) else {}
            allowed = np.isin(-keys[nodes], list(inner))
        if self._max_depth <= len(self._fronts):
            shallow = known.depth[nodes] < self._max_depth
            allowed = shallow if allowed is None else allowed & shallow
        if self._bounds is not None:
            allowed = allowed & self._expandable(tree, nodes)  # type: ignore[operator]
        if allowed is not None:
            nodes = nodes[allowed]
        if plan.layer is not None:
            return self._through_gate(tree, nodes)
        last = -math.inf if plan.top is None else self._last_place(plan.top)
        width = len(nodes) if self._shape is not None else plan.width
        nodes = self._best(nodes[(keys[nodes] >= last) & (keys[nodes] > -math.inf)], width)
        if plan.order == "best":
            self._taken = np.concatenate([self._taken, nodes])
        if plan.top is not None and last > -math.inf:
            full = int(np.count_nonzero(keys[self._taken] >= last)) >= plan.top
            nodes = nodes[keys[nodes] > last] if full or not plan.include_last else nodes
        return np.sort(nodes) if self._bounds is not None else nodes

    def _expandable(self, tree: DraftTree, nodes: Integers) -> Flags:
        bounds, score, depth = self._bounds, tree.arrays.score[nodes], tree.arrays.depth[nodes]
        assert bounds is not None
        likely: Flags = score >= np.float32(bounds.floor)
        found: Flags = likely & ((depth < bounds.ordinary) | (score > np.float32(bounds.deep)))
        return found

    def _through_gate(self, tree: DraftTree, nodes: Integers) -> Integers:
        """The candidates that stay; the others of their level leave the tree."""
        gate = self.plan.layer
        assert gate is not None and self._alive is not None
        kept = int(np.count_nonzero(self._alive[: self._starts[-2]]))
        limit = min(gate.budget - kept, self.plan.width)
        if len(self._fronts) <= gate.levels:
            limit = min(limit, gate.first)
        elif len(nodes) and gate.share > 0:
            keys = self._keys[nodes]
            nodes = nodes[keys >= keys.max() + np.float32(math.log(gate.share))]
        nodes = self._best(nodes, limit)
        self._alive[self._starts[-2] :] = False
        self._alive[nodes] = True
        return nodes

    def _best(self, nodes: Integers, count: int) -> Integers:
        """The `count` nodes with the highest keys, best first; ties go to the earlier node."""
        return nodes[best_places(self._keys[nodes], count)]

    def _last_place(self, count: int) -> float:
        """The key of the last of the best `count` nodes; -inf while the tree has fewer."""
        keys = self._keys if self._alive is None else self._keys[self._alive]
        return float(lowest_of_best(keys, count)) if len(keys) >= count else -math.inf

    def _children(self, level: int, nodes: Integers) -> int:
        """How many children of each node can matter.

        With `top`, the j-th child has a probability of at most 1/j and must beat the last place.
        """
        plan = self.plan
        if self._shape is not None:
            inner = self._shape.levels[level]
            return max(inner[int(-self._keys[node])] for node in nodes)
        if self._bounds is not None and level == 0:
            return min(plan.k, self._bounds.first)
        if plan.top is None or plan.decay != 1.0:
            return plan.k
        highest = float(self._keys[nodes[0]])
        ahead = int(np.count_nonzero(self._keys >= highest))
        reach = 1.0001 * math.exp(min(highest - self._last_place(plan.top), 20.0))
        return max(min(plan.k, plan.top - ahead, int(reach)), 1)

    # ---- what decisions see

    def _summarize(self, nodes: Integers) -> Summary:
        plan, keys = self.plan, self._keys[nodes]
        best = float(keys.max()) if len(keys) else -math.inf
        total = best + math.log(float(np.exp(keys - best).sum())) if len(keys) else -math.inf
        alive = self._keys if self._alive is None else self._keys[self._alive]
        gain = worth = mass = 0.0
        if plan.calibrated and plan.prices is not None:
            fee, price = plan.prices(self.ctx)
            gain = self._expected(nodes, price) - fee
            worth = float(np.count_nonzero(np.exp(self._keys[1:]) > price))
        if plan.top is not None:
            mass = float(np.exp(alive[best_places(alive, plan.top)]).sum())
        return Summary(best, total, gain, worth, float(len(alive)), mass)

    def _expected(self, nodes: Integers, price: float) -> float:
        """Tokens that a pass over these nodes should bring, less the price of its rows."""
        depth = np.minimum(self._tree.arrays.depth[nodes], DEPTHS - 1)
        bucket = np.searchsorted(CHANCE_BUCKETS, self._chance[nodes])
        reach = np.exp(self._keys[nodes])[:, None] * self._forecasts[depth, bucket]
        return float(np.maximum(reach - price, 0.0).sum())

    def _arrays(self, *names: str) -> Arrays:
        """The tree's arrays, for a decision that reads these of them."""
        for name in names:
            if name not in self.plan.watches:
                raise NotWatched(name)
        return self._tree.arrays

    @property
    def length(self) -> int:
        self._arrays("length")
        return self.ctx.length

    def summary(self, level: int) -> Summary:
        if not self._summaries:
            raise NotWatched("summary")
        return self._summaries[level]

    def scores(self, level: int) -> Floats:
        return self._arrays("score").score[self._starts[level] : self._starts[level + 1]]

    def all_scores(self, level: int) -> Floats:
        return self._arrays("score").score[1 : self._starts[level + 1]]

    def parent_score(self, level: int) -> float:
        return float(self._arrays("score", "expanded").score[self._fronts[level - 1][0]])

    def logq(self, level: int) -> Floats:
        known, start = self._arrays("logq"), self._starts[level]
        mine = known.parents[start : self._starts[level + 1]] == self._fronts[level - 1][0]
        found: Floats = known.logq[start : self._starts[level + 1]][mine]
        return found

    def entropies(self, level: int) -> Floats:
        return np.nan_to_num(self._arrays("entropy").entropy[self._fronts[level - 1]])
