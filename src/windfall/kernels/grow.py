"""What follows a draft pass: its children join the tree, and the nodes of the next pass are chosen and laid out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from windfall.costs.acceptance import CHANCE_BUCKETS, DEPTHS, MAX_LOG_ODDS, RANKS
from windfall.kernels.backend import on_triton
from windfall.kernels.trees import NOBODY, Ahead, Terms, TreeArrays

RULES = ("beam", "best", "calibrated", "shape")


def grow(
    tree: TreeArrays,
    nodes: Tensor,  # [w] long, just expanded; may be ahead.nodes itself
    tokens: Tensor,  # [w, k] long
    logq: Tensor,  # [w, k] fp32
    ahead: Ahead,
    rule: str,  # of RULES
    terms: Terms | None = None,  # for the calibrated rule
    shape: Tensor | None = None,  # [n, ≥ k] long, for the rule of that name
) -> None:
    """Append the children of these nodes, and make the W best nodes by key the rows of the next pass.

    `beam` chooses among the newest children by the drafter's own score, `best` among all nodes not yet expanded;
    `calibrated` does so by the chance of their whole path. `shape` is for trees whose form is known: nodes have numbers
    from 0, the root's, and shape[number, rank] is that of a child, above its parent's, or below 0 where the form has
    none, which makes it an empty place; of the newest those with the lowest numbers come next. Ties go to the lower
    index, and none at depth D is chosen. A child of NOBODY, or with a log-probability of -inf, is an empty place. If
    the W rows no longer fit among the S, none is staged.
    """
    assert rule in RULES and (terms is not None or rule != "calibrated") and (shape is not None or rule != "shape")
    if on_triton(tokens):
        from windfall.kernels.triton.grow import grow as run
    else:
        run = reference
    whole = rule in ("best", "calibrated")
    terms, shape = terms if rule == "calibrated" else None, shape if rule == "shape" else None
    run(tree, nodes, tokens, logq, ahead, whole, terms, shape)


def reference(
    tree: TreeArrays,
    nodes: Tensor,
    tokens: Tensor,
    logq: Tensor,
    ahead: Ahead,
    whole: bool,
    terms: Terms | None,
    shape: Tensor | None = None,
) -> None:
    """The same with torch, among all nodes not yet expanded (`whole`) or the newest; keys are scores without terms, or
    with a shape numbers below 0."""
    fresh = append(tree, nodes, tokens, logq, terms, shape)
    places = torch.arange(len(tree.tokens), device=nodes.device)
    eligible = (tree.depth < tree.line.shape[1] - 1) & (places < tree.count)
    eligible &= ~tree.taken if whole else places >= tree.count - fresh
    values, order = torch.where(eligible, tree.key, -math.inf).sort(descending=True, stable=True)
    width = len(ahead.nodes)
    spare = max(width - len(order), 0)  # a frontier wider than the tree
    keys = torch.nn.functional.pad(values[:width], (0, spare), value=-math.inf)
    chosen = torch.where(keys > -math.inf, torch.nn.functional.pad(order[:width], (0, spare)), NOBODY)
    stage(tree, ahead, chosen)
    ahead.promise[0] = keys.amax()
    ahead.promise[1] = keys.logsumexp(0)
    ahead.promise[2:] = 0
    if terms is not None:
        fee, price = terms.prices
        real = chosen.clamp(min=0)
        bucket = sum((tree.chance[real] > edge).long() for edge in CHANCE_BUCKETS)
        hopes = terms.forecast[tree.depth[real].clamp(max=DEPTHS - 1), bucket]  # [W, children]
        ahead.promise[2] = (keys.exp()[:, None] * hopes - price).clamp(min=0).sum() - fee
        worth = (tree.key.exp() > price) & (places > 0) & (places < tree.count)
        ahead.promise[3] = worth.sum()


def append(
    tree: TreeArrays, nodes: Tensor, tokens: Tensor, logq: Tensor, terms: Terms | None, shape: Tensor | None = None
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
    if shape is not None:
        children = shape[(-tree.key[nodes.clamp(min=0)]).long(), :k]
        alive, keys = alive & (children >= 0), -children.float()
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


def stage(tree: TreeArrays, ahead: Ahead, nodes: Tensor) -> None:
    """Lay these nodes [W] out as the rows of the next pass."""
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
    ahead.staged.add_(width * fits)


def sees(tree: TreeArrays, nodes: Tensor, others: Tensor) -> Tensor:
    """[n, m] bool: whether each of `others` is that node itself or one of its ancestors; NOBODY is nobody's."""
    above = tree.line[nodes.clamp(min=0)]  # [n, D + 1]
    at_depth = tree.depth[others.clamp(min=0)].expand(len(nodes), -1)  # [n, m]
    return (above.gather(1, at_depth) == others) & (others >= 0) & (nodes[:, None] >= 0)
