"""The end of a cycle: find the accepted path, plan its move in the KV cache, and reset the tree to its new root."""

from __future__ import annotations

import torch
from torch import Tensor

from windfall.kernels.backend import on_triton
from windfall.kernels.trees import NO_NODE, TreeArrays


def accept_path(
    draws: Tensor,  # [n] long: the target's token after each row
    rows_tokens: Tensor,  # [≥ n] long
    rows_parents: Tensor,  # [≥ n] long
    rows_mask: Tensor,  # [n, n] bool
    rows_count: Tensor,  # [1] long: rows from this index on are padding
    length: Tensor,  # [1] long, written, like all that follow: committed rows of the target
    path: Tensor,  # [≥ n] long: the accepted rows, then NO_NODE
    accepted: Tensor,  # [1] long: number of accepted rows
    bonus: Tensor,  # [1] long: the target's token after the last accepted row
    source: Tensor,  # [P] long: KV cache slots of the accepted rows
    goal: Tensor,  # [P] long: slots they move to
    pending: Tensor | None,  # [P] long: input of the drafter: accepted tokens, the bonus, then 0
    pending_count: Tensor | None,  # [1] long: number of these inputs
    tree: TreeArrays,  # becomes a tree of one node, the bonus
    expanded: Tensor | None,  # [S] long: becomes NO_NODE
    staged: Tensor | None,  # [1] long: becomes 0
    outcome: Tensor,  # [4] long: entries of the tree, rows, accepted rows, bonus
) -> None:
    """Accept the path that the draws follow, list the KV cache rows to move, and start the next tree from the bonus."""
    if on_triton(draws):
        from windfall.kernels.triton.accept import accept_path as run
    else:
        run = reference
    rows = (draws, rows_tokens, rows_parents, rows_mask, rows_count, length)
    walked = (path, accepted, bonus, source, goal)
    run(*rows, *walked, pending, pending_count, tree, expanded, staged, outcome)


def reference(
    draws: Tensor,
    rows_tokens: Tensor,
    rows_parents: Tensor,
    rows_mask: Tensor,
    rows_count: Tensor,
    length: Tensor,
    path: Tensor,
    accepted: Tensor,
    bonus: Tensor,
    source: Tensor,
    goal: Tensor,
    pending: Tensor | None,
    pending_count: Tensor | None,
    tree: TreeArrays,
    expanded: Tensor | None,
    staged: Tensor | None,
    outcome: Tensor,
) -> None:
    """`accept_path` with torch."""
    size, steps, device = len(draws), len(source), draws.device
    walked, count, token = _walk(draws, rows_tokens[:size], rows_parents[:size], rows_mask, rows_count)
    path.fill_(NO_NODE)
    path[:size] = walked
    accepted.copy_(count)
    bonus.copy_(token)
    outcome.copy_(torch.cat([tree.count, rows_count, accepted, bonus]))
    far = torch.full((max(steps, 0 if pending is None else len(pending)) + 1,), NO_NODE, device=device)
    steps_taken = torch.cat([path, far])
    goal.copy_(length + torch.arange(steps, device=device))
    source.copy_(torch.where(steps_taken[:steps] < 0, goal, length + steps_taken[:steps]))
    length.add_(accepted)
    if pending is not None:
        following = steps_taken[1 : len(pending) + 1]
        places = torch.arange(len(pending), device=device)
        tokens = torch.where(following < 0, 0, rows_tokens[following.clamp(min=0)])
        pending.copy_(torch.where(places == accepted - 1, bonus, tokens))
    for given, value in ((pending_count, accepted), (expanded, NO_NODE), (staged, 0)):
        if given is not None:
            given.copy_(torch.as_tensor(value, device=device))
    reset_to_root(tree, bonus)


def _walk(draws: Tensor, tokens: Tensor, parents: Tensor, mask: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Accepted rows in ascending order, then NO_NODE [n]; their number [1]; the token after the last [1].

    A row is accepted if every row on its path, except the root, holds the token that was drawn after its parent.
    """
    nodes = torch.arange(len(draws), device=draws.device)
    drawn = (tokens == draws[parents.clamp(min=0)]) | (nodes == 0)
    accepted = (drawn | ~mask).all(1)
    accepted &= (nodes < count) | (nodes == 0)
    order = torch.where(accepted, nodes, len(nodes)).sort().values
    path = torch.where(order < len(nodes), order, NO_NODE)
    return path, accepted.sum().reshape(1), draws[torch.where(accepted, nodes, 0).amax().reshape(1)]


def reset_to_root(tree: TreeArrays, token: Tensor) -> None:
    """Make the tree a single node, its root, with this token."""
    tree.tokens[:1] = token
    tree.parents[:1] = NO_NODE
    for zero in (tree.depth, tree.rank, tree.logq, tree.score, tree.key, tree.slot):
        zero[:1] = 0
    tree.chance[:1] = 1
    tree.taken[:1] = True
    tree.ancestors[0] = NO_NODE
    tree.ancestors[0, :1] = 0
    tree.count.fill_(1)
