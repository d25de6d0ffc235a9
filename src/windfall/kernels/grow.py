"""What follows a draft pass: its children join the tree, and the nodes of the next pass are chosen and laid out."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from windfall.costs.acceptance import CHANCE_BUCKETS, DEPTHS, MAX_LOG_ODDS, RANKS
from windfall.kernels.backend import on_triton
from windfall.kernels.trees import NOBODY, Ahead, Terms, TreeArrays


class Rule(NamedTuple):
    """How the nodes of the next pass are chosen; compiled into the kernel."""

    whole: bool = False  # among all nodes not yet expanded, else among the newest
    calibrated: bool = False  # by the calibrated chance of their path
    shaped: bool = False  # by a fixed shape
    bounded: bool = False  # only nodes within `bounds`, see kernels.gate.Bounds
    floored: bool = False  # nodes with a key of at most `floor` are empty places
    decay: float = 0.0  # added to a node's key for each level: a logarithm
    top: int = 0  # only nodes among the best `top` of the tree are kept; those better than the last are expanded
    include_last: bool = False  # expand the last of these too, while fewer than `top` nodes have been chosen
    budget: int = 0  # nodes of the whole tree; above 0, only nodes chosen for expansion are kept
    share: float = 0.0  # with a budget: the logarithm of the share of the best candidate's probability that is enough
    first: int = 0  # with a budget: nodes of the first levels, where the share does not count
    levels: int = 0  # and how many levels these are

    @property
    def selective(self) -> bool:
        """Whether only some of the children are kept."""
        return bool(self.top or self.budget)


RULES = {
    "beam": Rule(),
    "best": Rule(whole=True),
    "calibrated": Rule(whole=True, calibrated=True),
    "shape": Rule(shaped=True),
}


def grow(
    tree: TreeArrays,
    nodes: Tensor,  # [w] long, just expanded; may be ahead.nodes itself
    tokens: Tensor,  # [w, k] long
    logq: Tensor,  # [w, k] fp32
    ahead: Ahead,
    rule: Rule,
    terms: Terms | None = None,  # for calibrated rules
    shape: Tensor | None = None,  # [n, ≥ k] long, for shaped rules
    bounds: Tensor | None = None,  # [9] fp32, for bounded rules
    floor: Tensor | None = None,  # [1] fp32, for floored rules
) -> None:
    """Append the children of these nodes, and make the W best nodes by key the rows of the next pass.

    Without further terms the key is the drafter's own score. Calibrated: the chance of the whole path. Shaped: nodes
    have numbers from 0, the root's, and shape[number, rank] is that of a child, above its parent's, or below 0 where
    the shape has none, which makes it an empty place; of the newest those with the lowest numbers come next. Ties go to
    the lower index, and no node at depth D is chosen. A child of NOBODY, or with a log-probability of -inf, is an empty
    place. If the W rows no longer fit among the S, none is staged. Row p of `ahead.summary` describes the tree after
    pass p; the first pass is the one over a tree of one node.
    """
    assert (terms is not None) >= rule.calibrated and (shape is not None) >= rule.shaped
    assert (bounds is not None) >= rule.bounded and (floor is not None) >= rule.floored
    if on_triton(tokens):
        from windfall.kernels.triton.grow import grow as run
    else:
        run = reference
    terms, shape = terms if rule.calibrated else None, shape if rule.shaped else None
    bounds, floor = bounds if rule.bounded else None, floor if rule.floored else None
    run(tree, nodes, tokens, logq, ahead, rule, terms, shape, bounds, floor)


def reference(
    tree: TreeArrays,
    nodes: Tensor,
    tokens: Tensor,
    logq: Tensor,
    ahead: Ahead,
    rule: Rule,
    terms: Terms | None = None,
    shape: Tensor | None = None,
    bounds: Tensor | None = None,
    floor: Tensor | None = None,
) -> None:
    """The same with torch."""
    before = tree.count.clone()
    if rule.selective:
        wider = [torch.cat([x, x.new_zeros(tokens.numel(), *x.shape[1:])]) for x in tree[:-1]]
        wide = TreeArrays._make([*wider, tree.count])
        append(wide, nodes, tokens, logq, terms, shape, rule.decay, floor)
        chosen = _select(wide, int(before), int(tree.count), len(ahead.nodes), rule)
        for own, made in zip(tree[:-1], wide, strict=False):
            own.copy_(made[: len(own)])
        spare = len(ahead.nodes) - len(chosen)
        keys = torch.nn.functional.pad(tree.key[chosen], (0, spare), value=-math.inf)
        chosen = torch.nn.functional.pad(chosen, (0, spare), value=NOBODY)
    else:
        append(tree, nodes, tokens, logq, terms, shape, rule.decay, floor)
        chosen, keys = _frontier(tree, before, len(ahead.nodes), rule, bounds)
    stage(tree, ahead, chosen, compact=rule.selective)
    _summarize(tree, ahead, before, chosen, keys, rule, terms)


def _summarize(
    tree: TreeArrays, ahead: Ahead, before: Tensor, chosen: Tensor, keys: Tensor, rule: Rule, terms: Terms | None
) -> None:
    """Write the summary of this pass."""
    places = torch.arange(len(tree.key), device=chosen.device)
    alive = (places < tree.count) & (tree.key > -math.inf)
    gain = worth = mass = keys.new_zeros(())
    if rule.top:
        best = torch.where(alive, tree.key, -math.inf).sort(descending=True).values[: rule.top]
        mass = best.exp().sum()
    if terms is not None:
        fee, price = terms.prices
        real = chosen.clamp(min=0)
        bucket = sum((tree.chance[real] > edge).long() for edge in CHANCE_BUCKETS)
        hopes = terms.forecast[tree.depth[real].clamp(max=DEPTHS - 1), bucket]  # [W, children]
        gain = (keys.exp()[:, None] * hopes - price).clamp(min=0).sum() - fee
        worth = (alive & (places > 0) & (tree.key.exp() > price)).sum()
    found = torch.stack([keys.amax(), keys.logsumexp(0), gain, worth.float(), alive.sum().float(), mass])
    row = torch.where(before == 1, 1, ahead.summary[0, :1].long() + 1)
    ahead.summary.index_copy_(0, row, found[None])
    ahead.summary[0, :1] = row.float()


def _frontier(tree: TreeArrays, before: Tensor, width: int, rule: Rule, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """The nodes of the next pass, best first, NOBODY after them, and their keys."""
    places = torch.arange(len(tree.tokens), device=tree.tokens.device)
    eligible = (tree.depth < tree.line.shape[1] - 1) & (places < tree.count)
    eligible &= ~tree.taken if rule.whole else places >= before
    if bounds is not None:
        eligible &= (tree.score >= bounds[0]) & ((tree.depth < bounds[1]) | (tree.score > bounds[2]))
    values, order = torch.where(eligible, tree.key, -math.inf).sort(descending=True, stable=True)
    spare = max(width - len(order), 0)  # a frontier wider than the tree
    keys = torch.nn.functional.pad(values[:width], (0, spare), value=-math.inf)
    return torch.where(keys > -math.inf, torch.nn.functional.pad(order[:width], (0, spare)), NOBODY), keys


def _select(tree: TreeArrays, before: int, end: int, width: int, rule: Rule) -> Tensor:
    """Keep some of the newest nodes [before, end), moved together; the nodes of the next pass, ascending."""
    newest = torch.arange(before, end, device=tree.key.device)
    newest = newest[tree.key[newest] > -math.inf]
    deepest = tree.line.shape[1] - 1
    if rule.budget:
        limit = min(width, rule.budget - before)
        if len(newest) and int(tree.depth[newest[0]]) <= rule.levels:
            limit = min(limit, rule.first)
        elif len(newest):
            newest = newest[tree.key[newest] >= tree.key[newest].amax() + rule.share]
        kept = newest[tree.key[newest].sort(descending=True, stable=True).indices[:limit]].sort().values
        _move(tree, kept, before)
        moved = torch.arange(before, before + len(kept), device=tree.key.device)
        return moved[tree.depth[moved] < deepest]
    known = torch.cat([torch.arange(before, device=newest.device), newest])
    best = known[tree.key[known].sort(descending=True, stable=True).indices[: rule.top]]
    last = float(tree.key[best].amin()) if len(best) == rule.top else -math.inf
    kept = best[best >= before].sort().values
    _move(tree, kept, before)
    places = torch.arange(before + len(kept), device=tree.key.device)
    eligible = (tree.depth[places] < deepest) & (tree.key[places] >= last)
    eligible &= ~tree.taken[places] if rule.whole else places >= before
    nodes = places[eligible]
    nodes = nodes[tree.key[nodes].sort(descending=True, stable=True).indices[:width]].sort().values
    tree.taken[nodes] = True
    if last > -math.inf and not (
        rule.include_last and int((tree.taken[places] & (tree.key[places] >= last)).sum()) < rule.top
    ):
        nodes = nodes[tree.key[nodes] > last]
    return nodes


def _move(tree: TreeArrays, nodes: Tensor, start: int) -> None:
    """These nodes, ascending, become the last of the tree, from this place on."""
    goal = torch.arange(start, start + len(nodes), device=nodes.device)
    for array in (tree.tokens, tree.parents, tree.depth, tree.rank, tree.logq, tree.score, tree.key, tree.chance):
        array[goal] = array[nodes]
    line = tree.line[nodes]
    line.scatter_(1, tree.depth[goal][:, None], goal[:, None])
    tree.line[goal] = line
    tree.taken[goal] = False
    tree.count.fill_(start + len(nodes))


def append(
    tree: TreeArrays,
    nodes: Tensor,
    tokens: Tensor,
    logq: Tensor,
    terms: Terms | None,
    shape: Tensor | None = None,
    decay: float = 0.0,
    floor: Tensor | None = None,
) -> int:
    """Children [w, k] join the tree; returns how many places that took."""
    width, k = tokens.shape
    ranks = torch.arange(k, device=nodes.device).expand(width, k)
    parent = nodes.clamp(min=0)[:, None].expand(width, k)
    alive = (nodes >= 0)[:, None] & (logq > -math.inf)
    depth = tree.depth[parent] + 1
    if terms is None:
        chance, step = logq.exp(), logq
    else:
        chance = torch.where(alive, believed(logq, depth, ranks, terms.weights), 0.0)  # fp64
        chance = chance / chance.sum(1, keepdim=True).clamp(min=1)
        step = chance.log().float()
    base = tree.score if terms is None else tree.key
    keys = base[parent] + step
    if decay:
        keys = tree.score[parent] + logq + decay * depth.float()
    if shape is not None:
        children = shape[(-tree.key[nodes.clamp(min=0)]).long(), :k]
        alive, keys = alive & (children >= 0), -children.float()
    if floor is not None:
        keys = torch.where(keys > floor, keys, -math.inf)
    where = tree.count + torch.arange(width * k, device=nodes.device)
    columns = torch.arange(tree.line.shape[1], device=nodes.device)
    line = torch.where(columns == depth.flatten()[:, None], where[:, None], tree.line[parent.flatten()])
    made = {
        "tokens": tokens,
        "parents": parent,
        "depth": depth,
        "rank": ranks,
        "logq": logq,
        "score": torch.where(alive, tree.score[parent] + logq, -math.inf),
        "key": torch.where(alive, keys, -math.inf),
        "chance": torch.where(alive, chance, 0.0).float(),
        "taken": torch.zeros_like(alive),
    }
    for name, values in made.items():
        getattr(tree, name).index_copy_(0, where, values.flatten())
    tree.line.index_copy_(0, where, line)
    tree.count.add_(width * k)
    return width * k


def believed(logq: Tensor, depth: Tensor, rank: Tensor, weights: Tensor) -> Tensor:
    """Calibrator.accept, in fp64."""
    wide, weights = logq.double(), weights.double()
    odds = (wide - (-wide.clamp(max=-1e-6).expm1()).log()).clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)
    score = weights[0] * odds + weights[depth.clamp(max=DEPTHS)] + weights[1 + DEPTHS + rank.clamp(max=RANKS - 1)]
    return score.clamp(-30, 30).sigmoid()


def stage(tree: TreeArrays, ahead: Ahead, nodes: Tensor, compact: bool = False) -> None:
    """Lay these nodes [W] out as the rows of the next pass. `compact`: NOBODY after them takes no staged row."""
    width, room, device = len(nodes), len(ahead.expanded), nodes.device
    real, live = nodes.clamp(min=0), nodes >= 0
    place = ahead.staged + torch.arange(width, device=device)
    fits = ahead.staged + width <= room
    ahead.nodes.copy_(nodes)
    ahead.tokens.copy_(torch.where(live, tree.tokens[real], 0))
    ahead.positions.copy_(ahead.length - 1 + torch.where(live, tree.depth[real], 0))
    ahead.above.copy_(torch.where(live, tree.slot[tree.parents[real].clamp(min=0)], 0))
    ahead.here.copy_(1 + place)
    ahead.slots.copy_(ahead.length + place)
    mine = (nodes[:, None] == torch.arange(len(tree.slot), device=device)) & live[:, None]  # [W, C]
    tree.taken.logical_or_(mine.any(0))
    tree.slot.copy_(torch.where(mine.any(0) & fits, (mine * ahead.here[:, None]).sum(0), tree.slot))
    row = torch.arange(room, device=device) - ahead.staged
    fresh = (row >= 0) & (row < width) & fits
    ahead.expanded.copy_(torch.where(fresh, nodes[row.clamp(0, width - 1)], ahead.expanded))
    ahead.mask.copy_(sees(tree, nodes, ahead.expanded))
    ahead.staged.add_((live.sum() if compact else width) * fits)


def sees(tree: TreeArrays, nodes: Tensor, others: Tensor) -> Tensor:
    """[n, m] bool: whether each of `others` is that node itself or one of its ancestors; NOBODY is nobody's."""
    above = tree.line[nodes.clamp(min=0)]  # [n, D + 1]
    at_depth = tree.depth[others.clamp(min=0)].expand(len(nodes), -1)  # [n, m]
    return (above.gather(1, at_depth) == others) & (others >= 0) & (nodes[:, None] >= 0)
