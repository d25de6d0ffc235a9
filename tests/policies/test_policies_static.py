"""Policies with trees known beforehand, and the searches they approximate: by hand, by formula, by brute force."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers.table import TableDrafter, draft, random_table
from windfall import registry
from windfall.core.tree import DraftTree
from windfall.core.types import Grow, InputError, Split, Step
from windfall.costs.curves import ASSUMED, Costs
from windfall.drafters.base import add_children
from windfall.policies.papers.sequoia import largest, quickest
from windfall.policies.shape import Path, Shape
from windfall.policies.static import SHAPES
from windfall.policies.static_trees import BestTrees, grow_by_product

HAND = [  # q(next | last); 0 is the root's token
    [0.0, 0.6, 0.3, 0.1],
    [0.0, 0.2, 0.7, 0.1],
    [0.0, 0.5, 0.1, 0.4],
    [0.0, 0.3, 0.3, 0.4],
]
SURE = torch.roll(torch.eye(5), 1, 1)  # every token has one certain successor


class LevelDrafter(TableDrafter):
    """Medusa-like: what follows a node depends on its depth alone; table [D, V]."""

    def expand(self, tree: DraftTree, grow: Grow) -> DraftTree:
        return add_children(tree, grow, self.logq[tree.depth[grow.nodes]], None)


def paths(tree: DraftTree, keep: Tensor) -> set[Path]:
    return {tuple(tree.tokens[tree.path(node)[1:]].tolist()) for node in keep.tolist() if node}


def ranks(tree: DraftTree, keep: Tensor) -> set[Path]:
    return {tuple(tree.rank[tree.path(node)[1:]].tolist()) for node in keep.tolist()}


def step(tree: DraftTree, accepted: int, passes: int = 1, seconds: Split = Split()) -> Step:
    """A cycle that accepted the first nodes of a chain."""
    path = torch.arange(accepted + 1)
    return Step(tuple(range(accepted + 1)), "", tree, path, tree, torch.arange(len(tree)), passes, seconds)


def all_paths(table: Tensor, depth: int, root: int = 0) -> dict[Path, float]:
    """Every path of tokens down to this depth, and its probability."""
    found, level = {}, {(): 1.0}
    for _ in range(depth):
        level = {
            (*path, v): q * float(table[path[-1] if path else root][v])
            for path, q in level.items()
            for v in range(len(table))
        }
        found |= level
    return found


def likeliest(found: dict[Path, float], count: int) -> set[Path]:
    return set(sorted(found, key=lambda path: -found[path])[:count])


# chain


def test_chain_stops_after_the_first_unsure_token() -> None:
    """1 (.6) is above .55 and is followed; 2 (.7) too; then 1 (.5) is below, and is still verified."""
    tree, keep, passes = draft(registry.policy("chain", depth=9, confidence=0.55), TableDrafter(HAND))
    assert tree.tokens.tolist() == [0, 1, 2, 1]
    assert (len(keep), passes) == (4, 3)
    certain, _, _ = draft(registry.policy("chain", depth=9, confidence=1), TableDrafter(SURE))
    assert len(certain) == 10


def test_chain_length_follows_what_was_accepted() -> None:
    policy, drafter = registry.policy("chain", depth=2, schedule="heuristic"), TableDrafter(HAND)
    lengths = []
    for accept_all in (True, True, False, False, False, False, False, False, True):
        tree, _, _ = draft(policy, drafter)
        lengths.append(len(tree) - 1)
        policy.observe(step(tree, len(tree) - 1 if accept_all else 0))
    assert lengths == [2, 4, 6, 5, 4, 3, 2, 1, 1]
    assert len(draft(policy, drafter)[0]) - 1 == 3
    policy.observe(step(DraftTree.root(0), 0))  # nothing was drafted: nothing is learned
    assert len(draft(policy, drafter)[0]) - 1 == 3
    assert len(draft(policy.fresh(), drafter)[0]) - 1 == 2


# specinfer


def test_specinfer_has_its_widths() -> None:
    tree, keep, passes = draft(registry.policy("specinfer", widths="2, 1,3"), TableDrafter(HAND))
    assert torch.bincount(tree.depth).tolist() == [1, 2, 2, 6]
    assert (len(keep), passes) == (11, 3)
    assert {p for p in paths(tree, keep) if len(p) <= 2} == {(1,), (2,), (1, 2), (2, 1)}


@pytest.mark.parametrize("widths", ["", "1,,2", "1,0", "2,x", "4,4,4,4,4,4"])
def test_specinfer_refuses(widths: str) -> None:
    with pytest.raises(InputError, match="widths must"):
        registry.policy("specinfer", widths=widths)


# static


@pytest.mark.parametrize(("name", "counts"), [("eagle-1", [4, 8, 8, 3, 2]), ("medusa", [10, 28, 23, 2])])
def test_published_shapes(name: str, counts: list[int]) -> None:
    tree, keep, passes = draft(registry.policy("static", shape=name), TableDrafter(random_table(12, 0)))
    assert torch.bincount(tree.select(keep).depth).tolist() == [1, *counts]
    assert passes == len(counts)
    assert ranks(tree, keep) == set(SHAPES[name].paths)


def test_static_by_hand() -> None:
    """The root's two best are 1 and 2; the best child of 1 is 2; the third child of 2 (1 .5, 3 .4, 2 .1) is 2."""
    policy = registry.policy("static", shape="[[0],[1],[0,0],[1,2]]")
    tree, keep, _ = draft(policy, TableDrafter(HAND))
    assert paths(tree, keep) == {(1,), (2,), (1, 2), (2, 2)}


