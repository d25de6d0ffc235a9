"""The step after a draft pass: append its children to the tree, and choose and stage the nodes of the next pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from windfall.costs.acceptance import CHANCE_BUCKETS, DEPTHS, MAX_LOG_ODDS, RANKS
from windfall.kernels.backend import on_triton
from windfall.kernels.rules import Rule
from windfall.kernels.trees import NO_NODE, Calibration, NextPass, TreeArrays, pass_of, tree_of


def grow(
    tree: TreeArrays,
    nodes: Tensor,  # [w] long, just expanded; may be next_pass.nodes
    tokens: Tensor,  # [w, k] long
    logq: Tensor,  # [w, k] fp32
    next_pass: NextPass,
    rule: Rule,
    calibration: Calibration | None = None,  # for calibrated rules
    shape: Tensor | None = None,  # [n, ≥ k] long, for shaped rules
    bounds: Tensor | None = None,  # [9] fp32, for bounded rules
    floor: Tensor | None = None,  # [1] fp32, for floored rules
) -> None:
    """Append the children of these nodes, and make the W nodes with the highest keys the rows of the next pass.

    A node's key is the drafter's score of its path. For calibrated rules, it is the calibrated log-probability of the
    path. For shaped rules, nodes are numbered from 0, the root, and shape[number, rank] is the number of a child. It is
    above its parent's number, or negative if the shape has no such child. The nodes with the lowest numbers come first.

    The lower index wins ties. No node at depth D is chosen. A child of NO_NODE or with a log-probability of -inf
    becomes an empty entry. If W rows no longer fit into the S staged rows, none is staged. Row p of
    `next_pass.summary` describes the tree after pass p; the first pass is the one that starts from a tree of one node.

    For a batch of requests, all arrays have one more dimension, the first; all share shape, bounds and floor.
    """
    assert (calibration is not None) >= rule.calibrated and (shape is not None) >= rule.shaped
    assert (bounds is not None) >= rule.bounded and (floor is not None) >= rule.floored
    if on_triton(tokens):
        from windfall.kernels.triton.grow import grow as run
    else:
        run = reference
    calibration, shape = calibration if rule.calibrated else None, shape if rule.shaped else None
    bounds, floor = bounds if rule.bounded else None, floor if rule.floored else None
    run(tree, nodes, tokens, logq, next_pass, rule, calibration, shape, bounds, floor)


def reference(
    tree: TreeArrays,
    nodes: Tensor,
    tokens: Tensor,
    logq: Tensor,
    next_pass: NextPass,
    rule: Rule,
    calibration: Calibration | None = None,
    shape: Tensor | None = None,
    bounds: Tensor | None = None,
    floor: Tensor | None = None,
) -> None:
    """`grow` with torch."""
    if nodes.dim() == 2:
        for request in range(len(nodes)):
            its = calibration
            if calibration is not None and calibration.weights.dim() == 2:
                its = Calibration(*(array[request] for array in calibration))
            given = nodes[request], tokens[request], logq[request], pass_of(next_pass, request)
            reference(tree_of(tree, request), *given, rule, its, shape, bounds, floor)
        return
    before = tree.count.clone()
    if rule.selective:
        wider = [torch.cat([x, x.new_zeros(tokens.numel(), *x.shape[1:])]) for x in tree[:-1]]
        wide = TreeArrays._make([*wider, tree.count])
        append(wide, nodes, tokens, logq, calibration, shape, rule.decay, floor)
        chosen = _select(wide, int(before), int(tree.count), len(next_pass.nodes), rule)
        for own, made in zip(tree[:-1], wide, strict=False):
            own.copy_(made[: len(own)])
        spare = len(next_pass.nodes) - len(chosen)
        keys = torch.nn.functional.pad(tree.key[chosen], (0, spare), value=-math.inf)
        chosen = torch.nn.functional.pad(chosen, (0, spare), value=NO_NODE)
    else:
        append(tree, nodes, tokens, logq, calibration, shape, rule.decay, floor)
        chosen, keys = _best_nodes(tree, before, len(next_pass.nodes), rule, bounds)
    stage(tree, next_pass, chosen, compact=rule.selective)
    _summarize(tree, next_pass, before, chosen, keys, rule, calibration)


def _summarize(
    tree: TreeArrays,
    next_pass: NextPass,
    before: Tensor,
    chosen: Tensor,
    keys: Tensor,
    rule: Rule,
    calibration: Calibration | None,
) -> None:
    """Write the summary of this pass."""
    places = torch.arange(len(tree.key), device=chosen.device)
    alive = (places < tree.count) & (tree.key > -math.inf)
    gain = worth = mass = keys.new_zeros(())
    if rule.top:
        best = torch.where(alive, tree.key, -math.inf).sort(descending=True).values[: rule.top]
        mass = best.exp().sum()
    if calibration is not None:
        pass_price, row_price = calibration.prices
        real = chosen.clamp(min=0)
        bucket = sum((tree.chance[real] > edge).long() for edge in CHANCE_BUCKETS)
        chances = calibration.forecast[tree.depth[real].clamp(max=DEPTHS - 1), bucket]  # [W, children]
        gain = (keys.exp()[:, None] * chances - row_price).clamp(min=0).sum() - pass_price
        worth = (alive & (places > 0) & (tree.key.exp() > row_price)).sum()
    found = torch.stack([keys.amax(), keys.logsumexp(0), gain, worth.float(), alive.sum().float(), mass])
    row = torch.where(before == 1, 1, next_pass.summary[0, :1].long() + 1)
    next_pass.summary.index_copy_(0, row, found[None])
    next_pass.summary[0, :1] = row.float()


def _best_nodes(
    tree: TreeArrays, before: Tensor, width: int, rule: Rule, bounds: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The nodes of the next pass, best first, then NO_NODE; and their keys."""
    places = torch.arange(len(tree.tokens), device=tree.tokens.device)
    eligible = (tree.depth < tree.ancestors.shape[1] - 1) & (places < tree.count)
    eligible &= ~tree.taken if rule.whole else places >= before
    if bounds is not None:
        eligible &= (tree.score >= bounds[0]) & ((tree.depth < bounds[1]) | (tree.score > bounds[2]))
    values, order = torch.where(eligible, tree.key, -math.inf).sort(descending=True, stable=True)
    spare = max(width - len(order), 0)  # the pass is wider than the tree
    keys = torch.nn.functional.pad(values[:width], (0, spare), value=-math.inf)
    return torch.where(keys > -math.inf, torch.nn.functional.pad(order[:width], (0, spare)), NO_NODE), keys


