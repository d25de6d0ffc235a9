"""Checks of the kernels for the trees of several requests, against loops over single nodes."""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

import torch
from torch import Tensor

from helpers.interpreter import INTERPRETED
from helpers.tree_kernels import SELECTIVE, copied, drafted_children, empty_next_pass, empty_tree, same
from windfall.kernels import batch as batching
from windfall.kernels import grow as growing
from windfall.kernels.accept import reset_to_root
from windfall.kernels.batch import (
    accept_rows,
    append_to_pages,
    choose_rows,
    describe_rows,
    root_rows,
    sample_trees,
)
from windfall.kernels.batch_rows import BatchRows, Described, Outcome, Sampled
from windfall.kernels.draw import draw
from windfall.kernels.draw import reference as draw_reference
from windfall.kernels.grow import grow
from windfall.kernels.move import move
from windfall.kernels.pages import PAGE_TOKENS, max_tiles
from windfall.kernels.rules import RULES, Rule
from windfall.kernels.top import LazyLogits, top_children
from windfall.kernels.top import reference as top_reference
from windfall.kernels.trees import Calibration, NextPass, TreeArrays, pass_of, tree_of

STAGING = 5000  # the first slot of a verify pass
JUNK = 7_000_000  # in entries that no kernel may use
BATCH_RULES: dict[str, Rule] = {
    **RULES,
    **SELECTIVE,
    "calibrated beam": Rule(calibrated=True),
    "bounded": Rule(whole=False, bounded=True),
    "floored": Rule(whole=True, floored=True),
}


def batch_rows(rows: int, requests: int, deepest: int, tile_rows: int, device: Any) -> BatchRows:
    """Buffers for a pass of this size; `deepest` is the largest depth of a node."""
    long = partial(torch.zeros, rows, dtype=torch.long, device=device)
    return BatchRows(
        tokens=long(),
        owners=torch.zeros(rows, dtype=torch.int32, device=device),
        nodes=long(),
        parents=long(),
        depth=long(),
        positions=long(),
        slots=long(),
        reach=long(),
        lineage=torch.zeros(rows, deepest + 1, dtype=torch.int32, device=device),
        starts=torch.zeros(requests + 1, dtype=torch.long, device=device),
        tiles=torch.zeros(max_tiles(rows, requests + 1, tile_rows) + 1, dtype=torch.int32, device=device),
    )


def stacked(arrays: list[Any]) -> Any:
    """Arrays of a batch, from those of its requests; numbers have no dimension of their own."""
    merged = []
    for each in zip(*arrays, strict=True):
        if each[0] is None:
            merged.append(None)
        else:
            merged.append(torch.cat(each) if each[0].numel() == 1 and each[0].dim() == 1 else torch.stack(each))
    return arrays[0]._make(merged)


def random_trees(sizes: list[int], capacity: int, deepest: int, seed: int, tied: bool, device: str) -> TreeArrays:
    """Trees with these numbers of entries, some of which are empty."""
    chance = random.Random(seed)
    trees = []
    for size in sizes:
        tokens, parents, depth, keys = [chance.randrange(5)], [-1], [0], [0.0]
        lines = [[0] + [-1] * deepest]
        able = [0]  # entries that may have children
        for node in range(1, size):
            parent = chance.choice(able)
            loss = chance.choice([0.0, 0.5, 1.0]) if tied else chance.expovariate(1)
            empty = chance.random() < 0.15
            tokens.append(chance.randrange(5))
            parents.append(parent)
            depth.append(depth[parent] + 1)
            keys.append(-math.inf if empty else keys[parent] - loss)
            lines.append([node if level == depth[node] else above for level, above in enumerate(lines[parent])])
            if not empty and depth[node] < deepest:
                able.append(node)
        tree = empty_tree(capacity, deepest, "cpu")
        for array, values in (
            (tree.tokens, tokens),
            (tree.parents, parents),
            (tree.depth, depth),
            (tree.key, keys),
            (tree.ancestors, lines),
        ):
            array[:size] = torch.tensor(values)
        tree.count.fill_(size)
        trees.append(tree)
    made: TreeArrays = stacked(trees)
    return made._make(x.to(device) for x in made)


