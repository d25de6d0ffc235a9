"""Checks of the kernels that grow trees, choose rows and accept paths."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.interpreter import INTERPRETED
from windfall.core import verify
from windfall.core.tree import DraftTree
from windfall.costs.acceptance import Calibrator
from windfall.kernels import accept as accepting
from windfall.kernels import choose as choosing
from windfall.kernels import gate as gating
from windfall.kernels import grow as growing
from windfall.kernels.accept import accept_path, reset_to_root
from windfall.kernels.choose import choose
from windfall.kernels.gate import prune
from windfall.kernels.grow import grow
from windfall.kernels.move import move
from windfall.kernels.pair import pair_norm
from windfall.kernels.publish import SEQUENCE_BYTES, copy_to_host, publish
from windfall.kernels.rows import append_block, append_rows, embed, place_rows
from windfall.kernels.rules import RULES, Rule
from windfall.kernels.trees import Calibration, NextPass, TreeArrays
from windfall.policies.plan import Bounds
from windfall.policies.ranking import best_nodes
from windfall.policies.shape import Shape

rules = pytest.mark.parametrize("rule", ["beam", "best", "calibrated"])


LENGTH = 37  # committed columns of the drafter


SIDE = 324  # of masks whose first rows are used


def empty_tree(capacity: int, deepest: int, device: str) -> TreeArrays:
    """A tree whose entries hold values that no kernel may use."""
    long = [torch.full((capacity,), 7_000_000, device=device) for _ in range(5)]
    floats = [torch.full((capacity,), math.inf, device=device) for _ in range(4)]
    taken = torch.zeros(capacity, dtype=torch.bool, device=device)
    line = torch.full((capacity, deepest + 1), 7_000_000, device=device)
    return TreeArrays(*long[:4], *floats, taken, line, long[4], torch.zeros(1, dtype=torch.long, device=device))


def empty_next_pass(width: int, room: int, device: str) -> NextPass:
    long = [torch.full((width,), 7_000_000, device=device) for _ in range(6)]
    mask = torch.ones(width, room + 3, dtype=torch.bool, device=device)[:, :room]
    one = torch.zeros(1, dtype=torch.long, device=device)
    expanded = torch.full((room,), -1, device=device)
    length = one + LENGTH
    return NextPass(*long, mask, expanded, one, length, length, torch.zeros(40, 6, device=device))


def copied(arrays: Any) -> Any:
    """A copy of these arrays."""
    return arrays._make(None if x is None else x.clone() for x in arrays)


def make_calibration(calibrator: Calibrator, device: str) -> Calibration:
    forecast = [[calibrator.forecast(depth, chance).mean for chance in (0.3, 0.5, 0.9)] for depth in range(6)]
    given = (calibrator.weights.tolist(), forecast, [0.05, 0.02])
    return Calibration(*(torch.tensor(x, dtype=torch.float32, device=device) for x in given))


def make_calibrator(seed: int) -> Calibrator:
    calibrator = Calibrator()
    noise = torch.randn(len(calibrator.weights), generator=torch.Generator().manual_seed(seed)) * 0.3
    calibrator.weights += noise.float().double().numpy()
    calibrator.weights[:] = torch.tensor(calibrator.weights).float().double().numpy()  # as the device has them
    return calibrator


@dataclass
class Host:
    """The same tree on the host: real nodes only, with their places on the device."""

    tree: DraftTree
    places: list[int]
    keys: list[float]
    chances: list[float]
    used: int = 1

    def extend(self, nodes: list[int], tokens: Tensor, logq: Tensor, calibrator: Calibrator | None) -> None:
        k = tokens.shape[1]
        for row, place in enumerate(nodes):
            alive = torch.nonzero(logq[row] > -math.inf).flatten()
            if place < 0 or not len(alive):
                continue
            parent, start = self.places.index(place), len(self.tree)
            parents = torch.full((len(alive),), parent)
            self.tree = self.tree.extend(parents, tokens[row, alive], logq[row, alive], alive)
            self.places += [self.used + row * k + int(rank) for rank in alive]
            if calibrator is None:
                chances = self.tree.logq[start:].exp().tolist()
                self.keys += self.tree.score[start:].tolist()
            else:
                chances = calibrator.accept(self.tree, start)
                chances = [chance / max(1.0, sum(chances)) for chance in chances]
                self.keys += [self.keys[parent] + math.log(chance) for chance in chances]
            self.chances += chances
        self.used += len(nodes) * k


def drafted_children(width: int, k: int, seed: int, tied: bool) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities of children, as from a drafter; `tied`: with ties, 0 and -inf among them."""
    chance = torch.Generator().manual_seed(seed)
    logits = torch.randn(width, 50, generator=chance) * 3
    logq, tokens = logits.log_softmax(-1).topk(k)
    if tied:
        logq = -torch.randint(0, 3, (width, k), generator=chance).float().sort(-1).values / 2
        logq[0, -1] = -math.inf
    return tokens, logq