def test_static_takes_what_there_is() -> None:
    """A drafter with fewer children than the shape wants: their subtrees are missing, nothing else."""
    tree, keep, _ = draft(registry.policy("static", shape="eagle-1"), TableDrafter(SURE))
    assert ranks(tree, keep) == {(0,) * n for n in range(6)}


def test_static_from_accuracies() -> None:
    """.6, .36 (00), .2 (1), .18 (01), .12 (10), .06 (11)."""
    accuracy = "[[0.6,0.2],[0.6,0.3]]"
    for nodes, expected in [(1, {(0,)}), (3, {(0,), (0, 0), (1,)}), (4, {(0,), (0, 0), (1,), (0, 1)})]:
        tree, keep, _ = draft(registry.policy("static", accuracy=accuracy, nodes=nodes), TableDrafter(HAND))
        assert ranks(tree, keep) - {()} == expected
    assert len(grow_by_product(((0.6, 0.2), (0.6, 0.3)), 99)) == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shape": "eagle"}, r"shape is eagle-1 or medusa, or else it must be a list of lists"),
        ({"shape": "[[0],[1,0]]"}, r"the tree has \[1, 0\] without its parent \[1\]"),
        ({"shape": "[[-1]]"}, "must hold ranks"),
        ({"shape": "[0, 1]"}, "must be a list of lists"),
        ({"shape": "medusa", "nodes": 30}, "the tree has 63 nodes; nodes allows 30"),
        ({"accuracy": "[[2.0]]"}, "accuracy must hold probabilities"),
    ],
)
def test_static_refuses(settings: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        registry.policy("static", **settings)


# sequoia


def ordered_trees(nodes: int, width: int, depth: int) -> Iterator[list[Path]]:
    """Every tree of rank paths with this many nodes, at most `width` children a node and `depth` levels of children."""

    def forests(left: int, rank: int, levels: int) -> Iterator[list[Path]]:
        if left == 0:
            yield []
        if left == 0 or rank == width or levels == 0:
            return
        for size in range(1, left + 1):
            for below, rest in itertools.product(
                list(forests(size - 1, 0, levels - 1)), list(forests(left - size, rank + 1, levels))
            ):
                yield [(rank,), *((rank, *path) for path in below), *rest]

    for forest in forests(nodes - 1, 0, depth):
        yield [(), *forest]


def expected_tokens(tree: list[Path], acceptance: tuple[float, ...]) -> float:
    return sum(math.prod(acceptance[rank] for rank in path) for path in tree)


@pytest.mark.parametrize("acceptance", [(0.6, 0.2, 0.1), (0.9, 0.05, 0.04), (0.34, 0.33, 0.33), (0.1, 0.5, 0.0)])
def test_sequoia_is_the_best_of_all_trees(acceptance: tuple[float, ...]) -> None:
    plan = BestTrees(acceptance, 7, 4)
    for nodes, depth in itertools.product(range(1, 8), range(1, 5)):
        values = [expected_tokens(tree, acceptance) for tree in ordered_trees(nodes, 3, depth)]
        if not values:
            assert plan.best[depth][nodes] < 0
            continue
        assert plan.best[depth][nodes] == pytest.approx(max(values))
        rebuilt = plan.paths(nodes, depth)
        assert len(set(rebuilt)) == nodes and max(map(len, rebuilt)) <= depth
        assert expected_tokens(rebuilt, acceptance) == pytest.approx(max(values))


def test_sequoia_by_hand() -> None:
    """Four rows, acceptance .6 .3: the chain has 1 + .6 + .36 + .216, two of it and a sibling 1 + .6 + .36 + .3."""
    policy = registry.policy("sequoia", acceptance="0.6,0.3", nodes=4, depth=3, sizing="largest")
    tree, keep, passes = draft(policy, TableDrafter(HAND))
    assert ranks(tree, keep) == {(), (0,), (0, 0), (1,)}
    assert passes == 2


def test_sequoia_takes_the_quickest_size() -> None:
    """Brute force over sizes and depths; nothing at all where verifying more than one row is dear."""
    acceptance, costs = (0.6, 0.2, 0.1), Costs.simple(0.1, (1, 16), (1.0, 1.5))
    plan = BestTrees(acceptance, 16, 5)
    found = min(
        (passes * 0.1 + costs.verify(rows, 0)) / plan.best[passes][rows]
        for rows, passes in itertools.product(range(1, 17), range(6))
        if plan.best[passes][rows] > 0
    )
    shape = quickest(acceptance, 16, 5, costs, 256)
    passes = max(map(len, shape.paths))
    tokens = expected_tokens(list(shape.paths), acceptance)
    assert (passes * 0.1 + costs.verify(len(shape), 0)) / tokens == pytest.approx(found)
    dear = Costs.simple(0.1, (1, 2, 64), (1.0, 3.0, 99.0))
    tree, keep, _ = draft(registry.policy("sequoia"), TableDrafter(HAND), costs=dear)
    assert (len(tree), keep.tolist()) == (1, [0])


def test_sequoia_of_128_nodes_is_cached() -> None:
    shape = largest((0.6, 0.14, 0.07, 0.04, 0.03), 128, 9)
    assert len(shape) == 128
    assert largest((0.6, 0.14, 0.07, 0.04, 0.03), 128, 9) is shape


@pytest.mark.parametrize("acceptance", ["", "a,b", "0.9,0.9", "-1", "nan"])
@pytest.mark.parametrize("name", ["sequoia", "gt-static"])
def test_acceptance_must_be_probabilities(name: str, acceptance: str) -> None:
    with pytest.raises(InputError, match="acceptance must be"):
        registry.policy(name, acceptance=acceptance)


# gt-static


@pytest.mark.parametrize("c", [0.3, 0.11, 0.05, 0.02])
@pytest.mark.parametrize("vector", [(0.6, 0.2, 0.1), (0.5, 0.05, 0.3)])
def test_gt_static_is_the_threshold_set(vector: tuple[float, ...], c: float) -> None:
    eps = 0.001
    policy = registry.policy("gt-static", acceptance=",".join(map(str, vector)), c=c, eps=eps)
    tree, keep, _ = draft(policy, TableDrafter(random_table(8, 1)))
    everything = (path for n in range(9) for path in itertools.product(range(3), repeat=n))
    expected = {path for path in everything if math.prod(vector[rank] for rank in path) > c - eps}
    assert ranks(tree, keep) == expected
    assert max(map(len, expected)) == math.floor(math.log(c - eps) / math.log(vector[0]))
    assert sum(len(path) == 1 for path in expected) == sum(p > c - eps for p in vector)


def test_gt_static_measures_c_and_stays_bounded() -> None:
    drafter = TableDrafter(random_table(8, 1))
    vector = "0.6,0.2,0.1"
    tree, keep, _ = draft(registry.policy("gt-static", acceptance=vector), drafter)  # ASSUMED: c = 0.1
    other, kept, _ = draft(registry.policy("gt-static", acceptance=vector, c=0.1), drafter)
    assert paths(tree, keep) == paths(other, kept)
    tree, keep, _ = draft(registry.policy("gt-static", acceptance="1.0", c=0, cap=7), drafter)
    assert len(keep) == 8
    _, keep, _ = draft(registry.policy("gt-static", acceptance=vector, c=0, nodes=20), drafter)
    assert len(keep) == 21
    table = registry.policy("gt-static", acceptance="[[0.6,0.2],[0.5,0.3]]", c=0.11)
    assert ranks(*draft(table, drafter)[:2]) == {(), (0,), (1,), (0, 0), (0, 1)}  # .6 .2 .3 .18; (1, 0) is .1


# gt


def test_gt_by_hand() -> None:
    """Best paths: .6, .42, .21, .147, .0735. With c = .2 the fourth level falls short: drafted, not verified."""
    tree, keep, passes = draft(registry.policy("gt", c=0.2, k=2), TableDrafter(HAND))
    assert passes == 4
    assert int(tree.select(keep).depth.max()) == 3
    assert len(keep) == 7  # three levels of two
    assert paths(tree, keep) == {(1,), (2,), (1, 2), (2, 1), (1, 2, 1), (1, 2, 3)}
    _, keep, passes = draft(registry.policy("gt", c=0.2, k=2, count_last=True), TableDrafter(HAND))
    assert (passes, len(keep)) == (4, 9)
    _, keep, passes = draft(registry.policy("gt", c=0.25, eps=0.05, k=2, nodes=3), TableDrafter(HAND))
    assert (passes, len(keep)) == (4, 4)
    _, keep, passes = draft(registry.policy("gt", c=0.0, k=2, cap=6), TableDrafter(HAND))
    assert (passes, len(keep)) == (6, 13)


def test_gt_decodes_plainly_where_nothing_is_worth_it() -> None:
    _, keep, passes = draft(registry.policy("gt", c=0.7), TableDrafter(HAND))
    assert (passes, keep.tolist()) == (1, [0])
    _, keep, _ = draft(registry.policy("gt", c=1.5), TableDrafter(SURE))
    assert keep.tolist() == [0]


@pytest.mark.parametrize(
    ("alpha", "c", "by_rule", "best", "speeds"), [(0.8, 0.1, 10, 6, (2.285, 2.470)), (0.9, 0.05, 28, 13, (3.97, 4.67))]
)
def test_gt_rule_is_not_the_optimum(
    alpha: float, c: float, by_rule: int, best: int, speeds: tuple[float, float]
) -> None:
    """Chains: alpha**n > c gives the paper's length; the fastest length is where alpha**n > c * S with S its speed."""

    def speed(length: int) -> float:
        return sum(alpha**n for n in range(length + 1)) / (1 + c * length)

    rule = max(n for n in range(99) if alpha**n > c)
    fastest = max(range(99), key=speed)
    corrected = max(n for n in range(99) if alpha**n > c * speed(fastest))
    assert rule == by_rule and fastest == corrected == best
    assert (speed(rule), speed(fastest)) == pytest.approx(speeds, abs=0.006)


def test_gt_learns_the_speed_up() -> None:
    """c*S: a chain of acceptance .8 settles at the fastest length, with costs assumed or measured."""
    sure = torch.full((2, 2), 0.8)
    sure[:, 0] = 0.2
    rows = Costs.simple(0.01, (1, 2), (0.1, 0.1))  # measured: c = 0.1, verifying costs the same for all sizes
    for costs, seconds in [(rows, True), (rows, False)]:
        policy = registry.policy("gt", k=1, threshold="c*S", eta=0.5)
        for _ in range(30):
            tree, keep, passes = draft(policy, TableDrafter(sure), costs=costs)
            kept = tree.select(keep)
            tokens = float(kept.score.exp().sum())  # the expected tokens of this chain
            split = Split(draft=0.01 * passes, verify=0.1) if seconds else Split()
            cycle = step(kept, round(tokens) - 1, passes, split)
            policy.observe(cycle)
        assert 4 <= len(keep) - 1 <= 7
    tree, keep, _ = draft(registry.policy("gt", k=1), TableDrafter(sure), costs=rows)
    assert len(keep) - 1 == 10


def test_gt_without_measured_costs_models_the_speed_up() -> None:
    """Real seconds must not be compared with costs that were only assumed."""
    policy = registry.policy("gt", k=1, threshold="c*S", eta=1.0)
    tree, keep, _ = draft(policy, TableDrafter(SURE), room=8)
    policy.observe(step(tree.select(keep), 3, 4, Split(verify=1e-6)))
    assert policy._speedup == pytest.approx(4 / (4 * 0.1 + ASSUMED.verify(len(keep), 10)))


def test_gt_ignores_cycles_that_captured_graphs() -> None:
    policy, costs = registry.policy("gt", k=1, threshold="c*S"), Costs.simple(0.01, (1, 2), (0.1, 0.1))
    tree, keep, _ = draft(policy, TableDrafter(SURE), costs=costs, room=8)
    cycle = step(tree.select(keep), 3, 4, Split(verify=9.0))
    policy.observe(replace(cycle, recorded=True))
    assert policy._speedup == 1
    policy.observe(cycle)
    assert policy._speedup < 1


def test_gt_on_independent_levels() -> None:
    """Medusa-like heads: every node of a level has the same successors. k=2, levels .6/.3, .5/.4, then .2/.2."""
    heads = LevelDrafter([[0.0, 0.6, 0.3, 0.1], [0.0, 0.4, 0.5, 0.1], [0.4, 0.2, 0.2, 0.2], [0.25] * 4])
    tree, keep, passes = draft(registry.policy("gt", c=0.11, k=2), heads)
    assert paths(tree, keep) >= {(1,), (2,), (1, 2), (1, 1)}
    assert (passes, len(keep)) == (4, 7)  # .6, .3, then .12, then .03: three levels count
    found = {(a, b): p * q for (a, p), (b, q) in itertools.product(enumerate([0.6, 0.3, 0.1], 1), [(2, 0.5), (1, 0.4)])}
    two = registry.policy("opt-tree", nodes=4, depth=2, threshold=0)
    assert paths(*draft(two, heads)[:2]) == likeliest({(1,): 0.6, (2,): 0.3, (3,): 0.1} | found, 4)


# opt-tree


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("nodes", [1, 5, 12])
def test_opt_tree_is_the_best_of_its_depth(seed: int, nodes: int) -> None:
    table = random_table(5, seed)
    policy = registry.policy("opt-tree", nodes=nodes, threshold=0, depth=4)
    tree, keep, passes = draft(policy, TableDrafter(table))
    assert paths(tree, keep) == likeliest(all_paths(table, 4), nodes)
    assert passes <= 4


def test_opt_tree_stops_when_a_layer_adds_little() -> None:
    """Four nodes. Layer 1 brings 1.0 (.6 .3 .1); with layer 2 the best are .6 .42 .3 .15 = 1.47; then .6 .42 .3 .21."""
    _, keep, passes = draft(registry.policy("opt-tree", nodes=4, threshold=0.5), TableDrafter(HAND))
    assert (passes, len(keep)) == (2, 5)
    tree, keep, passes = draft(registry.policy("opt-tree", nodes=4, threshold=0.46), TableDrafter(HAND))
    assert passes == 3
    assert paths(tree, keep) == {(1,), (1, 2), (2,), (1, 2, 1)}


def test_opt_tree_as_released_wastes_a_layer() -> None:
    """Its third pass decides on layer 2 alone, stops there, and keeps layers 1 and 2."""
    clean = draft(registry.policy("opt-tree", nodes=4, threshold=0.5), TableDrafter(HAND))
    literal = draft(registry.policy("opt-tree", nodes=4, threshold=0.5, literal=True), TableDrafter(HAND))
    assert (clean[2], literal[2]) == (2, 3)
    assert paths(*clean[:2]) == paths(*literal[:2])


# optimal


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("nodes", "beams"), [(1, 1), (5, 1), (12, 3), (20, 128)])
def test_optimal_finds_the_likeliest_paths_of_all(seed: int, nodes: int, beams: int) -> None:
    table = random_table(4, seed)
    policy = registry.policy("optimal", nodes=nodes, beams=beams, steps=99, decay=1)
    tree, keep, _ = draft(policy, TableDrafter(table))
    chosen = sorted(tree.score[keep].exp().tolist())[:-1]  # without the root; as numbers, since paths can tie
    heap, expected = [(-1.0, 0)], []
    while len(expected) <= nodes:  # one node at a time, every child of it: the whole infinite tree in order
        q, last = heapq.heappop(heap)
        expected.append(-q)
        for token, probability in enumerate(table[last].tolist()):
            heapq.heappush(heap, (q * probability, token))
    assert chosen == pytest.approx(sorted(expected[1:]))


