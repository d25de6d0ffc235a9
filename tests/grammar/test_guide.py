"""The guide: draft trees without illegal nodes, forced text, and moving between branches."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from helpers.grammars import END, SCHEMA, TOKENS, guide, ids
from windfall.core.constraint import BACKENDS, Constraint
from windfall.core.tree import DraftTree
from windfall.grammar.guide import ILLEGAL_LOGQ, MAX_FORCED_NODES

both = pytest.mark.parametrize("name", BACKENDS)


def tree_of(*edges: tuple[int, int]) -> DraftTree:
    """A tree from (parent, token) of each node after the root."""
    tree = DraftTree.root(0)
    for parent, token in edges:
        logq, rank = np.full(1, -0.5, np.float32), np.zeros(1, np.int64)
        tree = tree.append(np.array([parent]), np.array([token]), logq, rank)
    return tree


def token(text: str) -> int:
    return TOKENS.index(text)


@both
def test_illegal_nodes_of_a_tree_are_pruned_with_what_follows_them(name: str) -> None:
    """Siblings follow different branches: their masks are not those of a chain."""
    text = guide(Constraint.regex("(ab|ca)c*d"), name)
    a, b, c, d = ids("abcd")
    text.begin([])
    tree = tree_of((0, a), (0, b), (0, c), (1, b), (1, a), (3, a), (3, b), (2, a), (4, c), (4, d), (6, d))
    rated = text.rate(tree)
    legal = [node for node in range(len(tree)) if text.allows(node)]
    assert legal == [0, 1, 3, 4, 6, 9, 10, 11]
    assert text.prune(torch.tensor([0, 1, 2, 3, 5, 9])).tolist() == [0, 1, 3, 9]
    illegal = [node for node in range(len(tree)) if node not in legal]
    assert (rated.logq[illegal] == ILLEGAL_LOGQ).all() and (rated.score[illegal] < ILLEGAL_LOGQ / 2).all()
    assert torch.equal(rated.logq[legal], tree.logq[legal]) and torch.equal(rated.tokens, tree.tokens)


@both
def test_a_tree_is_rated_pass_by_pass(name: str) -> None:
    text = guide(Constraint.regex("[ad][bc]"), name)
    text.begin([])
    first = text.rate(tree_of((0, token("a")), (0, token("b"))))
    again = first.append(np.array([1, 2]), np.array(ids("bb")), np.zeros(2, np.float32), np.zeros(2, np.int64))
    rated = text.rate(again)
    assert [text.allows(node) for node in range(5)] == [True, True, False, True, False]
    assert rated.score[2] == first.score[2] and rated.score[4] < -2e4 + 10


@both
def test_nothing_follows_the_end_of_a_text_in_a_tree(name: str) -> None:
    text = guide(Constraint.regex("a*"), name)
    text.begin([])
    text.rate(tree_of((0, END), (1, token("a")), (1, END), (0, token("a")), (4, END)))
    assert [text.allows(node) for node in range(6)] == [True, True, False, False, True, True]


@both
def test_forced_text_becomes_nodes(name: str) -> None:
    text = guide(Constraint.regex("(ab|cd)eee[0-9]"), name)
    text.begin([])
    tree = text.rate(tree_of((0, token("a")), (0, token("c"))))
    grown, kept = text.add_forced(tree, torch.tensor([0, 1, 2]), room=50)
    grown.check()
    paths = {"".join(TOKENS[t] for t in grown.tokens[grown.path(node)[1:]].tolist()) for node in kept.tolist()}
    assert paths == {"", "a", "ab", "abe", "abee", "abeee", "c", "cd", "cde", "cdee", "cdeee"}
    assert (grown.logq[3:] == 0).all() and len(tree) == 3
    again, same = text.add_forced(grown, kept, room=50)  # there is nothing to add
    assert len(again) == len(grown) and torch.equal(same, kept)


@both
def test_forced_text_takes_the_room_that_there_is(name: str) -> None:
    text = guide(Constraint.regex("e{60}"), name)
    text.begin([])
    grown, kept = text.add_forced(DraftTree.root(0), torch.tensor([0]), room=6)
    assert len(grown) == len(kept) == 6  # the sixth token is the target's own
    grown, _ = text.add_forced(DraftTree.root(0), torch.tensor([0]), room=100)
    assert len(grown) <= MAX_FORCED_NODES + 1


@both
def test_the_guide_goes_on_from_any_text(name: str) -> None:
    """After it was on other branches, and for a text that another guide has begun."""
    schema, choose = Constraint.json_schema(SCHEMA), random.Random(1)
    text, written = guide(schema, name), list[int]()
    for _ in range(20):
        allowed = [each for each in np.flatnonzero(text.mask()).tolist() if each != END]
        for other in choose.sample(allowed, min(3, len(allowed))):
            text.go_to([other])
        written.append(choose.choice(allowed))
        text.follow(written)
        fresh = guide(schema, name)
        fresh.follow(written)
        assert (text.mask() == fresh.mask()).all()
        if text.over:
            break
    assert len(written) > 5