def same(one: TreeArrays | NextPass, other: TreeArrays | NextPass, count: int) -> None:
    """Assert that kernel and reference agree."""
    for name, made, wanted in zip(one._fields, one, other, strict=True):
        if made is None or wanted is None:
            assert made is wanted
            continue
        cut = slice(count if isinstance(one, TreeArrays) and name != "count" else None)
        close = torch.allclose(made[cut].float(), wanted[cut].float(), rtol=2e-6, atol=2e-6)
        assert close if made.is_floating_point() else torch.equal(made[cut], wanted[cut]), name


def check_growth(
    rule: str,
    widths: tuple[int, ...],  # of each pass
    k: int,
    seed: int,
    deepest: int,
    rows: int,
    tied: bool = False,
    device: str = "cpu",
) -> None:
    """Grow a tree pass by pass, with some empty rows, then choose the rows to verify."""
    calibrator = make_calibrator(seed) if rule == "calibrated" else None
    calibration = make_calibration(calibrator, device) if calibrator else None
    width, room = widths[-1], widths[-1] * (len(widths) - 1)
    tree = empty_tree(1 + k * sum(widths) + 5, deepest, device)
    next_pass = empty_next_pass(width, room, device)
    reset_to_root(tree, torch.tensor([3], device=device))
    tree.slot[0] = 0
    host = Host(DraftTree.root(3), [0], [0.0], [1.0])
    nodes = torch.zeros(1, dtype=torch.long, device=device)
    staged: list[int] = []
    for turn, given in enumerate(widths):
        tokens, logq = drafted_children(given, k, 100 * seed + turn, tied)
        twin, rows_twin = (
            TreeArrays(*(x.clone() for x in tree)),
            NextPass(*(None if x is None else x.clone() for x in next_pass)),
        )
        host.extend(nodes.tolist(), tokens, logq, calibrator)
        fresh = host.used - given * k
        growing.reference(twin, nodes.clone(), tokens.to(device), logq.to(device), rows_twin, RULES[rule], calibration)
        grow(tree, nodes, tokens.to(device), logq.to(device), next_pass, RULES[rule], calibration)
        same(tree, twin, host.used)
        same(next_pass, rows_twin, 0)
        check_tree(tree, host)
        frontier = check_frontier(tree, next_pass, host, fresh if rule == "beam" else 0, staged)
        if rule == "beam" and turn + 1 < deepest and not tied:
            newest = torch.nonzero(host.tree.depth == host.tree.depth[-1]).flatten()
            widest = best_nodes(host.tree, newest.numpy(), width)
            assert sorted(frontier) == [host.places[node] for node in widest.tolist()]
        check_summary(next_pass, turn + 1, tree, host, calibration)
        fits = len(staged) + width <= room
        staged += frontier + [-1] * (width - len(frontier)) if fits else []
        nodes = next_pass.nodes  # the kernel writes where it reads
    check_choice(tree, host, rows, None, device)
    check_choice(tree, host, rows, 1 + k * sum(widths[:-1]), device)


