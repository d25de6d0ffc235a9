"""Verification emits the target's distribution: every outcome of every draw is enumerated over three tokens."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from windfall.core.tree import DraftTree
from windfall.core.types import Verdict
from windfall.core.verify import walk

V = 3
SEEDS = range(3)
T = TypeVar("T")
Tokens = tuple[int, ...]
Table = dict[Tokens, Tensor]  # emitted tokens → distribution [V] of the next
Choose = Callable[[Tensor], int]  # probabilities [m], float64 → an index drawn from them


def outcomes(experiment: Callable[[Choose], T]) -> Iterator[tuple[float, T]]:
    """Every possible outcome of an experiment's random choices, with its probability."""
    unexplored: list[list[int]] = [[]]
    while unexplored:
        fixed = unexplored.pop()
        made: list[int] = []
        weight = 1.0

        def choose(probabilities: Tensor, fixed: list[int] = fixed, made: list[int] = made) -> int:
            nonlocal weight
            chances = probabilities.tolist()
            assert abs(sum(chances) - 1) < 1e-12
            if len(made) < len(fixed):
                pick = fixed[len(made)]
            else:
                pick, *others = [place for place, chance in enumerate(chances) if chance > 0]
                unexplored.extend([*made, other] for other in others)
            weight *= chances[pick]
            made.append(pick)
            return pick

        result = experiment(choose)
        yield weight, result


def random_table(seed: int, sharpness: float = 1.5) -> Table:
    generator = torch.Generator().manual_seed(seed)
    contexts = [tokens for size in range(3) for tokens in itertools.product(range(V), repeat=size)]
    rows = torch.randn(len(contexts), V, generator=generator, dtype=torch.float64) * sharpness
    return dict(zip(contexts, rows.softmax(1), strict=True))


def texts(tree: DraftTree) -> list[Tokens]:
    """The drafted tokens that lead to each node."""
    found: list[Tokens] = [()]
    for parent, token in zip(tree.parents.tolist()[1:], tree.tokens.tolist()[1:], strict=True):
        found.append((*found[parent], token))
    return found


def rows(table: Table, tree: DraftTree) -> Tensor:
    """[N, V]: the distribution after each node."""
    return torch.stack([table[text] for text in texts(tree)])


def hang(tree: DraftTree, parent: int, tokens: list[int]) -> DraftTree:
    count = len(tokens)
    return tree.extend(torch.full((count,), parent), torch.tensor(tokens), torch.zeros(count), torch.arange(count))


def top_tree(table: Table, widths: tuple[int, ...]) -> DraftTree:
    """Each node's likeliest children: a fixed function of the context."""
    return grown(widths, lambda text, width: table[text].argsort(descending=True)[:width].tolist())


def grown(widths: tuple[int, ...], propose: Callable[[Tokens, int], list[int]]) -> DraftTree:
    tree = DraftTree.root(0)
    for depth, width in enumerate(widths):
        for node in torch.nonzero(tree.depth == depth).flatten().tolist():
            tree = hang(tree, node, propose(texts(tree)[node], width))
    return tree


def emitted(tree: DraftTree, verdict: Verdict) -> Tokens:
    return (*tree.tokens[verdict.path[1:]].tolist(), verdict.bonus)


def first_three(p: Table, share: dict[Tokens, float]) -> Tensor:
    """[V, V, V]: the distribution of three tokens if the target itself completes what was emitted."""
    total = torch.zeros(V, V, V, dtype=torch.float64)
    for text in itertools.product(range(V), repeat=3):
        for size in range(4):
            rest = [p[text[:place]][text[place]] for place in range(size, 3)]
            total[text] += share.get(text[:size], 0.0) * torch.tensor(rest, dtype=torch.float64).prod()
    return total


def distance(p: Table, share: dict[Tokens, float]) -> float:
    """Total variation between what a rule emits and what the target does."""
    return float((first_three(p, share) - first_three(p, {(): 1.0})).abs().sum() / 2)


def emissions(experiment: Callable[[Choose], Tokens]) -> dict[Tokens, float]:
    share: dict[Tokens, float] = defaultdict(float)
    for weight, tokens in outcomes(experiment):
        share[tokens] += weight
    return share


def accepted(share: dict[Tokens, float]) -> float:
    """The mean number of accepted drafted tokens."""
    return sum(weight * (len(tokens) - 1) for tokens, weight in share.items())


def walk_rule(tree: DraftTree, target: Tensor, choose: Choose) -> Verdict:
    return walk(tree, lambda node: choose(target[node]))