def _select(tree: TreeArrays, before: int, end: int, width: int, rule: Rule) -> Tensor:
    """Drop some of the newest nodes [before, end) and close the gaps → the nodes of the next pass, ascending."""
    newest = torch.arange(before, end, device=tree.key.device)
    newest = newest[tree.key[newest] > -math.inf]
    deepest = tree.ancestors.shape[1] - 1
    if rule.budget:
        limit = min(width, rule.budget - before)
        if len(newest) and int(tree.depth[newest[0]]) <= rule.levels:
            limit = min(limit, rule.first)
        elif len(newest):
            newest = newest[tree.key[newest] >= tree.key[newest].amax() + rule.share]
        kept = newest[tree.key[newest].sort(descending=True, stable=True).indices[:limit]].sort().values
        _keep_only(tree, kept, before)
        moved = torch.arange(before, before + len(kept), device=tree.key.device)
        return moved[tree.depth[moved] < deepest]
    known = torch.cat([torch.arange(before, device=newest.device), newest])
    best = known[tree.key[known].sort(descending=True, stable=True).indices[: rule.top]]
    last = float(tree.key[best].amin()) if len(best) == rule.top else -math.inf
    kept = best[best >= before].sort().values
    _keep_only(tree, kept, before)
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


def _keep_only(tree: TreeArrays, nodes: Tensor, start: int) -> None:
    """Move these nodes, ascending, to the entries from `start` on, and end the tree there."""
    goal = torch.arange(start, start + len(nodes), device=nodes.device)
    for array in (tree.tokens, tree.parents, tree.depth, tree.rank, tree.logq, tree.score, tree.key, tree.chance):
        array[goal] = array[nodes]
    ancestors = tree.ancestors[nodes]
    ancestors.scatter_(1, tree.depth[goal][:, None], goal[:, None])
    tree.ancestors[goal] = ancestors
    tree.taken[goal] = False
    tree.count.fill_(start + len(nodes))