SELECTIVE = {
    "talon": Rule(budget=30, share=math.log(0.05), first=6, levels=1),
    "talon, gate at once": Rule(budget=14, share=math.log(0.3), first=3, levels=0),
    "opt-tree": Rule(top=13),
    "optimal": Rule(whole=True, top=20, decay=math.log(0.9)),
    "salf": Rule(whole=True, top=12, include_last=True),
}


def check_selection(name: str, width: int, k: int, seed: int, tied: bool, device: str = "cpu") -> None:
    """Rules that keep only some children: kernel and reference agree after each pass."""
    rule, passes = SELECTIVE[name], 6
    capacity = 1 + k * (1 + width * passes)
    tree, next_pass = empty_tree(capacity, passes + 1, device), empty_next_pass(width, width * passes, device)
    reset_to_root(tree, torch.tensor([3], device=device))
    tree.slot[0] = 0
    nodes = torch.zeros(1, dtype=torch.long, device=device)
    for turn in range(passes):
        tokens, logq = (x.to(device) for x in drafted_children(len(nodes), k, 100 * seed + turn, tied))
        twin, rows_twin = (
            TreeArrays(*(x.clone() for x in tree)),
            NextPass(*(None if x is None else x.clone() for x in next_pass)),
        )
        growing.reference(twin, nodes.clone(), tokens, logq, rows_twin, rule)
        grow(tree, nodes, tokens, logq, next_pass, rule)
        same(tree, twin, int(tree.count))
        same(next_pass, rows_twin, 0)
        nodes = next_pass.nodes


def check_shape(shape: Shape, width: int, seed: int, device: str = "cpu") -> None:
    """A tree of a fixed shape grows level by level. Its nodes are those of the shape and do not depend on scores."""
    passes, k, rows = shape.extent
    table = torch.full((rows, k + 2), -1, device=device)
    for (parent, rank), child in shape.numbered().items():
        table[parent, rank] = child
    tree = empty_tree(1 + k * (1 + width * passes), passes + 1, device)
    next_pass = empty_next_pass(width, width * passes, device)
    reset_to_root(tree, torch.tensor([3], device=device))
    tree.slot[0] = 0
    nodes = torch.zeros(1, dtype=torch.long, device=device)
    for turn in range(passes):
        tokens, logq = (x.to(device) for x in drafted_children(len(nodes), k, 100 * seed + turn, False))
        twin, rows_twin = (
            TreeArrays(*(x.clone() for x in tree)),
            NextPass(*(None if x is None else x.clone() for x in next_pass)),
        )
        growing.reference(twin, nodes.clone(), tokens, logq, rows_twin, RULES["shape"], None, table)
        grow(tree, nodes, tokens, logq, next_pass, RULES["shape"], shape=table)
        same(tree, twin, int(tree.count))
        same(next_pass, rows_twin, 0)
        nodes = next_pass.nodes
    parents, rank, key = (x.tolist() for x in (tree.parents, tree.rank, tree.key))
    found: dict[int, tuple[int, ...]] = {0: ()}
    for place in range(1, int(tree.count)):
        if key[place] > -math.inf:
            found[place] = (*found[parents[place]], rank[place])
    assert sorted(found.values()) == sorted(shape.paths)


def check_tree(tree: TreeArrays, host: Host) -> None:
    assert tree.count.tolist() == [host.used]
    places, wanted = torch.tensor(host.places), host.tree
    alive = torch.zeros(host.used, dtype=torch.bool)
    alive[places] = True
    assert (tree.key.cpu()[: host.used][~alive] == -math.inf).all()
    assert (tree.score.cpu()[: host.used][~alive] == -math.inf).all()
    for name in ("tokens", "depth", "rank", "logq"):
        assert torch.equal(getattr(tree, name).cpu()[places], getattr(wanted, name)), name
    assert torch.equal(tree.parents.cpu()[places[1:]], places[wanted.parents[1:]])
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(tree.score.cpu()[places], wanted.score, **close)
    torch.testing.assert_close(tree.key.cpu()[places], torch.tensor(host.keys), **close)
    torch.testing.assert_close(tree.chance.cpu()[places], torch.tensor(host.chances), **close)
    line = tree.ancestors.cpu()
    for node in range(0, len(wanted), 7):
        path = [host.places[each] for each in wanted.path(node)]
        assert line[host.places[node]].tolist() == path + [-1] * (line.shape[1] - len(path))