def chosen_nodes(trees: TreeArrays, live: int, limits: list[int], floor: float, size: int) -> list[tuple[int, int]]:
    """Request and node of each row, in their order."""
    keys, counts, candidates = trees.key.tolist(), trees.count.tolist(), []
    for request in range(live):
        able = [node for node in range(1, counts[request]) if keys[request][node] >= max(floor, -1e30)]
        able.sort(key=lambda node: (-keys[request][node], node))
        candidates += [(-keys[request][node], request, node) for node in able[: limits[request] - 1]]
    best = sorted(candidates)[: size - live]
    return sorted([(request, 0) for request in range(live)] + [each[1:] for each in best])


def filled_rows(size: int, requests: int, deepest: int, tile_rows: int, device: str) -> BatchRows:
    rows = batch_rows(size, requests, deepest, tile_rows, torch.device(device))
    for array in rows:
        array.fill_(JUNK)
    return rows


def check_rows_of_trees(
    sizes: list[int],
    live: int,
    rows: int,
    limits: list[int],
    deepest: int,
    seed: int,
    tied: bool = False,
    floor: float = -math.inf,
    tile_rows: int = 3,
    device: str = "cpu",
) -> None:
    """Choose the rows of a pass, and then accept paths, several times."""
    requests, capacity = len(sizes), max(sizes) + 3
    trees = random_trees(sizes, capacity, deepest, seed, tied, device)
    chance = torch.Generator().manual_seed(seed)
    lengths = torch.randint(300, (requests,), generator=chance).to(device)
    made, twins = (filled_rows(rows, requests, deepest, tile_rows, device) for _ in range(2))
    numbers = torch.tensor([live], device=device), torch.tensor(limits, device=device)
    given = (trees, *numbers, torch.tensor([floor], device=device), lengths, STAGING, tile_rows)
    choose_rows(*given, made)
    batching.choose_reference(*given, twins)
    for name, one, other in zip(made._fields, made, twins, strict=True):
        assert torch.equal(one, other), name
    check_choice(trees, made, chosen_nodes(trees, live, limits, floor, rows), lengths.tolist(), live, tile_rows)
    for steps in (deepest + 1, 1 + seed % 3):
        check_acceptance(trees, made, numbers[0], lengths, steps, chance, steps > 3)


def check_choice(
    trees: TreeArrays, rows: BatchRows, wanted: list[tuple[int, int]], lengths: list[int], live: int, tile_rows: int
) -> None:
    size, total, requests = len(rows.tokens), len(wanted), len(lengths)
    row_of = {each: row for row, each in enumerate(wanted)}
    pad = [0] * (size - total)
    names, above, levels = (x.tolist() for x in (trees.tokens, trees.parents, trees.depth))
    depth = [levels[request][node] for request, node in wanted]
    parents = [row_of.get((request, above[request][node]), row_of[request, node]) for request, node in wanted]
    positions = [lengths[request] + deep for (request, _), deep in zip(wanted, depth, strict=True)]
    assert rows.nodes.tolist() == [node for _, node in wanted] + [-1] * len(pad)
    assert rows.tokens.tolist() == [names[request][node] for request, node in wanted] + pad
    assert rows.parents.tolist() == parents + list(range(total, size))
    assert rows.depth.tolist() == depth + pad and rows.positions.tolist() == positions + pad
    assert rows.reach.tolist() == [position + 1 for position in positions] + pad
    assert rows.slots.tolist() == list(range(STAGING, STAGING + size))
    lines = rows.lineage.tolist()
    for row, (request, node) in enumerate(wanted):
        path = [node]
        while path[0]:
            path.insert(0, above[request][path[0]])
        line = [STAGING + row_of[request, each] for each in path]
        assert lines[row] == line + [0] * (len(lines[row]) - len(line))
    assert (rows.lineage[total:] == JUNK).all()
    owners = [request for request, _ in wanted]
    assert rows.owners.tolist() == owners + pad
    counts = [owners.count(request) for request in range(requests)]
    assert rows.starts.tolist() == [sum(counts[:request]) for request in range(requests + 1)]
    tiles, first = [], 0
    for count in (*counts, size - total):
        tiles += range(first, first + count, tile_rows)
        first += count
    assert rows.tiles.tolist() == tiles + [size] * (len(rows.tiles) - len(tiles))
    assert min(counts[:live]) > 0 and not any(counts[live:])


