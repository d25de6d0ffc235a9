"""The end of a cycle: the walk down the verified tree, where its rows go, and the root of the next tree."""

from __future__ import annotations

import torch
from torch import Tensor

from windfall.kernels.backend import on_triton
from windfall.kernels.trees import NOBODY, TreeArrays


def settle(
    draws: Tensor,  # [n] long: the target's token after each row
    rows_tokens: Tensor,  # [≥ n] long
    rows_parents: Tensor,  # [≥ n] long
    rows_mask: Tensor,  # [n, n] bool
    rows_count: Tensor,  # [1] long: the rows from here on are padding
    length: Tensor,  # [1] long, written as are all that follow: committed rows of the target
    path: Tensor,  # [≥ n] long: the accepted rows, NOBODY behind them
    accepted: Tensor,  # [1] long: how many
    bonus: Tensor,  # [1] long: the token after them
    source: Tensor,  # [P] long: where the accepted rows are in the cache
    goal: Tensor,  # [P] long: where they belong
    pending: Tensor | None,  # [P] long: the accepted tokens and the bonus, for the drafter to take in, 0 behind them
    waiting: Tensor | None,  # [1] long: how many
    tree: TreeArrays,  # becomes a root alone, which is the bonus
    expanded: Tensor | None,  # [S] long: becomes NOBODY
    staged: Tensor | None,  # [1] long: becomes 0
    figures: Tensor,  # [4] long: places in the tree, rows, accepted rows, bonus
) -> None:
    """Follow the draws, say what moves where, and plant the next tree."""
    if on_triton(draws):
        from windfall.kernels.triton.settle import settle as run
    else:
        run = reference
    rows = (draws, rows_tokens, rows_parents, rows_mask, rows_count, length)
    walked = (path, accepted, bonus, source, goal)
    run(*rows, *walked, pending, waiting, tree, expanded, staged, figures)


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
    waiting: Tensor | None,
    tree: TreeArrays,
    expanded: Tensor | None,
    staged: Tensor | None,
    figures: Tensor,
) -> None:
    size, steps, device = len(draws), len(source), draws.device
    walked, count, token = _walk(draws, rows_tokens[:size], rows_parents[:size], rows_mask, rows_count)
    path.fill_(NOBODY)
    path[:size] = walked
    accepted.copy_(count)
    bonus.copy_(token)
    figures.copy_(torch.cat([tree.count, rows_count, accepted, bonus]))
    far = torch.full((max(steps, 0 if pending is None else len(pending)) + 1,), NOBODY, device=device)
    steps_taken = torch.cat([path, far])
    goal.copy_(length + torch.arange(steps, device=device))
    source.copy_(torch.where(steps_taken[:steps] < 0, goal, length + steps_taken[:steps]))
    length.add_(accepted)
    if pending is not None:
        following = steps_taken[1 : len(pending) + 1]
        places = torch.arange(len(pending), device=device)
        tokens = torch.where(following < 0, 0, rows_tokens[following.clamp(min=0)])
        pending.copy_(torch.where(places == accepted - 1, bonus, tokens))
    for given, value in ((waiting, accepted), (expanded, NOBODY), (staged, 0)):
        if given is not None:
            given.copy_(torch.as_tensor(value, device=device))
    plant(tree, bonus)


def _walk(draws: Tensor, tokens: Tensor, parents: Tensor, mask: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Accepted rows ascending, NOBODY behind them [n]; how many [1]; the token after the last [1].

    A row is accepted if each row on its path, the root aside, is what was drawn after its parent.
    """
    nodes = torch.arange(len(draws), device=draws.device)
    drawn = (tokens == draws[parents.clamp(min=0)]) | (nodes == 0)
    accepted = (drawn | ~mask).all(1)
    accepted &= (nodes < count) | (nodes == 0)
    order = torch.where(accepted, nodes, len(nodes)).sort().values
    path = torch.where(order < len(nodes), order, NOBODY)
    return path, accepted.sum().reshape(1), draws[torch.where(accepted, nodes, 0).amax().reshape(1)]


def plant(tree: TreeArrays, token: Tensor) -> None:
    """A tree of its root alone."""
    tree.tokens[:1] = token
    tree.parents[:1] = NOBODY
    for zero in (tree.depth, tree.rank, tree.logq, tree.score, tree.key, tree.slot):
        zero[:1] = 0
    tree.chance[:1] = 1
    tree.taken[:1] = True
    tree.line[0] = NOBODY
    tree.line[0, :1] = 0
    tree.count.fill_(1)
