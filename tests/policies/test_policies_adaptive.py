"""The papers' adaptive policies against their algorithms written out literally, brute force and trees by hand."""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.policies import verified
from helpers.table import TableDrafter, draft, random_table
from windfall import registry
from windfall.core.tree import DraftTree
from windfall.core.types import InputError
from windfall.policies.base import TreePolicy
from windfall.policies.context import Context
from windfall.policies.plan import Decision, TreeView

HAND = [  # q(next | last); 0 is the root's token
    [0.0, 0.6, 0.3, 0.1],
    [0.0, 0.2, 0.7, 0.1],
    [0.0, 0.5, 0.1, 0.4],
    [0.0, 0.3, 0.3, 0.4],
]
CERTAIN = torch.roll(torch.eye(5), 1, 1)  # every token has one sure successor
Path = tuple[int, ...]


def paths(tree: DraftTree, keep: Tensor) -> list[Path]:
    return [tuple(tree.tokens[tree.path(node)[1:]].tolist()) for node in keep.tolist() if node]


# SALF


def likeliest(table: Tensor, count: int) -> list[tuple[float, Path]]:
    """The `count` likeliest nodes of the infinite tree under token 0, by a best-first search over all children."""
    logq = table.double().log()
    found: list[tuple[float, Path]] = []
    queue: list[tuple[float, Path]] = [(0.0, ())]
    while len(found) < count:
        cost, path = heapq.heappop(queue)
        found.append((cost, path))
        for token, value in enumerate(logq[path[-1] if path else 0].tolist()):
            heapq.heappush(queue, (cost - value, (*path, token)))
    return found


UNLIMITED = {"k": None, "cap": 1000}


def literal_salf(table: Tensor, count: int, width: int, th: float) -> tuple[set[Path], set[Path], list[float]]:
    """Algorithm 2 with sets, every child of the vocabulary pushed: (G, the best of G and Q, the sums S_i)."""
    q = table.double()
    value: dict[Path, float] = {(): 1.0}
    kept: list[Path] = []
    queue: list[Path] = [()]
    sums: list[float] = []
    while True:
        queue.sort(key=lambda n: -value[n])
        front, queue = queue[:width], queue[width:]
        kept = sorted(kept + front, key=lambda n: -value[n])[:count]
        least = value[kept[-1]] if len(kept) >= count else 0.0
        front = [n for n in front if value[n] > least]
        sums.append(sum(value[n] for n in front))
        if not front or sums[-1] < th:
            break
        for node in front:
            for token, chance in enumerate(q[node[-1] if node else 0].tolist()):
                value[(*node, token)] = value[node] * chance
                queue.append((*node, token))
        queue = sorted(queue, key=lambda n: -value[n])[:count]
    filled = sorted(kept + queue, key=lambda n: -value[n])[:count]
    return set(kept), set(filled), sums


def watched(name: str, **settings: Any) -> tuple[TreePolicy, list[float]]:
    """A policy, and the summed path probability of the nodes of each next pass, as its decisions saw them."""
    policy, gains = registry.policy(name, **settings), list[float]()
    decide = policy.decide  # type: ignore[attr-defined]

    def noted(level: int, view: TreeView, ctx: Context) -> Decision:
        gains.append(math.exp(view.summary(level).total))
        return decide(level, view, ctx)

    policy.plan = lambda own=policy.plan(): replace(own, decide=noted)  # type: ignore[method-assign]
    return policy, gains


@pytest.mark.parametrize(("count", "width"), [(5, 2), (12, 3), (20, 4), (40, 5)])
@pytest.mark.parametrize("sharpness", [0.5, 1.5, 4.0])
def test_salf_without_threshold_is_the_optimal_tree(count: int, width: int, sharpness: float) -> None:
    for seed in range(6):
        table = random_table(50, seed, sharpness)
        policy, gains = watched("salf", nodes=count, width=width, th=0.0, **UNLIMITED)
        tree, keep, _ = draft(policy, TableDrafter(table))
        wanted = [-cost for cost, _ in likeliest(table, count)]  # by value: paths of the same transitions tie
        assert tree.score[keep].sort(descending=True).values.tolist() == pytest.approx(wanted, abs=1e-4)
        assert gains[-1] == 0.0, "it ended because nothing was left that could enter"


