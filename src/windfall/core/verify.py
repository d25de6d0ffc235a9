"""Which drafted nodes the target keeps, as pure functions: every rule emits exactly the target's own distribution.

`walk` serves children that are a fixed function of the context (all drafters here); the other rules serve children that
were sampled from the draft distribution. These take all their randomness from one callable, `choose`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from windfall.core.tree import DraftTree
from windfall.core.types import Verdict

Choose = Callable[[Tensor], int]  # probabilities [m], float64, sum 1 → an index drawn from them

TINY = 1e-12  # a residual below this is rounding noise; it is reached with no greater probability


def children_of(tree: DraftTree) -> dict[tuple[int, int], int]:
    """The node that each (parent, token) leads to."""
    known = tree.arrays
    edges = zip(known.parents.tolist(), known.tokens.tolist(), strict=True)
    return {edge: node for node, edge in enumerate(edges)}


def walk(tree: DraftTree, draw: Callable[[int], int], ends: Callable[[int], bool] | None = None) -> Verdict:
    """Follow the target's own draw from the root for as long as the tree contains it.

    `draw(node)` is the target's next token after that node; only visited nodes are asked, in order. Greedy decoding is
    the case where the draw is the argmax. `ends(token)`, if given, is asked after every draw; nothing is drawn after
    the token that ends the text, and that token is the verdict's bonus.
    """
    child = children_of(tree)
    path, node, token = [0], 0, draw(0)
    while not (ends and ends(token)) and (node := child.get((node, token), -1)) > 0:
        path.append(node)
        token = draw(node)
    return Verdict(torch.from_numpy(np.array(path)), token)


def rejection(tree: DraftTree, target: Tensor, draft: Tensor, choose: Choose, replacement: bool) -> Verdict:
    """Try the sampled children of a node one by one, from the root down; `target` and `draft` are probabilities [N, V].

    With replacement (SpecInfer, Miao et al. 2023) siblings are independent draws, and equal ones are separate trials.
    Without (EAGLE, Li et al. 2024; Sequoia, Chen et al. 2024) each sibling was drawn from what the earlier ones left.
    """
    children, tokens = _children(tree), tree.tokens.tolist()
    path = [0]
    while True:
        node = path[-1]
        drawn = [tokens[child] for child in children[node]]
        accepted, residual = _try_in_turn(drawn, target[node], draft[node], choose, replacement)
        if accepted is None:
            return Verdict(torch.tensor(path), choose(residual))
        path.append(children[node][accepted])


def block(tree: DraftTree, target: Tensor, draft: Tensor, choose: Choose) -> Verdict:
    """Judge a sampled chain as a whole, keeping the longest prefix that passes (Sun et al. 2024)."""
    size = len(tree)
    assert tree.parents.tolist() == list(range(-1, size - 1)), "block verification takes a chain"
    p, q = _normalise(target), _normalise(draft)  # [N, V]
    reach = [1.0]
    for node, token in enumerate(tree.tokens.tolist()[1:]):
        reach.append(_reach(reach[node], p[node, token], q[node, token]))

    last = size - 1
    if _accepts(choose, reach[last]):
        return Verdict(torch.arange(size), choose(p[last]))
    for node in range(last - 1, -1, -1):  # the trials are independent, so the longest that passes may be tried first
        residual, passing = _leftover(p[node], q[node], reach[node])
        if _accepts(choose, passing):
            return Verdict(torch.arange(node + 1), choose(residual))
    raise AssertionError("the root always passes")


def traversal(tree: DraftTree, target: Tensor, draft: Tensor, choose: Choose) -> Verdict:
    """Judge a tree sampled without replacement from its leaves up, whole paths at a time (Weng et al. 2025)."""
    children, parents, tokens = _children(tree), tree.parents.tolist(), tree.tokens.tolist()
    p, q = list(_normalise(target)), list(_normalise(draft))  # [V] a node; both change as children are refused
    changed = {0: 1.0}  # the reach of nodes that have lost a child, and of the root

    def reach(node: int) -> float:
        if node in changed:
            return changed[node]
        parent, token = parents[node], tokens[node]
        return _reach(reach(parent), p[parent][token], q[parent][token])

    while True:
        leaf = 0
        while children[leaf]:
            leaf = children[leaf][0]
        if _accepts(choose, reach(leaf)):
            return Verdict(torch.tensor(tree.path(leaf)), choose(p[leaf]))
        parent = parents[leaf]
        p[parent], passing = _leftover(p[parent], q[parent], reach(parent))
        changed[parent] = passing if parent else 1.0
        q[parent] = _without(q[parent], tokens[leaf])
        children[parent] = children[parent][1:] if q[parent].any() else []


def _try_in_turn(
    drawn: list[int], target: Tensor, draft: Tensor, choose: Choose, replacement: bool
) -> tuple[int | None, Tensor]:
    """The place of the first of these tokens that is accepted, and the distribution of the next token if none is."""
    residual, q = _normalise(target), _normalise(draft)  # [V]
    for place, token in enumerate(drawn):
        if _accepts(choose, _reach(1.0, residual[token], q[token])):
            return place, residual
        residual, _ = _leftover(residual, q, 1.0)
        if not replacement:
            q = _without(q, token)
        if not q.any():
            break
    return None, residual


def _children(tree: DraftTree) -> list[list[int]]:
    """Each node's children in the order in which they were drawn."""
    children: list[list[int]] = [[] for _ in range(len(tree))]
    for node, parent in enumerate(tree.parents.tolist()[1:], start=1):
        children[parent].append(node)
    return children


def _reach(before: float, p: Tensor, q: Tensor) -> float:
    """How likely a path of reach `before` may be extended by a token of these target and draft probabilities."""
    assert q > 0, "a sampled child must have draft probability"
    return min(1.0, before * float(p) / float(q))


def _leftover(p: Tensor, q: Tensor, reach: float) -> tuple[Tensor, float]:
    """What drafting has not covered of `p` [V], normalised, and the chance to stop here once the child was refused."""
    rest = (reach * p - q).clamp(min=0)
    mass = float(rest.sum())
    passing = mass / (mass + 1 - reach) if mass > 0 or reach < 1 else 1.0
    return (rest / mass if mass > TINY else p), passing


def _without(q: Tensor, token: int) -> Tensor:
    """`q` [V] with this token ruled out, normalised; all zero if nothing is left."""
    rest = q.clone()
    rest[token] = 0
    return rest / rest.sum() if rest.any() else rest


def _normalise(probabilities: Tensor) -> Tensor:
    exact = probabilities.double()
    return exact / exact.sum(-1, keepdim=True)


def _accepts(choose: Choose, probability: float) -> bool:
    """A coin of this probability; certain outcomes ask for no randomness."""
    if probability <= 0 or probability >= 1:
        return probability >= 1
    return choose(torch.tensor([1 - probability, probability], dtype=torch.float64)) == 1
