"""The trees of several requests in one verify pass: choose its rows, follow the target's draws, append to the drafter.

Requests have numbers from 0 on, without gaps. Arrays of a tree have one more dimension than in `TreeArrays`, the
request, and so have the outputs: [R, …]. Requests from `live` on are not in use.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from windfall.kernels.accept import reset_to_root
from windfall.kernels.backend import on_triton
from windfall.kernels.batch_rows import Appended, BatchRows, Described, Outcome, Sampled
from windfall.kernels.pages import PAGE_TOKENS, UNUSED_PAGE, Pages, tiles_of
from windfall.kernels.trees import NO_NODE, TreeArrays, tree_of


def choose_rows(
    trees: TreeArrays,
    live: Tensor,  # [1] long: requests in use
    limits: Tensor,  # [R] long: the largest number of rows of each request, at least 1
    floor: Tensor,  # [1] fp32: nodes with lower keys are not chosen, except for roots
    lengths: Tensor,  # [R] long: committed tokens of each text, the root not included
    staging: int,  # the slot of the first row
    tile_rows: int,  # rows of an attention tile
    rows: BatchRows,  # written
) -> None:
    """Choose the root of every request, and then the nodes with the highest keys of all requests, as far as they fit.

    Ties go to the lower request, then to the lower node. A node's key is never above its parent's, and its index never
    below, so that the ancestors of a chosen node are chosen too. All requests in use must fit with their roots.
    """
    if on_triton(trees.key):
        from windfall.kernels.triton.batch import choose_rows as compiled

        compiled(trees, live, limits, floor, lengths, staging, tile_rows, rows)
        return
    choose_reference(trees, live, limits, floor, lengths, staging, tile_rows, rows)


def choose_reference(
    trees: TreeArrays,
    live: Tensor,
    limits: Tensor,
    floor: Tensor,
    lengths: Tensor,
    staging: int,
    tile_rows: int,
    rows: BatchRows,
) -> None:
    """`choose_rows` with torch. It reads sizes on the host."""
    count, size, device = int(live), len(rows.tokens), trees.key.device
    requests, capacity = trees.key.shape
    place = torch.arange(capacity, device=device)
    keys = torch.where(place < trees.count.view(-1, 1), trees.key, -math.inf)
    keys = torch.where(keys >= floor, keys, -math.inf)[:count]
    keys[:, 0] = math.inf
    order = keys.sort(dim=1, descending=True, stable=True).indices
    rank = torch.zeros_like(order).scatter_(1, order, place.expand(count, -1))  # among the nodes of its request
    keys = torch.where(rank < limits[:count, None], keys, -math.inf).flatten()
    best = keys.sort(descending=True, stable=True).indices[:size]
    chosen = best[keys[best] > -math.inf].sort().values
    owner, node, total = chosen // capacity, chosen % capacity, len(chosen)
    row_of = torch.zeros(requests * capacity, dtype=torch.long, device=device)
    row_of[chosen] = torch.arange(total, device=device)
    for name in ("tokens", "owners", "depth", "reach", "positions"):
        getattr(rows, name).zero_()
    rows.nodes.fill_(NO_NODE)
    rows.parents.copy_(torch.arange(size, device=device))
    rows.slots.copy_(staging + torch.arange(size, device=device))
    rows.tokens[:total], rows.owners[:total], rows.nodes[:total] = trees.tokens[owner, node], owner.int(), node
    rows.depth[:total] = depth = trees.depth[owner, node]
    above = trees.parents[owner, node]
    rows.parents[:total] = torch.where(above < 0, rows.parents[:total], row_of[owner * capacity + above.clamp(min=0)])
    rows.positions[:total] = lengths[owner] + depth
    rows.reach[:total] = rows.positions[:total] + 1
    ancestors = trees.ancestors[owner, node][:, : rows.lineage.shape[1]]
    lines = row_of[owner[:, None] * capacity + ancestors.clamp(min=0)]
    rows.lineage[:total] = torch.where(ancestors < 0, 0, staging + lines).int()
    firsts = torch.full((requests,), total, dtype=torch.long, device=device)
    firsts[:count] = row_of[torch.arange(count, device=device) * capacity]
    rows.starts.copy_(torch.cat([firsts, torch.tensor([total], device=device)]))
    padded = torch.where(rows.nodes < 0, requests, rows.owners.long())
    rows.tiles.copy_(tiles_of(padded, tile_rows, len(rows.tiles) - 1))


def describe_rows(trees: TreeArrays, rows: BatchRows, described: Described) -> None:
    """Look up the nodes of a pass in their trees, for the host. Writes `described`."""
    if on_triton(trees.key):
        from windfall.kernels.triton.batch import describe_rows as compiled

        compiled(trees, rows, described)
        return
    owners, nodes = rows.owners.long(), rows.nodes.clamp(min=0)
    for name in Described._fields:
        getattr(described, name).copy_(getattr(trees, name)[owners, nodes])


def sample_trees(trees: TreeArrays, live: Tensor, turn: Tensor, sampled: Sampled) -> None:
    """Copy the trees of S of the `live` requests, from number `turn` [1] on; then the turn is S higher."""
    if on_triton(trees.key):
        from windfall.kernels.triton.batch import sample_trees as compiled

        compiled(trees, live, turn, sampled)
        return
    requests = (turn + torch.arange(len(sampled.count), device=turn.device)) % live
    for name in Sampled._fields:
        getattr(sampled, name).copy_(getattr(trees, name)[requests])
    turn.add_(len(sampled.count))


def root_rows(trees: TreeArrays, live: Tensor, lengths: Tensor, tables: Tensor, rows: BatchRows) -> None:
    """One row for each request, its root, whose keys and values go straight into its pages. Writes `rows`.

    There are as many rows as requests; those from `live` on are padding. `lineage` is not written.
    """
    if on_triton(lengths):
        from windfall.kernels.triton.batch import root_rows as compiled

        compiled(trees, live, lengths, tables, rows)
        return
    root_reference(trees, live, lengths, tables, rows)


def root_reference(trees: TreeArrays, live: Tensor, lengths: Tensor, tables: Tensor, rows: BatchRows) -> None:
    """`root_rows` with torch."""
    count = len(rows.tokens)
    owners = torch.arange(count, device=lengths.device)
    real = owners < live
    pages = Pages(owners, lengths, tables)
    rows.tokens.copy_(torch.where(real, trees.tokens[:, 0], 0))
    rows.owners.copy_(torch.where(real, owners, 0))
    rows.nodes.copy_(torch.where(real, 0, NO_NODE))
    rows.parents.copy_(owners)
    rows.depth.zero_()
    rows.positions.copy_(torch.where(real, lengths, 0))
    unused = torch.full_like(lengths, UNUSED_PAGE * PAGE_TOKENS)
    rows.slots.copy_(torch.where(real, pages.slots(owners, lengths), unused))
    rows.reach.copy_((lengths + 1) * real)
    rows.starts.copy_(torch.arange(count + 1, device=lengths.device).clamp(max=live))
    rows.tiles.copy_(torch.arange(len(rows.tiles), device=lengths.device).clamp(max=count))


def accept_rows(
    draws: Tensor,  # [N] long: the target's token after each row
    rows: BatchRows,
    live: Tensor,  # [1] long
    lengths: Tensor,  # [R] long, written, like all that follow: committed tokens, increased by those accepted
    tables: Tensor,  # [R, pages] int32, only read
    outcome: Outcome,
    trees: TreeArrays,  # each becomes a tree of one node, the target's next token
    expanded: Tensor | None,  # [R, S] long: becomes NO_NODE
    staged: Tensor | None,  # [R] long: becomes 0
) -> None:
    """Accept the path of each tree that the draws follow, and start the next tree from the token after it.

    A path of more than P rows ends after P rows; then the next token is the draw after its last row. Trees, `expanded`
    and `staged` of requests that are not in use are reset, too, to a root with token 0.
    """
    if on_triton(draws):
        from windfall.kernels.triton.batch import accept_rows as compiled

        compiled(draws, rows, live, lengths, tables, outcome, trees, expanded, staged)
        return
    accept_reference(draws, rows, live, lengths, tables, outcome, trees, expanded, staged)


def accept_reference(
    draws: Tensor,
    rows: BatchRows,
    live: Tensor,
    lengths: Tensor,
    tables: Tensor,
    outcome: Outcome,
    trees: TreeArrays,
    expanded: Tensor | None,
    staged: Tensor | None,
) -> None:
    """`accept_rows` with torch. It reads sizes on the host."""
    starts = rows.starts.tolist()
    outcome.accepted.zero_()
    outcome.tokens.zero_()
    outcome.path.fill_(NO_NODE)
    outcome.source.zero_()
    outcome.goal.zero_()
    count = int(live)
    for request in range(len(outcome.tokens)):
        if request < count:
            path = _path(draws, rows, starts[request], starts[request + 1], outcome.tokens.shape[1])
            taken, length = len(path), int(lengths[request])
            outcome.accepted[request] = taken
            outcome.path[request, :taken] = path
            outcome.tokens[request, :taken] = draws[path]
            outcome.source[request, :taken] = rows.slots[path]
            places = length + torch.arange(taken, device=draws.device)
            outcome.goal[request, :taken] = slots_of(tables[request], places)
            lengths[request] = length + taken
        last = (outcome.accepted[request] - 1).clamp(min=0).reshape(1)
        reset_to_root(tree_of(trees, request), outcome.tokens[request, last])
    if expanded is not None:
        expanded.fill_(NO_NODE)
    if staged is not None:
        staged.zero_()


def _path(draws: Tensor, rows: BatchRows, start: int, end: int, most: int) -> Tensor:
    """The rows from `start` to `end` that the draws follow, at most this number."""
    path = [start]
    while len(path) < most:
        mine = slice(path[-1] + 1, end)
        following = (rows.parents[mine] == path[-1]) & (rows.tokens[mine] == draws[path[-1]])
        if not following.any():
            break
        path.append(mine.start + int(following.nonzero()[0, 0]))
    return torch.tensor(path, device=draws.device)


def slots_of(table: Tensor, positions: Tensor) -> Tensor:
    """The slots of these positions [n] of the text with this page table; positions after the last page lie in it."""
    pages = (positions // PAGE_TOKENS).clamp(max=len(table) - 1)
    return table[pages].long() * PAGE_TOKENS + positions % PAGE_TOKENS


def append_to_pages(lengths: Tensor, counts: Tensor, tables: Tensor, rows: int) -> Appended:
    """Append counts[r] ≤ P of P = `rows` rows to each text, and add `counts` to `lengths` in place."""
    if on_triton(lengths):
        from windfall.kernels.triton.batch import append_to_pages as compiled

        return compiled(lengths, counts, tables, rows)
    place = torch.arange(rows, device=lengths.device)
    positions = lengths[:, None] + place
    real = place < counts[:, None]
    pages = Pages(lengths, lengths, tables)
    owners = torch.arange(len(lengths), device=lengths.device)[:, None].expand_as(positions)
    slots = torch.where(real, pages.slots(owners, positions), UNUSED_PAGE * PAGE_TOKENS + positions % PAGE_TOKENS)
    lengths.add_(counts)
    last = torch.arange(len(lengths), device=lengths.device) * rows + (counts - 1).clamp(min=0)
    return Appended(positions.flatten(), slots.flatten(), ((positions + 1) * real).flatten(), last)