def wrong(tree: DraftTree, target: Tensor, draft: Tensor, choose: Choose) -> Verdict:
    """A common mistake: treat the likeliest children as if they had been sampled."""
    path = [0]
    while True:
        residual, q = target[path[-1]], draft[path[-1]]
        for child in torch.nonzero(tree.parents == path[-1]).flatten().tolist():
            token = tree.tokens[child]
            chance = min(1.0, float(residual[token] / q[token]))
            if choose(torch.tensor([chance, 1 - chance], dtype=torch.float64)) == 0:
                path.append(child)
                break
            residual = (residual - q).clamp(min=0)
            residual = residual / residual.sum()
        else:
            return Verdict(torch.tensor(path), choose(residual))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("widths", [(), (1,), (2, 2), (3, 1)])
def test_walk_is_exact_on_fixed_trees(seed: int, widths: tuple[int, ...]) -> None:
    p, q = random_table(seed), random_table(seed + 100)
    tree = top_tree(q, widths)
    share = emissions(lambda choose: emitted(tree, walk_rule(tree, rows(p, tree), choose)))
    assert distance(p, share) < 1e-12
    on_tree = sum(_path_probability(p, text) for text in texts(tree)[1:])
    assert accepted(share) == pytest.approx(on_tree, abs=1e-12)


def _path_probability(p: Table, text: Tokens) -> float:
    return float(torch.stack([p[text[:place]][token] for place, token in enumerate(text)]).prod())


def test_the_wrong_rule_is_caught() -> None:
    p, q = random_table(0), random_table(100)
    tree = top_tree(q, (2, 2))
    share = emissions(lambda choose: emitted(tree, wrong(tree, rows(p, tree), rows(q, tree), choose)))
    assert distance(p, share) > 0.1


@pytest.mark.parametrize("order", list(itertools.permutations(range(V), 2)))
def test_a_fixed_child_is_accepted_with_its_target_probability(order: tuple[int, ...]) -> None:
    p = random_table(5)
    tree = hang(DraftTree.root(0), 0, list(order))
    share: dict[int, float] = defaultdict(float)
    for weight, verdict in outcomes(lambda choose: walk_rule(tree, rows(p, tree), choose)):
        share[int(verdict.path[-1])] += weight
    for child, token in enumerate(order, start=1):
        assert share[child] == pytest.approx(float(p[()][token]), abs=1e-15)


def test_an_empty_tree_is_plain_decoding() -> None:
    tree = DraftTree.root(2)
    p = torch.tensor([[0.2, 0.3, 0.5]])
    verdict = walk_rule(tree, p, lambda probabilities: 1)
    assert verdict.path.tolist() == [0]
    assert verdict.bonus == 1


def test_walk_asks_only_the_visited_nodes_in_order() -> None:
    tree = hang(hang(DraftTree.root(9), 0, [4, 5]), 2, [4, 6])
    asked: list[int] = []

    def draw(node: int) -> int:
        asked.append(node)
        return {0: 5, 2: 6, 4: 9}[node]

    verdict = walk(tree, draw)
    assert asked == verdict.path.tolist() == [0, 2, 4]
    assert verdict.bonus == 9


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    tree = DraftTree.root(0)
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(0, len(tree) - 1))
        free = _untried(tree, parent)
        if free:
            tree = hang(tree, parent, [draw(st.sampled_from(free))])
    return tree


def _untried(tree: DraftTree, parent: int) -> list[int]:
    return sorted(set(range(V + 1)) - set(tree.tokens[tree.parents == parent].tolist()))


@given(trees(), st.data())
def test_another_sibling_never_shortens_the_path(tree: DraftTree, data: st.DataObject) -> None:
    draws = data.draw(st.lists(st.integers(0, V), min_size=len(tree) + 1, max_size=len(tree) + 1))
    parent = data.draw(st.integers(0, len(tree) - 1))
    free = _untried(tree, parent)
    before = walk(tree, draws.__getitem__)
    if free:
        wider = hang(tree, parent, [data.draw(st.sampled_from(free))])
        after = walk(wider, draws.__getitem__)
        assert after.path.tolist()[: len(before.path)] == before.path.tolist()


@given(st.lists(st.integers(0, V), max_size=6), st.data())
def test_a_chain_is_the_tree_with_one_child_a_node(tokens: list[int], data: st.DataObject) -> None:
    draws = data.draw(st.lists(st.integers(0, V), min_size=len(tokens) + 1, max_size=len(tokens) + 1))
    tree = DraftTree.root(0)
    for node, token in enumerate(tokens):
        tree = hang(tree, node, [token])
    agree = [a == b for a, b in zip(tokens, draws, strict=False)]
    length = agree.index(False) if False in agree else len(agree)
    verdict = walk(tree, draws.__getitem__)
    assert verdict.path.tolist() == list(range(length + 1))
    assert verdict.bonus == draws[length]