def check_frontier(tree: TreeArrays, next_pass: NextPass, host: Host, first: int, staged: list[int]) -> list[int]:
    """The rows are the best nodes by key; returns these nodes."""
    keys, depth = tree.key.tolist(), tree.depth.tolist()
    width, room, deepest = len(next_pass.nodes), len(next_pass.expanded), tree.ancestors.shape[1] - 1
    spent = {0, *staged} if not first else {0}
    able = [place for place in host.places if place >= first and place not in spent and depth[place] < deepest]
    wanted = sorted(able, key=lambda place: (-keys[place], place))[:width]
    spare = [-1] * (width - len(wanted))
    assert next_pass.nodes.tolist() == wanted + spare
    assert next_pass.tokens.tolist() == tree.tokens[wanted].tolist() + [0] * len(spare)
    assert next_pass.positions.tolist() == [LENGTH - 1 + depth[place] for place in wanted] + [LENGTH - 1] * len(spare)
    begin = len(staged)
    assert next_pass.slots.tolist() == list(range(LENGTH + begin, LENGTH + begin + width))
    assert next_pass.own_slots.tolist() == list(range(1 + begin, 1 + begin + width))
    parents = tree.parents[wanted].tolist()
    assert next_pass.parent_slots.tolist() == [1 + staged.index(p) if p else 0 for p in parents] + [0] * len(spare)
    now = [*staged, *wanted, *spare] if begin + width <= room else staged
    assert next_pass.expanded.tolist() == now + [-1] * (room - len(now)) and next_pass.staged.tolist() == [len(now)]
    assert all(tree.taken[place] for place in (*wanted, 0))
    ancestors = host.tree.mask()
    for row, place in enumerate(next_pass.nodes.tolist()):
        sees = [
            min(place, other) >= 0 and bool(ancestors[host.places.index(place), host.places.index(other)])
            for other in next_pass.expanded.tolist()
        ]
        assert next_pass.mask[row].tolist() == sees
    return wanted


