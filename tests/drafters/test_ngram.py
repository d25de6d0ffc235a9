"""The n-gram drafter against brute force over the text."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windfall import registry
from windfall.core.tree import DraftTree
from windfall.core.types import Grow, InputError
from windfall.drafters.ngram import DOUBT, NGramDrafter, SuffixAutomaton, blend

LIMIT = 4
ALL = 100  # children asked for where every candidate is wanted
METHODS = ["suffix", "lookup"]
texts = st.lists(st.integers(0, 2), max_size=40)


def followers(text: list[int], tail: list[int]) -> dict[int, list[int]]:
    """What followed a tail inside a text: token → the positions it followed at."""
    size = len(tail)
    found: dict[int, list[int]] = {}
    for place in range(len(text) - size):
        if text[place : place + size] == tail:
            found.setdefault(text[place + size], []).append(place + size)
    return found


def longest_match(text: list[int], context: list[int], limit: int) -> int:
    """The longest tail of the context, up to the limit, that stands somewhere in the text."""
    for size in range(min(limit, len(context)), 0, -1):
        tail = context[len(context) - size :]
        if any(text[place : place + size] == tail for place in range(len(text) - size + 1)):
            return size
    return 0


def mixture(text: list[int], context: list[int], shortest: int, limit: int) -> dict[int, float]:
    """The blended distribution, one length after another."""
    mass: dict[int, float] = {}
    weight = 1.0
    for size in range(min(limit, len(context)), shortest - 1, -1):
        found = followers(text, context[len(context) - size :])
        seen, doubt = sum(map(len, found.values())), DOUBT * len(found)
        for token, places in found.items():
            mass[token] = mass.get(token, 0.0) + weight * len(places) / (seen + doubt)
        weight *= doubt / (seen + doubt) if found else 1.0
    return mass


def started(tokens: list[int], **settings: int | str) -> NGramDrafter:
    drafter = NGramDrafter(**settings)  # type: ignore[arg-type]
    drafter.start([tokens], None, [None])
    return drafter


def expand(drafter: NGramDrafter, tree: DraftTree, nodes: list[int], k: int = ALL) -> DraftTree:
    return drafter.expand([tree], [Grow(torch.tensor(nodes), k)])[0]


def hang(tree: DraftTree, parent: int, token: int) -> DraftTree:
    """The tree with a child that no drafter proposed."""
    return tree.extend(torch.tensor([parent]), torch.tensor([token]), torch.zeros(1), torch.tensor([0]))


def grown(drafter: NGramDrafter, root: int, levels: int = 3, k: int = ALL) -> DraftTree:
    """A tree expanded level by level."""
    tree = drafter.begin([root])[0]
    for level in range(levels):
        nodes = torch.nonzero(tree.depth == level).flatten().tolist()
        tree = expand(drafter, tree, nodes, k) if nodes else tree
    return tree


def chances(tree: DraftTree, parent: int = 0) -> dict[int, float]:
    """The children of a node, best first, with their probabilities."""
    nodes = torch.nonzero(tree.parents == parent).flatten()
    ordered = nodes[torch.argsort(tree.rank[nodes])]
    return dict(zip(tree.tokens[ordered].tolist(), tree.logq[ordered].exp().tolist(), strict=True))


def by_path(tree: DraftTree) -> dict[tuple[int, ...], tuple[float, int]]:
    """The tree regardless of the order of its nodes."""
    paths = [tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))]
    return dict(zip(paths, zip(tree.logq.tolist(), tree.rank.tolist(), strict=True), strict=True))


@given(texts)
def test_automaton_knows_the_longest_repeated_tail(text: list[int]) -> None:
    automaton = SuffixAutomaton(LIMIT)
    for end, token in enumerate(text):
        automaton.extend(token)
        assert automaton.tail.length == longest_match(text[:end], text[: end + 1], LIMIT)


@given(texts)
def test_automaton_knows_what_followed_every_tail(text: list[int]) -> None:
    automaton = SuffixAutomaton(LIMIT, text)
    state, length = automaton.tail
    for size in range(length, 0, -1):
        if size <= automaton.length[automaton.link[state]]:
            state = automaton.link[state]
        found = followers(text, text[len(text) - size :])
        follow = automaton.follow[state]
        assert {token: automaton.count[after] for token, after in follow.items()} == {
            token: len(places) for token, places in found.items()
        }
        assert {token: automaton.latest[after] for token, after in follow.items()} == {
            token: places[-1] + 1 for token, places in found.items()
        }


@given(texts, texts)
def test_steps_follow_a_text_that_is_not_taken_in(text: list[int], path: list[int]) -> None:
    automaton = SuffixAutomaton(LIMIT, text)
    size, cursor = len(automaton.link), automaton.tail
    for end, token in enumerate(path):
        cursor = automaton.step(cursor, token)
        assert cursor.length == longest_match(text, text + path[: end + 1], LIMIT)
    assert len(automaton.link) == size


@given(texts, texts, st.integers(1, LIMIT))
def test_blend_is_the_mixture_over_all_lengths(text: list[int], path: list[int], shortest: int) -> None:
    automaton = SuffixAutomaton(LIMIT, text)
    cursor = automaton.tail
    for token in path:
        cursor = automaton.step(cursor, token)
    found = blend(automaton, cursor, shortest)
    assert dict(found) == pytest.approx(mixture(text, text + path, shortest, LIMIT), abs=1e-12)
    assert [chance for _, chance in found] == sorted((chance for _, chance in found), reverse=True)
    assert sum(chance for _, chance in found) <= 1


@pytest.mark.parametrize("method", METHODS)
def test_several_continuations_give_several_children(method: str) -> None:
    text = [1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 4, 7, 1, 2]
    tree = grown(started(text, method=method), root=2, levels=1)
    tree.check()
    assert list(chances(tree)) == [4, 3]
    assert chances(tree)[4] > chances(tree)[3]
    assert tree.rank.tolist() == [0, 0, 1]


def test_lookup_prefers_the_latest_and_suffix_the_most_frequent() -> None:
    text = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]
    assert list(chances(grown(started(text, method="suffix"), root=2, levels=1))) == [3, 4]
    assert list(chances(grown(started(text, method="lookup"), root=2, levels=1))) == [4, 3]


def test_ties_go_to_the_latest_occurrence() -> None:
    text = [token for follower in (30, 10, 50, 20, 40) for token in (1, 2, follower, follower + 1)] + [1, 2]
    tree = grown(started(text), root=2, levels=1)
    assert len(set(chances(tree).values())) == 1
    assert list(chances(tree)) == [40, 20, 50, 10, 30]
    assert list(chances(grown(started(text), root=2, levels=1, k=2))) == [40, 20]


def test_confidence_grows_with_the_match_and_with_the_count() -> None:
    short = chances(grown(started([1, 2, 5, 9, 1, 2]), root=2, levels=1))
    longer = chances(grown(started([0, 1, 2, 5, 9, 0, 1, 2]), root=2, levels=1))
    again = chances(grown(started([1, 2, 5, 9, 1, 2, 5, 8, 1, 2]), root=2, levels=1))
    assert short[5] < longer[5] < 1
    assert short[5] < again[5] < 1


@pytest.mark.parametrize("method", METHODS)
def test_a_longer_match_outranks_a_shorter_one(method: str) -> None:
    text = [7, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2, 4, 7, 1, 2]
    assert next(iter(chances(grown(started(text, method=method, max_match=3), root=2, levels=1)))) == 3
    assert next(iter(chances(grown(started(text, method=method, max_match=2), root=2, levels=1)))) == 4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("text", [[5], [1, 2, 3], [1, 2, 3, 1]])
def test_without_a_match_nothing_is_drafted(method: str, text: list[int]) -> None:
    drafter = started(text, method=method)
    tree = drafter.begin([text[-1]])[0]
    assert expand(drafter, tree, [0]) is tree


def test_one_token_of_context_is_enough_if_asked() -> None:
    assert list(chances(grown(started([1, 2, 3, 1], min_match=1), root=1, levels=1))) == [2]


def test_a_sequence_without_a_grow_request_keeps_its_tree() -> None:
    drafter = NGramDrafter()
    drafter.start([[1, 2, 3, 1, 2], [1, 2, 3, 1, 2]], None, [None] * 2)
    trees = drafter.begin([2, 2])
    grown_trees = drafter.expand(trees, [None, Grow(torch.tensor([0]), 4)])
    assert grown_trees[0] is trees[0]
    assert len(grown_trees[1]) == 2


def test_a_repeating_text_is_drafted_to_any_depth() -> None:
    tree = grown(started([1, 2, 3] * 3), root=3, levels=12, k=1)
    assert tree.tokens.tolist() == [3, *[1, 2, 3] * 4]


@given(texts.filter(bool), st.sampled_from(METHODS))
def test_mixed_depths_equal_one_node_at_a_time(text: list[int], method: str) -> None:
    drafter = started(text, method=method, min_match=1)
    tree = grown(drafter, text[-1], levels=1)
    if len(tree) > 1:
        tree = expand(drafter, tree, [1])  # leaves of depth 1 beside leaves of depth 2
    open_nodes = sorted(set(range(1, len(tree))) - set(tree.parents.tolist()))
    together = expand(drafter, tree, open_nodes)
    for node in reversed(open_nodes):
        tree = expand(drafter, tree, [node])
    assert by_path(tree) == by_path(together)


@settings(max_examples=50)
@given(texts.filter(bool), st.lists(st.integers(0, 2), max_size=5), st.integers(1, LIMIT))
def test_a_nodes_context_is_the_committed_text_and_its_path(text: list[int], path: list[int], shortest: int) -> None:
    drafter = started(text, min_match=shortest, max_match=LIMIT)
    tree = drafter.begin([text[-1]])[0]
    for node, token in enumerate(path):
        tree = hang(tree, node, token)
    drafted = chances(expand(drafter, tree, [len(path)]), len(path))
    assert drafted == pytest.approx(mixture(text, text + path, shortest, LIMIT), rel=1e-5)

    after = started(text + path, min_match=shortest, max_match=LIMIT)
    assert set(drafted) <= set(chances(grown(after, (text + path)[-1], levels=1)))


def test_a_nodes_children_are_those_of_the_root_after_committing() -> None:
    text = [1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 9, 1, 2]
    drafter = started(text)
    tree = grown(drafter, root=2, levels=2)
    below = chances(tree, 1)  # the first child is 3
    assert list(below) == [6, 4]
    drafter.commit([tree], [torch.tensor([0])], [3], None)
    assert list(chances(grown(drafter, root=3, levels=1))) == list(below)


def test_commit_takes_the_path_and_the_bonus() -> None:
    text = [1, 2, 3, 4, 1, 2]
    drafter = started(text)
    tree = grown(drafter, root=2, levels=2)
    assert tree.tokens.tolist() == [2, 3, 4]
    drafter.commit([tree], [torch.tensor([0, 1, 2])], [8], None)
    fresh = started([*text, 3, 4, 8])
    for name in ("follow", "link", "length", "count", "latest", "tail"):
        assert getattr(drafter.histories[0].text, name) == getattr(fresh.histories[0].text, name)


@given(texts.filter(bool), st.sampled_from(METHODS))
def test_probabilities_of_a_nodes_children_sum_to_at_most_one(text: list[int], method: str) -> None:
    tree = grown(started(text, method=method, min_match=1), text[-1], levels=2)
    tree.check()
    for node in range(len(tree)):
        assert math.fsum(chances(tree, node).values()) <= 1 + 1e-6


def test_no_node_is_more_likely_than_its_parent_where_rounding_adds_up_to_more_than_1() -> None:
    text = [7] * 46
    automaton = SuffixAutomaton(16, text)
    assert blend(automaton, automaton.tail, 2) == [(7, 1.0)]
    tree = grown(started(text), root=7, levels=8, k=1)
    assert (tree.score[1:] <= tree.score[tree.parents[1:]]).all()


@given(texts.filter(bool), st.sampled_from(METHODS))
def test_drafting_is_deterministic_and_leaves_no_trace(text: list[int], method: str) -> None:
    drafter = started(text, method=method)
    first, second = grown(drafter, text[-1]), grown(drafter, text[-1])
    other = grown(started(text, method=method), text[-1])
    for name in ("tokens", "parents", "logq", "rank"):
        assert torch.equal(getattr(first, name), getattr(second, name))
        assert torch.equal(getattr(first, name), getattr(other, name))


def test_begin_forgets_the_tree_before() -> None:
    drafter = started([1, 2, 3, 1, 2, 4, 1, 2])
    grown(drafter, root=2, levels=2)
    tree = drafter.begin([2])[0]
    tree = hang(tree, 0, 3)
    assert list(chances(expand(drafter, tree, [1]), 1)) == [1]


def test_retain_keeps_the_named_sequences_in_order() -> None:
    drafter = NGramDrafter()
    drafter.start(
        [[1, 2, 3, 1, 2], [1, 2, 4, 1, 2], [1, 2, 5, 1, 2]],
        None,
        [None] * 3,
    )
    drafter.retain([0, 2])
    trees = drafter.expand(drafter.begin([2, 2]), [Grow(torch.tensor([0]), 4)] * 2)
    assert [tree.tokens.tolist() for tree in trees] == [[2, 3], [2, 5]]


def test_options_are_checked() -> None:
    assert isinstance(registry.drafter("ngram", min_match="3", method="lookup"), NGramDrafter)
    with pytest.raises(InputError, match="min_match must be at most max_match"):
        NGramDrafter(min_match=5, max_match=4)
    with pytest.raises(InputError, match="one of suffix, lookup"):
        NGramDrafter(method="guess")
    with pytest.raises(InputError, match="at least 1"):
        NGramDrafter(min_match=0)