@pytest.mark.parametrize("th", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize(("count", "width"), [(12, 3), (40, 5), (60, 10)])
def test_salf_is_the_listing(count: int, width: int, th: float) -> None:
    """Asking for fewer children than the whole vocabulary changes neither the tree nor the sums."""
    for seed in range(4):
        table = random_table(30, seed, 2.0)
        literal, filled, sums = literal_salf(table, count, width, th)
        for fill, wanted in ((False, literal), (True, filled)):
            policy, gains = watched("salf", nodes=count, width=width, th=th, fill=fill, **UNLIMITED)
            tree, keep, passes = draft(policy, TableDrafter(table))
            tree.select(keep).check()
            assert set(paths(tree, keep)) | {()} == wanted
            assert gains == pytest.approx(sums[1:], rel=1e-4)
            assert passes == len(sums) - 1


def test_salf_gains_fall_strictly_from_the_second_pass() -> None:
    for seed in range(10):
        policy, gains = watched("salf", th=0.0, **UNLIMITED)
        draft(policy, TableDrafter(random_table(40, seed, 1.0)))
        assert all(a > b for a, b in pairwise(gains))


def test_salf_fills_what_the_listing_leaves_empty() -> None:
    """th=.8 on HAND: root, then {1, 2, 3} sum to 1, then the best three of their children to .42+.15+.12 < .8."""
    settings = {"nodes": 10, "width": 3, "th": 0.8}
    tree, keep, passes = draft(registry.policy("salf", fill=False, **settings), TableDrafter(HAND))
    assert set(paths(tree, keep)) >= {(1,), (2,), (3,), (1, 2), (2, 1)} and len(keep) == 7
    tree, keep, again = draft(registry.policy("salf", fill=True, **settings), TableDrafter(HAND))
    assert len(keep) == 10
    assert passes == again == 2


def test_salf_respects_depth_and_room() -> None:
    table = random_table(20, 3, 3.0)
    for room in (1, 2, 4):
        tree, keep, _ = draft(registry.policy("salf", th=0.0, nodes=30, **UNLIMITED), TableDrafter(table), room=room)
        assert int(tree.select(keep).depth.max()) == room - 1
    tree, keep, _ = draft(
        registry.policy("salf", th=0.0, nodes=30, width=4, max_depth=2, **UNLIMITED), TableDrafter(table)
    )
    shallow = [path for _, path in likeliest(table, 3000) if len(path) <= 2][:30]
    assert set(paths(tree, keep)) | {()} == set(shallow)


@pytest.mark.parametrize(("th", "sharpness"), [(0.0, 4.0), (0.3, 3.0), (0.6, 3.0)])
def test_salf_with_ten_children_a_node_and_sixteen_passes(th: float, sharpness: float) -> None:
    """What a device drafts: no more of either, and with a drafter that knows something next to nothing is lost."""
    for seed in range(4):
        kept, counts = [], []
        for limits in ({}, UNLIMITED):
            policy = registry.policy("salf", th=th, **limits)
            tree, keep, passes = draft(policy, TableDrafter(random_table(40, seed, sharpness)))
            kept.append(float(tree.score[keep].exp().sum()))
            counts.append((passes, int(tree.parents[1:].bincount().max())))
        assert counts[0][0] <= 16 and counts[0][1] <= 10 < counts[1][1]
        assert kept[0] > 0.97 * kept[1]


def test_salf_ends_where_all_is_certain() -> None:
    for fill in (True, False):
        tree, keep, passes = draft(registry.policy("salf", nodes=12, fill=fill), TableDrafter(CERTAIN))
        tree.select(keep).check()
        assert (len(keep), passes) == (12, 11)


# TALON


def literal_talon(table: Tensor, count: int, k: int, mu: float, init_layers: int, cap: int) -> list[set[Path]]:
    """Algorithm 2 over the whole vocabulary: the layers."""
    logq = table.float().log()
    value: dict[Path, float] = {(): 0.0}
    layers = [{()}]
    while sum(map(len, layers)) < count and len(layers) <= cap:
        candidates = {
            (*node, token): value[node] + float(chance)
            for node in layers[-1]
            for token, chance in enumerate(logq[node[-1] if node else 0])
        }
        order = sorted(candidates, key=lambda n: -candidates[n])
        gate = candidates[order[0]] + math.log(mu)
        chosen = order[:k] if len(layers) <= init_layers else [n for n in order if candidates[n] >= gate]
        chosen = chosen[: count - sum(map(len, layers))]
        value.update((n, candidates[n]) for n in chosen)
        layers.append(set(chosen))
    return layers


@pytest.mark.parametrize("init_layers", [0, 1, 2, 3])
@pytest.mark.parametrize("mu", [0.01, 0.03, 0.3])
def test_talon_is_the_algorithm_and_spends_its_budget(mu: float, init_layers: int) -> None:
    for seed in range(4):
        table = random_table(80, seed, 2.0)
        policy = registry.policy("talon", mu=mu, init_layers=init_layers, children=None)
        tree, keep, passes = draft(policy, TableDrafter(table))
        layers = literal_talon(table, 60, 10, mu, init_layers, 24)
        assert set(paths(tree, keep)) | {()} == set().union(*layers)
        assert passes == len(layers) - 1
        assert len(keep) == 60 or passes == 24
        tree.select(keep).check()


def test_talon_gate() -> None:
    """Past the first layer, what is kept of a layer has mu of its best, and (but for the last) nothing else has."""
    tree, keep, _ = draft(registry.policy("talon", mu=0.05), TableDrafter(random_table(100, 1, 2.0)))
    kept = torch.zeros(len(tree), dtype=torch.bool).index_fill(0, keep, True)
    assert int((kept & (tree.depth == 1)).sum()) == 10
    deepest = int(tree.depth.max())
    for level in range(2, deepest + 1):
        layer = tree.depth == level
        passes = tree.score >= tree.score[layer].max() + math.log(0.05)
        assert bool(passes[layer & kept].all())
        assert level == deepest or torch.equal(layer & passes, layer & kept)


def test_talon_with_a_gate_of_one_is_a_chain_after_the_first_layer() -> None:
    policy = registry.policy("talon", mu=1.0, nodes=16, k=4)
    tree, keep, passes = draft(policy, TableDrafter(random_table(30, 2)))
    widths = torch.bincount(tree.select(keep).depth).tolist()
    assert widths == [1, 4] + [1] * 11
    assert passes == 12


def test_talon_ends_at_its_cap() -> None:
    _, keep, passes = draft(registry.policy("talon", mu=1.0, cap=5), TableDrafter(random_table(30, 4)))
    assert (len(keep), passes) == (1 + 10 + 4, 5)


def test_talon_takes_what_a_small_vocabulary_has() -> None:
    tree, keep, _ = draft(registry.policy("talon", nodes=9, k=10, mu=0.5), TableDrafter(HAND))
    assert set(paths(tree, keep)[:3]) == {(1,), (2,), (3,)}
    assert len(keep) == 9
    tree, keep, _ = draft(registry.policy("talon", nodes=9), TableDrafter(CERTAIN))
    assert len(keep) == 9
    tree.select(keep).check()


# DynaTree


def literal_dynatree(table: Tensor, root_branching: bool, most: int, depth0: int, deepest: int) -> list[Path]:
    """The release's first-in-first-out loop, node by node."""
    q = table.float()
    value: dict[Path, float] = {(): 1.0}

    def children(node: Path) -> list[Path]:
        chances, tokens = q[node[-1] if node else 0].sort(descending=True, stable=True)
        breadth = 1 if float(chances[0]) >= 0.9 else 3 if float(chances[0]) < 0.4 else 2
        found = [(*node, int(token)) for token in tokens[:breadth]]
        value.update((n, value[node] * float(c)) for n, c in zip(found, chances, strict=False))
        return found

    tree = children(()) if root_branching else children(())[:1]
    tree = tree[:most]
    queue = deque(tree)
    while queue and len(tree) < most:
        node = queue.popleft()
        if value[node] < max(0.05, 0.1) or len(node) >= deepest:
            continue
        if len(node) >= depth0 and value[node] <= 0.5:
            continue
        for child in children(node):
            if len(tree) < most:
                tree.append(child)
                queue.append(child)
    return tree


@pytest.mark.parametrize("root_branching", [False, True])
@pytest.mark.parametrize(("most", "depth0", "deepest"), [(256, 5, 8), (256, 2, 9), (9, 5, 8), (2, 5, 8)])
def test_dynatree_is_the_queue(root_branching: bool, most: int, depth0: int, deepest: int) -> None:
    for seed in range(12):
        table = random_table(12, seed, (2.0, 4.0, 8.0)[seed % 3])
        policy = registry.policy(
            "dynatree", root_branching=root_branching, nodes=most, base_depth=depth0, max_depth=deepest
        )
        tree, keep, _ = draft(policy, TableDrafter(table))
        tree.select(keep).check()
        assert paths(tree, keep) == literal_dynatree(table, root_branching, most, depth0, deepest)


def test_dynatree_goes_deep_only_where_it_is_sure() -> None:
    tree, keep, _ = draft(registry.policy("dynatree"), TableDrafter(CERTAIN))
    assert len(keep) == 9, "one path of the maximal depth"
    for sure, deepest in ((0.86, 5), (0.88, 6), (0.92, 8)):  # 0.86^5 < 0.5; 0.88^5 > 0.5 > 0.88^6; 0.92^7 > 0.5
        table = CERTAIN * sure + (1 - CERTAIN) * (1 - sure) / 4
        tree, keep, _ = draft(registry.policy("dynatree"), TableDrafter(table))
        assert int(tree.select(keep).depth.max()) == deepest


def test_dynatree_paper_history_by_hand() -> None:
    """Proportional around 0.7: 8 of 8 accepted moves the depth by 0.3 and the threshold by -0.015."""
    policy = registry.policy("dynatree", history="paper", window=2)
    verified(policy, 8)
    assert (policy.steering.depth, policy.steering.sure) == pytest.approx((5.3, 0.885))
    verified(policy, 0)  # the mean of 1 and 0 is 0.5
    assert (policy.steering.depth, policy.steering.sure) == pytest.approx((5.1, 0.895))
    verified(policy, 2)  # of 0 and 0.25
    assert (policy.steering.depth, policy.steering.sure) == pytest.approx((4.525, 0.92375))
    for _ in range(20):
        verified(policy, 0)
    assert (policy.steering.depth, policy.steering.sure) == (1, 1)
    assert policy.steering.deep == 0.5
    for _ in range(60):
        verified(policy, 8)
    assert policy.steering.depth == 7
    assert policy.fresh().steering.depth == 5, "it adapts within a text"


def test_dynatree_release_history_by_hand() -> None:
    """From the fifth text on: a step up above 0.8, a step down below 0.6, and texts share what was learnt."""
    policy = registry.policy("dynatree", history="release")

    def text(*accepted: int) -> tuple[float, float, float]:
        own = policy.fresh()
        for count in accepted[:-1]:
            verified(own, count)
        verified(own, accepted[-1], finish="stop")
        return policy.steering.depth, policy.steering.sure, policy.steering.deep

    for _ in range(4):
        assert text(5, 7) == (5, 0.9, 0.5)  # 7 tokens a cycle / (5 + 2) = 1, but four texts are too few
    assert text(5, 7) == pytest.approx((6, 0.85, 0.45))
    for _ in range(12):
        high = text(6)
    assert high == pytest.approx((7, 0.5, 0.3))
    for _ in range(30):
        low = text(0)
    assert low == pytest.approx((2, 0.95, 0.8))
    for _ in range(10):
        calm = text(4)  # 5 / 7 is within the dead band
    assert policy.steering.recent[0] == pytest.approx(5 / 7)
    assert calm == text(4)


def test_dynatree_without_history_stays() -> None:
    policy = registry.policy("dynatree", history="none")
    verified(policy, 0, finish="stop")
    assert (policy.steering.depth, policy.steering.sure) == (5, 0.9)


# Depth controllers on the beam


def sure_for(levels: int, sure: float) -> Tensor:
    """Tokens 0..levels-1 lead on with probability `sure`; after that everything is equally likely. One more token."""
    size = 40
    table = torch.full((size, size), 1.0 / size)
    for token in range(levels):
        table[token] = (1 - sure) / (size - 1)
        table[token, token + 1] = sure
    return table


def depth_of(policy: TreePolicy, table: Tensor) -> int:
    tree, keep, passes = draft(policy, TableDrafter(table))
    tree.select(keep).check()
    assert len(keep) <= 60
    return passes


def test_ddd_looks_at_three_levels_only() -> None:
    """A beam of one: after level d its only node has V = 0.95^d; 0.95^5 = .774 passes, 0.95^7 = .698 does not."""
    assert math.log(0.95**5) > -0.3 > math.log(0.95**7)
    table = sure_for(20, 0.95)
    assert depth_of(registry.policy("ddd", k=1), table) == 7
    assert depth_of(registry.policy("ddd", k=1, checks="4, 9"), table) == 9
    assert depth_of(registry.policy("ddd", k=1, threshold=-0.2), table) == 5
    assert depth_of(registry.policy("ddd"), sure_for(20, 0.999)) == 12
    assert depth_of(registry.policy("ddd"), random_table(40, 0, 0.0)) == 5
    with pytest.raises(InputError, match=r"levels with commas between, e\.g\. 5,7,9, not '5;7'"):
        registry.policy("ddd", checks="5;7")


def test_ddd_sums_the_beam() -> None:
    """HAND with k=2: level 1 holds .6 + .3, level 2 the best two: .42 + .15."""
    for threshold, passes in ((math.log(0.56), 3), (math.log(0.58), 2)):
        policy = registry.policy("ddd", k=2, depth=3, checks="1,2", threshold=threshold)
        assert draft(policy, TableDrafter(HAND))[2] == passes


def test_svip_stops_after_an_unsure_pass() -> None:
    """0.6 nats is the limit: sqrt(0.15 * 0.6) = 0.3. Three sure passes, then one after which it is too unsure."""
    for k in (1, 4):
        assert depth_of(registry.policy("svip", k=k), sure_for(3, 0.99)) == 4
    assert depth_of(registry.policy("svip"), CERTAIN) == 12
    for sure, passes in ((0.70, 1), (0.72, 3)):  # 0.611 and 0.593 nats
        table = torch.zeros(6, 6)
        table[:, 1], table[:, 2] = sure, 1 - sure
        assert depth_of(registry.policy("svip", depth=3, k=2), table) == passes


def test_gammatune_by_hand() -> None:
    """Default depth 8, so 4 to 12; +2 after a path accepted whole, else the ceiling of the running mean."""
    policy = registry.policy("gammatune")
    assert depth_of(policy, CERTAIN) == policy.gamma == 8
    verified(policy, 8)
    assert depth_of(policy, CERTAIN) == policy.gamma == 10
    verified(policy, 10, drafted=10)
    verified(policy, 12, drafted=12)
    assert policy.gamma == 12, "at most one and a half times the default"
    verified(policy, 3)  # 0.8 * 8 + 0.2 * 3 = 7.0
    assert policy.gamma == 7
    verified(policy, 2)  # 0.8 * 7 + 0.2 * 2 = 6.0
    verified(policy, 2)  # 0.8 * 6 + 0.2 * 2 = 5.2
    assert policy.gamma == 6
    for _ in range(20):
        verified(policy, 0)
    assert policy.gamma == 4, "at least half of it"
    assert policy.fresh().gamma == 8


def test_gammatune_judges_a_cycle_by_its_own_depth() -> None:
    """On a device the next cycle is under way before the depth has changed."""
    policy = registry.policy("gammatune")
    for gamma in (10, 12):
        verified(policy, 8)
        assert policy.gamma == gamma


def test_gammatune_may_carry_over() -> None:
    policy = registry.policy("gammatune", carry=True)
    verified(policy.fresh(), 8)
    assert policy.fresh().gamma == 10


@pytest.mark.parametrize("name", ["salf", "talon", "dynatree", "ddd", "svip", "gammatune"])
def test_ties_keep_parents(name: str) -> None:
    """Probabilities of exactly 1, and four of them at the root."""
    table = CERTAIN.clone()
    table[0] = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])  # not a distribution, but a tie of four
    for nodes in range(1, 14):
        tree, keep, _ = draft(registry.policy(name, nodes=nodes), TableDrafter(table))
        tree.select(keep).check()
        assert len(keep) <= nodes + (name == "dynatree")


def test_published_settings() -> None:
    """What the papers state differs from the policies' own defaults only where a preset says so."""
    for name, different in {
        "salf": {},
        "salf-deepseek": {"th": 0.5},
        "talon": {},
        "talon-qwen3-8b": {"mu": 0.01},
        "talon-dsl-8b": {"mu": 0.04},
        "dynatree-wikitext2": {},
        "dynatree-pg19": {"max_depth": 9},
        "fixed-wikitext2": {},
        "ddd-ltd": {},
        "svip-ltd": {},
        "gammatune-ltd": {},
    }.items():
        policy = registry.PRESETS[name][0]
        assert registry.preset(name) == registry.policy(policy, **different)