def check_summary(
    next_pass: NextPass, level: int, tree: TreeArrays, host: Host, calibration: Calibration | None
) -> None:
    chosen = [node for node in next_pass.nodes.tolist() if node >= 0]
    keys = tree.key.cpu()[chosen].double()
    expected = [float(keys.max()), float(keys.logsumexp(0))] if chosen else [-math.inf] * 2
    expected += [0.0, 0.0, float(len(host.tree)), 0.0]
    if calibration is not None:
        fee, price = calibration.prices.tolist()
        expected[2] = -fee
        for node, key in zip(chosen, keys.tolist(), strict=True):
            own, depth = float(tree.chance[node]), min(int(tree.depth[node]), 5)
            for hope in calibration.forecast[depth, (own > 0.35) + (own > 0.75)].tolist():
                expected[2] += max(0.0, math.exp(key) * hope - price)
        expected[3] = float(sum(math.exp(tree.key[place]) > price for place in host.places[1:]))
    torch.testing.assert_close(next_pass.summary[level].cpu(), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def check_choice(tree: TreeArrays, host: Host, rows: int, limit: int | None, device: str) -> None:
    places = torch.tensor(host.places)
    keys, eligible = tree.key.cpu()[places], torch.arange(len(places))
    if limit is not None:
        eligible = eligible[places < limit]
    keep = torch.from_numpy(best_nodes(host.tree, eligible.numpy(), rows, keys.numpy()))
    wanted = host.tree.select(keep)
    size = len(wanted)

    long = [torch.full((rows + 2,), 9, device=device) for _ in range(4)]
    mask = torch.ones(SIDE, SIDE, dtype=torch.bool, device=device)
    count = torch.zeros(1, dtype=torch.long, device=device)
    at = None if limit is None else torch.tensor([limit], device=device)
    choose(tree, rows, *long, mask[:rows, :rows], count, at)
    twins, square, other = [torch.full_like(x, 9) for x in long], torch.ones_like(mask), count.clone()
    choosing.reference(tree, rows, *twins, square[:rows, :rows], other, at)
    assert all(map(torch.equal, [*long, mask, count], [*twins, square, other]))

    kept, tokens, parents, depth = (x.cpu() for x in long)
    assert count.tolist() == [size] and kept.tolist() == places[keep].tolist() + [-1] * (rows - size) + [9, 9]
    for made, given in ((tokens, wanted.tokens), (depth, wanted.depth), (parents, wanted.parents.clamp(min=0))):
        assert made.tolist() == given.tolist() + [0] * (rows - size) + [9, 9]
    assert torch.equal(mask[:size, :size].cpu(), wanted.mask())
    assert not mask[size:rows, :rows].any() and not mask[:rows, size:rows].any()
    assert mask[rows:].all() and mask[:, rows:].all()


def check_pruning(width: int, k: int, seed: int, ordinary: float = 2.0, device: str = "cpu") -> None:
    """Against a loop over nodes of all depths, including empty rows."""
    bounds = Bounds(-2.0, ordinary, -1.0, 0.5, 0.2, 1, 2, max(k - 1, 1), 1 if seed % 2 else k)
    tree, chance = empty_tree(width + 3, 4, device), torch.Generator().manual_seed(seed)
    tree.depth[: width + 2] = torch.randint(1, 5, (width + 2,), generator=chance).to(device)
    tree.score[: width + 2] = (-torch.randint(0, 7, (width + 2,), generator=chance) / 2.0).to(
        device
    )  # some are equal to the bounds
    tree.depth[0], tree.score[0] = 0, 0.0
    nodes = torch.randperm(width + 2, generator=chance)[:width]
    nodes[torch.rand(width, generator=chance) < 0.2] = -1
    nodes[0] = 0
    values = (torch.randn(width, max(k, 9), generator=chance) * 2).log_softmax(-1).topk(k).values
    values[width // 2, -1] = -math.inf if k > 1 else 0.0
    wanted = values.clone()
    for row, node in enumerate(nodes.tolist()):
        depth, sureness = int(tree.depth[max(node, 0)]), math.exp(values[row, 0])
        breadth = bounds.narrow if sureness >= bounds.sure else bounds.middle
        breadth = bounds.wide if sureness < bounds.unsure else breadth
        wanted[row, min(breadth, bounds.first) if depth == 0 else breadth :] = -math.inf
    given, before = torch.tensor(bounds, device=device), TreeArrays(*(x.clone() for x in tree))
    for way in (prune, gating.reference):
        found = values.to(device, copy=True)
        way(tree, nodes.to(device), found, given)
        assert torch.equal(found.cpu(), wanted)
    assert all(map(torch.equal, tree, before))


def a_tree(size: int, seed: int) -> DraftTree:
    """Random parents; siblings differ."""
    chance = torch.Generator().manual_seed(seed)
    tree = DraftTree.root(0)
    for node in range(1, size):
        parent = torch.randint(node, (1,), generator=chance)
        token = (tree.parents == parent).sum().reshape(1)
        tree = tree.extend(parent, token, torch.zeros(1), token)
    return tree


def check_accepting(size: int, rows: int, steps: int, seed: int, drafter: bool, device: str = "cpu") -> None:
    wanted = a_tree(size, seed)
    draws = torch.randint(3, (rows,), generator=torch.Generator().manual_seed(seed))
    verdict = verify.walk(wanted, draws.tolist().__getitem__)
    path, count = verdict.path.tolist(), len(verdict.path)
    steps = max(steps, count)
    (tokens, parents), mask = torch.zeros(2, SIDE, dtype=torch.long), torch.zeros(SIDE, SIDE, dtype=torch.bool)
    tokens[:size], parents[:size], mask[:size, :size] = wanted.tokens, wanted.parents.clamp(min=0), wanted.mask()
    mask[:, 0] = True  # the mask of padding has no effect

    def arrays() -> tuple[list[Tensor | None], TreeArrays]:
        given = [draws, tokens, parents, mask[:rows, :rows], torch.tensor([size]), torch.tensor([LENGTH])]
        sizes = (SIDE, 1, 1, steps, steps, steps, 1, 21, 1, 4)
        made: list[Tensor | None] = [x.to(device) for x in (*given, *(torch.full((n,), 9) for n in sizes))]
        made[3] = mask.to(device)[:rows, :rows]
        if not drafter:
            made[11] = made[12] = made[13] = made[14] = None
        tree = empty_tree(9, 3, device)
        tree.count.fill_(7)
        return made, tree

    made, tree = arrays()
    accept_path(*made[:13], tree, *made[13:])
    if device == "cuda" or INTERPRETED:
        twins, other = arrays()
        accepting.reference(*twins[:13], other, *twins[13:])
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(made, twins, strict=True))
        same(tree, other, 9)
    (*_, length, walked, accepted, bonus, source, goal, pending, waiting, expanded, staged, figures) = (
        None if x is None else x.tolist() for x in made
    )
    assert length == [LENGTH + count]
    assert walked == path + [-1] * (SIDE - count) and accepted == [count] and bonus == [verdict.bonus]
    assert source == [LENGTH + (path[i] if i < count else i) for i in range(steps)]
    assert goal == list(range(LENGTH, LENGTH + steps)) and figures == [7, size, count, verdict.bonus]
    if drafter:
        assert pending == [*wanted.tokens[path[1:]].tolist(), verdict.bonus] + [0] * (steps - count)
        assert waiting == [count] and expanded == [-1] * 21 and staged == [0]
    root = [x[0].tolist() for x in tree]
    assert root == [verdict.bonus, -1, 0, 0, 0.0, 0.0, 0.0, 1.0, True, [0, -1, -1, -1], 0, 1]


def check_moving(heads: int, width: int, steps: int, features: int, dtype: torch.dtype, device: str = "cpu") -> None:
    torch.manual_seed(steps)
    kv = torch.randn(heads, LENGTH + 90, width, device=device).to(dtype)
    path = torch.randperm(89)[: max(steps - 2, 1)].sort().values
    path = torch.cat([torch.zeros(1, dtype=torch.long), 1 + path, torch.full((5,), -1)])[: steps + 2].to(device)
    goal = LENGTH + torch.arange(steps, device=device)
    source = torch.where(path[:steps] < 0, goal, LENGTH + path[:steps])
    wanted = kv.clone()
    wanted[:, goal] = kv[:, source]
    states = torch.randn(128, features + 3, device=device).to(dtype)[:, :features]
    kept = torch.zeros(steps + 1, features, device=device, dtype=dtype)
    alone = kv.clone()
    move(kv, source, goal, states, path, kept)
    move(alone, source, goal)
    assert torch.equal(kv, wanted) and torch.equal(alone, wanted)
    assert torch.equal(kept[:steps], states[path[:steps].clamp(min=0)]) and not kept[steps:].any()


def check_pair(n: int, width: int, dtype: torch.dtype, normed: bool, device: str = "cpu") -> None:
    if INTERPRETED:  # avoids importing transformers in the second process
        from torch.nn import RMSNorm
    else:
        from windfall.heads.layers import RMSNorm  # type: ignore[assignment]

    torch.manual_seed(n)
    left, right = (RMSNorm(width, 1e-5).to(device, dtype) for _ in range(2))
    for norm in (left, right):
        torch.nn.init.normal_(norm.weight)
    embedding, hidden = (torch.randn(rows, width, device=device).to(dtype) for rows in (40, n + 5))
    tokens, index = torch.randint(40, (n,), device=device), torch.randint(n + 5, (n,), device=device)
    ulp = 1e-6 if dtype == torch.float32 else 2**-7
    for chosen in (index, None):
        rows = hidden[:n] if chosen is None else hidden[chosen]
        both, residual = torch.zeros(n, 2 * width + 1, device=device).to(dtype)[:, :-1], torch.zeros_like(rows)
        with torch.no_grad():
            pair_norm(tokens, embedding, left.weight, hidden, chosen, right.weight, 1e-5, both, residual, normed)
            wanted = torch.cat([left(embedding[tokens]), right(rows)], -1)
        torch.testing.assert_close(both, wanted, atol=1e-6, rtol=ulp)
        assert torch.equal(residual, both[:, width:] if normed else rows)


def check_copy_to_host(size: int, device: str = "cpu") -> None:
    source = torch.randint(256, (size + 16,), dtype=torch.uint8, device=device)[16:]  # a slice
    target = torch.zeros(size + 8, dtype=torch.uint8, pin_memory=device == "cuda")
    copy_to_host(source, target[:size])
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(target[:size], source.cpu()) and not target[size:].any()


def check_publish(size: int, device: str = "cpu") -> None:
    """Publish more times than source are blocks; each block keeps its own content."""
    source = torch.zeros(size + 16, dtype=torch.uint8, device=device)[16:]
    blocks = torch.zeros(3, size + SEQUENCE_BYTES, dtype=torch.uint8, pin_memory=device == "cuda")
    sequence, finished = torch.full((1,), 40, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    for number in range(41, 46):
        source.fill_(number)
        publish(source, blocks, sequence, finished)
    if device == "cuda":
        torch.cuda.synchronize()
    assert sequence.item() == 45 and finished.item() == 0
    for number in (43, 44, 45):
        block = blocks[number % 3]
        assert (block[:size] == number).all() and block[size : size + 8].view(torch.long).item() == number


def check_rows(n: int, width: int, across: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Positions, slots, embeddings and angles of rows; the embedding has a row stride above its width."""
    chance = torch.Generator().manual_seed(n)
    depth, length = (torch.randint(40, (size,), generator=chance).to(device) for size in (n, 1))
    positions, slots, _, _ = place_rows(length, depth, torch.tensor([n], device=device), None)
    assert torch.equal(positions, depth + length) and (slots - length).tolist() == list(range(n))
    embedding, angles = (torch.randn(50, size, generator=chance).to(device, dtype) for size in (width + 8, across))
    embedded, turned = embed(depth, embedding[:, :width], positions, angles)
    assert torch.equal(embedded, embedding[depth, :width]) and torch.equal(turned, angles[positions.clamp(max=49)])
    scaled, _ = embed(depth, embedding[:, :width], positions, angles, 5.65625)
    wanted = embedded * torch.tensor(5.65625, dtype=dtype, device=device)
    rounding = 0 if device == "cuda" else 2**-7  # the interpreter does not round bf16
    torch.testing.assert_close(scaled, wanted, atol=0, rtol=rounding)
    mask, starts = scaled[0].contiguous(), depth.repeat(2)[:2]
    blocks, _ = embed(starts, embedding[:, :width], positions.repeat(6)[:6], angles, mask=mask)
    assert torch.equal(blocks[::3], embedding[starts, :width]) and torch.equal(blocks[1::3], mask.expand(2, -1))
    waiting, before = torch.tensor([min(n, 3)], device=device), length.clone()
    for size in (1, n + 3):
        after = before.clone()
        slots, root, places = append_block(after, waiting, depth, n, size)
        assert torch.equal(after, before + waiting) and torch.equal(root, depth[waiting - 1])
        assert (slots - before).tolist() == list(range(n)) and (places - after).tolist() == list(range(size))
    slots, last, was = append_rows(length, waiting, n)
    assert torch.equal(length, before + waiting) and torch.equal(was, before) and torch.equal(last, waiting - 1)
    assert (slots - before).tolist() == list(range(n))