def test_optimal_expands_at_mixed_depths_and_stops_early() -> None:
    """Pass 1: 1 (.6) 2 (.3) 3 (.1). Pass 2, one beam: below 1. Pass 3: below 12 (.42), not below 2. Full at .21."""
    policy = registry.policy("optimal", nodes=4, beams=1, decay=1)
    tree, keep, passes = draft(policy, TableDrafter(HAND))
    assert paths(tree, keep) == {(1,), (1, 2), (2,), (1, 2, 1)}
    assert passes == 4  # the last looks below 2, which could still have brought more than .21
    assert draft(registry.policy("optimal", nodes=4, beams=1, decay=1, steps=2), TableDrafter(HAND))[2] == 2
    assert draft(registry.policy("optimal", nodes=4, beams=9, decay=1), TableDrafter(HAND))[2] == 3


def test_optimal_with_decay_prefers_the_shallow() -> None:
    """Halving every level: .3 .15 .05 | .105 .0375 ... | .026: 3 (.05) comes before 21 (.0375)."""
    tree, keep, _ = draft(registry.policy("optimal", nodes=4, decay=0.5), TableDrafter(HAND))
    assert paths(tree, keep) == {(1,), (2,), (1, 2), (3,)}


def test_searches_keep_parents_under_ties() -> None:
    certain = SURE.clone()
    certain[0] = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])  # not a distribution, but a tie of four
    for name, nodes in itertools.product(["gt", "opt-tree", "optimal"], range(1, 12)):
        extra = {"decay": 1} if name == "optimal" else {}
        tree, keep, _ = draft(registry.policy(name, nodes=nodes, **extra), TableDrafter(certain), room=6)
        tree.select(keep).check()


# presets


@pytest.mark.parametrize("name", registry.presets())
def test_presets_build_and_draft(name: str) -> None:
    policy = registry.preset(name)
    chosen, settings, source = registry.PRESETS[name]
    assert isinstance(policy, registry.policy_class(chosen)) and source
    assert all(getattr(policy, key) == value for key, value in settings.items())
    tree, keep, _ = draft(policy, TableDrafter(random_table(12, 0)))
    tree.select(keep).check()


def test_presets_take_changes_and_refuse_unknown_options() -> None:
    assert registry.preset("eagle-2", nodes=30).nodes == 30
    with pytest.raises(InputError, match="no preset 'eagle-9'; choose from eagle-1, medusa"):
        registry.preset("eagle-9")


def test_shapes_know_their_places() -> None:
    shape = Shape([(0,), (1,), (0, 1)])
    assert shape.paths == ((), (0,), (1,), (0, 1))
    assert shape.levels == [{0: 2}, {1: 2}]