def append(
    tree: TreeArrays,
    nodes: Tensor,
    tokens: Tensor,
    logq: Tensor,
    calibration: Calibration | None,
    shape: Tensor | None = None,
    decay: float = 0.0,
    floor: Tensor | None = None,
) -> int:
    """Append children [w, k] to the tree; returns the number of new entries."""
    width, k = tokens.shape
    ranks = torch.arange(k, device=nodes.device).expand(width, k)
    parent = nodes.clamp(min=0)[:, None].expand(width, k)
    alive = (nodes >= 0)[:, None] & (logq > -math.inf)
    depth = tree.depth[parent] + 1
    if calibration is None:
        chance, step = logq.exp(), logq
    else:
        chance = torch.where(alive, acceptance(logq, depth, ranks, calibration.weights), 0.0)  # fp64
        chance = chance / chance.sum(1, keepdim=True).clamp(min=1)
        step = chance.log().float()
    base = tree.score if calibration is None else tree.key
    keys = base[parent] + step
    if decay:
        keys = tree.score[parent] + logq + decay * depth.float()
    if shape is not None:
        children = shape[(-tree.key[nodes.clamp(min=0)]).long(), :k]
        alive, keys = alive & (children >= 0), -children.float()
    if floor is not None:
        keys = torch.where(keys > floor, keys, -math.inf)
    where = tree.count + torch.arange(width * k, device=nodes.device)
    columns = torch.arange(tree.ancestors.shape[1], device=nodes.device)
    ancestors = torch.where(columns == depth.flatten()[:, None], where[:, None], tree.ancestors[parent.flatten()])
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
    tree.ancestors.index_copy_(0, where, ancestors)
    tree.count.add_(width * k)
    return width * k


def acceptance(logq: Tensor, depth: Tensor, rank: Tensor, weights: Tensor) -> Tensor:
    """Calibrator.accept in fp64."""
    wide, weights = logq.double(), weights.double()
    odds = (wide - (-wide.clamp(max=-1e-6).expm1()).log()).clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)
    score = weights[0] * odds + weights[depth.clamp(max=DEPTHS)] + weights[1 + DEPTHS + rank.clamp(max=RANKS - 1)]
    return score.clamp(-30, 30).sigmoid()


def stage(tree: TreeArrays, next_pass: NextPass, nodes: Tensor, compact: bool = False) -> None:
    """Make these nodes [W] the rows of the next pass. With `compact`, NO_NODE takes no staged row."""
    width, capacity, device = len(nodes), len(next_pass.expanded), nodes.device
    real, live = nodes.clamp(min=0), nodes >= 0
    place = next_pass.staged + torch.arange(width, device=device)
    fits = next_pass.staged + width <= capacity
    next_pass.nodes.copy_(nodes)
    next_pass.tokens.copy_(torch.where(live, tree.tokens[real], 0))
    next_pass.positions.copy_(next_pass.length - 1 + torch.where(live, tree.depth[real], 0))
    next_pass.parent_slots.copy_(torch.where(live, tree.slot[tree.parents[real].clamp(min=0)], 0))
    next_pass.own_slots.copy_(1 + place)
    next_pass.slots.copy_(next_pass.base + place)
    mine = (nodes[:, None] == torch.arange(len(tree.slot), device=device)) & live[:, None]  # [W, C]
    tree.taken.logical_or_(mine.any(0))
    tree.slot.copy_(torch.where(mine.any(0) & fits, (mine * next_pass.own_slots[:, None]).sum(0), tree.slot))
    row = torch.arange(capacity, device=device) - next_pass.staged
    fresh = (row >= 0) & (row < width) & fits
    next_pass.expanded.copy_(torch.where(fresh, nodes[row.clamp(0, width - 1)], next_pass.expanded))
    if next_pass.mask is not None:
        next_pass.mask.copy_(sees(tree, nodes, next_pass.expanded))
    if next_pass.lineage is not None:
        above = tree.ancestors[real][:, 1 : next_pass.lineage.shape[1] + 1]
        slots = next_pass.base + tree.slot[above.clamp(min=0)] - 1
        next_pass.lineage.copy_(torch.where((above < 0) | ~live[:, None], 0, slots))
    next_pass.staged.add_((live.sum() if compact else width) * fits)


def sees(tree: TreeArrays, nodes: Tensor, others: Tensor) -> Tensor:
    """[n, m] bool: whether each of `others` is the node itself or one of its ancestors; False for NO_NODE."""
    above = tree.ancestors[nodes.clamp(min=0)]  # [n, D + 1]
    at_depth = tree.depth[others.clamp(min=0)].expand(len(nodes), -1)  # [n, m]
    return (above.gather(1, at_depth) == others) & (others >= 0) & (nodes[:, None] >= 0)