def check_acceptance(
    trees: TreeArrays,
    rows: BatchRows,
    live: Tensor,
    lengths: Tensor,
    steps: int,
    chance: torch.Generator,
    drafter: bool,
) -> None:
    """Against walks from node to node."""
    requests, device, size = len(lengths), lengths.device, len(rows.tokens)
    draws = torch.randint(5, (size,), generator=chance).to(device)
    pages = torch.randperm(requests * 12, generator=chance).view(requests, 12).int().to(device)
    starts, used = rows.starts.tolist(), int(live)

    def arrays() -> tuple[Tensor, Outcome, TreeArrays, Tensor | None, Tensor | None]:
        cells = [torch.full((requests, steps), JUNK, device=device) for _ in range(4)]
        outcome = Outcome(torch.full((requests,), JUNK, device=device), *cells)
        expanded = torch.full((requests, 7), JUNK, device=device) if drafter else None
        staged = torch.full((requests,), 4, device=device) if drafter else None
        return lengths.clone(), outcome, copied(trees), expanded, staged

    now, outcome, after, expanded, staged = made = arrays()
    accept_rows(draws, rows, live, now, pages, outcome, after, expanded, staged)
    if device.type == "cuda" or INTERPRETED:
        then, *rest = twins = arrays()
        batching.accept_reference(draws, rows, live, then, pages, *rest)
        for one, other in zip(flat(made), flat(twins), strict=True):
            assert torch.equal(one, other)
    nodes, owners = rows.nodes.tolist(), rows.owners.tolist()
    row_of = {(owners[row], nodes[row]): row for row in range(size) if nodes[row] >= 0}
    before, drawn, tables = lengths.tolist(), draws.tolist(), pages.tolist()
    names, above, end = trees.tokens.tolist(), trees.parents.tolist(), now.tolist()
    for request in range(requests):
        own, path = nodes[starts[request] : starts[request + 1]], [0]
        while request < used and len(path) < steps:
            token = drawn[row_of[request, path[-1]]]
            children = [node for node in own if above[request][node] == path[-1] and names[request][node] == token]
            if not children:
                break
            path.append(min(children))
        found = [x[request].tolist() for x in outcome]
        if request >= used:
            assert found == [0, [0] * steps, [-1] * steps, [0] * steps, [0] * steps]
            assert end[request] == before[request]
            check_reset(after, request, 0, expanded, staged)
            continue
        walked, spare = [row_of[request, node] for node in path], [0] * (steps - len(path))
        tokens = [drawn[row] for row in walked]
        places = range(before[request], before[request] + len(path))
        goals = [tables[request][place // PAGE_TOKENS] * PAGE_TOKENS + place % PAGE_TOKENS for place in places]
        assert found[:2] == [len(path), tokens + spare] and found[2] == walked + [-1] * len(spare)
        assert found[3:] == [[STAGING + row for row in walked] + spare, goals + spare]
        assert walked[0] == starts[request] and end[request] == before[request] + len(path)
        check_reset(after, request, tokens[-1], expanded, staged)


def check_reset(trees: TreeArrays, request: int, token: int, expanded: Tensor | None, staged: Tensor | None) -> None:
    """The tree is a root with this token, and no row is staged."""
    line = [0] + [-1] * (trees.ancestors.shape[2] - 1)
    root = [x[0].tolist() for x in tree_of(trees, request)]
    assert root == [token, -1, 0, 0, 0.0, 0.0, 0.0, 1.0, True, line, 0, 1]
    if expanded is not None and staged is not None:
        assert (expanded[request] == -1).all() and staged[request] == 0


def flat(arrays: Any) -> list[Tensor]:
    """All arrays of a nested structure."""
    if arrays is None:
        return []
    return [arrays] if isinstance(arrays, Tensor) else [each for part in arrays for each in flat(part)]


def check_descriptions(requests: int, capacity: int, size: int, device: str = "cpu") -> None:
    """Rows and whole trees as the host reads them."""
    chance = torch.Generator().manual_seed(size)
    trees, _ = begin_trees(requests, capacity, 2, 2, False, device)
    for name in ("parents", "depth", "rank", "logq", "score", "key"):
        array = getattr(trees, name)
        array.copy_(torch.randint(90, array.shape, generator=chance).to(array))
    trees.count.copy_(torch.randint(1, capacity + 1, trees.count.shape, generator=chance))
    rows = batch_rows(size, requests, 3, 5, device)
    rows.nodes.copy_(torch.randint(-1, capacity, (size,), generator=chance))
    rows.owners.copy_(torch.randint(requests, (size,), generator=chance))
    found = Described(rows.nodes * 0, *(torch.zeros(size, device=device) for _ in range(2)))
    describe_rows(trees, rows, found)
    owners, nodes = rows.owners.long(), rows.nodes.clamp(min=0)
    for name in Described._fields:
        assert torch.equal(getattr(found, name), getattr(trees, name)[owners, nodes])
    turn, live, some = torch.tensor([3], device=device), torch.tensor([max(requests - 1, 1)], device=device), 3
    kinds = (torch.int16, torch.int16, torch.int16, torch.bool, torch.float32, torch.float32)
    sampled = Sampled(turn.new_zeros(some), *(torch.zeros(some, capacity, dtype=d, device=device) for d in kinds))
    for start in (3, 6):
        sample_trees(trees, live, turn, sampled)
        assert int(turn) == start + some
        for place in range(some):
            request = (start + place) % int(live)
            count = int(trees.count[request])
            assert int(sampled.count[place]) == count
            for name in Sampled._fields[1:]:
                one, other = getattr(sampled, name)[place, :count], getattr(trees, name)[request, :count]
                assert torch.equal(one, other.to(one.dtype))


def check_roots(requests: int, used: int, device: str = "cpu") -> None:
    """One row for each request, in its pages."""
    chance = torch.Generator().manual_seed(requests)
    trees, _ = begin_trees(requests, 9, 2, 2, False, device)
    trees.tokens.copy_(torch.randint(90, trees.tokens.shape, generator=chance))
    lengths = torch.randint(300, (requests,), generator=chance).to(device)
    tables = torch.randperm(requests * 5, generator=chance).view(requests, 5).int().to(device)
    rows, twin = (batch_rows(requests, requests, 3, 5, device) for _ in range(2))
    given = trees, torch.tensor([used], device=device), lengths, tables
    root_rows(*given, rows)
    batching.root_reference(*given, twin)
    assert all(map(torch.equal, rows, twin))
    for request in range(used):
        length, token = int(lengths[request]), int(trees.tokens[request, 0])
        slot = int(tables[request, length // PAGE_TOKENS]) * PAGE_TOKENS + length % PAGE_TOKENS
        found = [int(x[request]) for x in rows[:8]]
        assert found == [token, request, 0, request, 0, length, slot, length + 1]
    assert not rows.reach[used:].any() and rows.starts.tolist() == [min(row, used) for row in range(requests + 1)]
    assert rows.tiles[: requests + 1].tolist() == list(range(requests + 1))


def check_appending(requests: int, rows: int, device: str = "cpu") -> None:
    chance = torch.Generator().manual_seed(rows)
    lengths = torch.randint(400, (requests,), generator=chance)
    counts = torch.randint(rows + 1, (requests,), generator=chance)
    pages = -(-(400 + rows) // PAGE_TOKENS)
    tables = (1 + torch.randperm(requests * pages, generator=chance)).view(requests, pages).int()
    lengths[-1] = pages * PAGE_TOKENS - counts[-1]  # its padding is beyond the last page
    now = lengths.to(device, copy=True)
    found = append_to_pages(now, counts.to(device), tables.to(device), rows)
    positions, slots, reach, last = (x.tolist() for x in found)
    assert torch.equal(now.cpu(), lengths + counts)
    for request in range(requests):
        count = int(counts[request])
        for row in range(rows):
            cell, place = request * rows + row, int(lengths[request]) + row
            page = int(tables[request, place // PAGE_TOKENS]) if row < count else 0
            assert positions[cell] == place and slots[cell] == page * PAGE_TOKENS + place % PAGE_TOKENS
            assert reach[cell] == (place + 1 if row < count else 0)
        assert not count or last[request] == request * rows + count - 1


def begin_trees(
    requests: int, capacity: int, width: int, passes: int, masked: bool, device: str
) -> tuple[TreeArrays, NextPass]:
    """Trees of one node each, and the rows of their first pass: the root, then nothing."""
    deepest, trees, rows = passes + 1, [], []
    for request in range(requests):
        tree, next_pass = empty_tree(capacity, deepest, device), empty_next_pass(width, width * passes, device)
        reset_to_root(tree, torch.tensor([3 + request], device=device))
        next_pass.nodes.fill_(-1)
        next_pass.nodes[0] = 0
        lineage = torch.full((width, deepest), JUNK, dtype=torch.int32, device=device)
        base = torch.tensor([STAGING + 100 * request], device=device)
        length = next_pass.length + 10 * request
        mask = next_pass.mask if masked else None
        rows.append(next_pass._replace(lineage=lineage, length=length, base=base, mask=mask))
        trees.append(tree)
    return stacked(trees), stacked(rows)


def check_batch_growth(
    name: str,
    requests: int,
    width: int,
    k: int,
    calibration: Calibration | None = None,
    shape: Tensor | None = None,
    masked: bool = True,
    tied: bool = False,
    passes: int = 4,
    device: str = "cpu",
) -> None:
    """Grow trees pass by pass: at once, with torch, and each alone."""
    rule, capacity = BATCH_RULES[name], 1 + k * width * (passes + 1)
    trees, rows = begin_trees(requests, capacity, width, passes, masked, device)
    bounds = torch.tensor([-9.0, 3.0, -4.0], device=device) if rule.bounded else None
    floor = torch.tensor([-6.0], device=device) if rule.floored else None
    for turn in range(passes + 1):  # the last does not fit
        drawn = [drafted_children(width, k, 100 * turn + request, tied) for request in range(requests)]
        tokens, logq = (torch.stack(x).to(device) for x in zip(*drawn, strict=True))
        twin, rows_twin = copied(trees), copied(rows)
        rest = (rule, calibration, shape, bounds, floor)
        alone = []
        for request in range(0 if INTERPRETED else requests):  # it takes long there
            own = calibration
            if calibration is not None and calibration.weights.dim() == 2:
                own = Calibration(*(x[request] for x in calibration))
            tree, next_pass = copied(tree_of(trees, request)), copied(pass_of(rows, request))
            grow(tree, next_pass.nodes, tokens[request], logq[request], next_pass, rule, own, *rest[2:])
            alone.append((tree, next_pass))
        growing.reference(twin, rows_twin.nodes.clone(), tokens, logq, rows_twin, *rest)
        grow(trees, rows.nodes, tokens, logq, rows, *rest)  # the kernel writes where it reads
        for request in range(requests):
            same(tree_of(trees, request), tree_of(twin, request), int(trees.count[request]))
            same(pass_of(rows, request), pass_of(rows_twin, request), 0)
            if turn < passes:
                check_lineage(tree_of(trees, request), pass_of(rows, request))
        for request, (tree, next_pass) in enumerate(alone):
            same(tree_of(trees, request), tree, int(tree.count))
            same(pass_of(rows, request), next_pass, 0)


def check_lineage(tree: TreeArrays, rows: NextPass) -> None:
    """The staged row of each ancestor, from its node."""
    assert rows.lineage is not None
    staged, base = rows.expanded.tolist(), int(rows.base)
    for node, line in zip(rows.nodes.tolist(), rows.lineage.tolist(), strict=True):
        path: list[int] = []
        while node > 0:
            path.insert(0, base + staged.index(node))
            node = int(tree.parents[node])
        assert line == path + [0] * (len(line) - len(path))


def check_draws_of_requests(n: int, vocabulary: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Each row has the draw and the children that it has alone; its request's temperature may be 0."""
    torch.manual_seed(n)
    logits = (torch.randn(n, vocabulary, device=device) * 3).to(dtype)
    positions, owners = torch.arange(n, device=device) * 5, torch.randint(4, (n,), device=device).int()
    owners[: min(n, 4)] = torch.arange(min(n, 4), device=device).int()
    seed = torch.tensor([5, -7, 2**60, 0], device=device)
    heat, kappa = (torch.tensor(x, device=device) for x in ([0.7, 0.0, 1.0, 0.0], [1.2, 0.9, 1.0, 3.0]))
    tokens = torch.randperm(2 * vocabulary, device=device)[:vocabulary].sort().values
    found = draw(logits, positions, seed, heat, offset=2, owners=owners)
    values, names = top_children(logits, 3, positions, seed, heat, kappa, tokens, 2, owners=owners)
    for row, owner in enumerate(owners.tolist()):
        one, its = slice(row, row + 1), slice(owner, owner + 1)
        assert found[row] == draw(logits[one], positions[one], seed[its], heat[its], offset=2)
        rest = (positions[one], seed[its], heat[its], kappa[its]) if heat[owner] else (None,) * 4
        alone = top_children(logits[one], 3, *rest, tokens, 2)
        assert torch.equal(values[one], alone[0]) and torch.equal(names[one], alone[1])
    wanted = draw_reference(logits, positions, seed, heat, offset=2, owners=owners)
    assert torch.equal(found, wanted)
    other = top_reference(logits, 3, positions, seed, heat, kappa, tokens, 2, owners=owners)
    torch.testing.assert_close(values, other[0], atol=1e-5, rtol=0)
    lazy = LazyLogits(torch.randn(n, 64, device=device).to(dtype), torch.randn(vocabulary, 64, device=device).to(dtype))
    given = (positions, seed, heat, kappa, tokens, 2)
    one, two = (top_children(x, 3, *given, owners=owners) for x in (lazy, lazy.logits))
    assert all(map(torch.equal, one, two))


def check_disjoint_moves(heads: int, moves: int, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Staged rows move to pages in any order; where source and goal are equal, nothing moves."""
    torch.manual_seed(moves)
    kv = torch.randn(heads, 3 * moves, width, device=device).to(dtype)
    source = 2 * moves + torch.randperm(moves, device=device)
    goal = 1 + torch.randperm(2 * moves - 1, device=device)[:moves]
    idle = torch.rand(moves, device=device) < 0.6
    source, goal = (torch.where(idle, 0, x) for x in (source, goal))
    wanted = kv.clone()
    for old, new in zip(source.tolist(), goal.tolist(), strict=True):
        wanted[:, new] = kv[:, old]
    states, kept = (torch.randn(moves + 2, 40, device=device).to(dtype) for _ in range(2))
    path = torch.where(idle, -1, torch.randint(moves, (moves,), device=device))
    ordered = kv.clone()
    move(ordered, source, goal)
    move(kv, source, goal, states, path, kept, disjoint=True)
    assert torch.equal(kv, wanted) and torch.equal(ordered, wanted)
    assert torch.equal(kept[:moves], states[path.clamp(min=0)])
