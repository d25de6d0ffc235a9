"""Draft from the text itself, without a model: what followed the last tokens where they occurred before.

The methods are prompt lookup (Saxena 2023) and suffix matching (SAM decoding, Hu et al. 2024). Several continuations
form a tree; their probabilities are blended over context lengths (PPM-C, Moffat 1990).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from windfall.core.options import option
from windfall.core.sampling import Dice
from windfall.core.tree import DraftTree
from windfall.core.types import Grow, InputError
from windfall.drafters.base import Drafter, add_children

MAX_CANDIDATES = 64  # continuations of one node
DOUBT = 3.0  # new continuations expected per distinct known one; PPM-C has 1, but 3 fits the text of models


class Cursor(NamedTuple):
    """A place in the automaton: the longest suffix of a text, up to the limit, that occurs in the automaton's text."""

    state: int
    length: int


START = Cursor(0, 0)
Candidates = list[tuple[int, float]]  # tokens and their probabilities, best first


class SuffixAutomaton:
    """Every substring of a growing text, with its count and its last position. Linear in the length of the text.

    A state stands for the substrings that end at the same places; its transitions are the tokens that followed them.
    Only suffixes of at most `limit` tokens are looked up. So `extend` counts along the suffix links from the longest
    repeated suffix of at most `limit + 1` tokens: few steps on any text, and exact counts for every lookup.
    """

    def __init__(self, limit: int, tokens: Sequence[int] = ()) -> None:
        self.limit = limit
        self.follow: list[dict[int, int]] = [{}]  # transitions: token → state
        self.link: list[int] = [-1]  # suffix link: the state of the longest shorter suffix that ends at more places
        self.length: list[int] = [0]  # the longest substring of the state
        self.count: list[int] = [0]  # occurrences of its substrings
        self.latest: list[int] = [0]  # where they last ended
        self.tail = START  # the longest suffix of the text that occurred before, up to the limit
        self._repeated = START  # the same, up to one token more
        self._end = 0  # the state of the whole text
        for token in tokens:
            self.extend(token)

    def extend(self, token: int) -> None:
        """Append a token to the text."""
        repeated = self._advance(self._repeated, token, self.limit + 1)
        self._append(token)
        self._repeated = self._settle(*repeated)  # its state may just have been split
        self.tail = self._settle(self._repeated.state, min(self._repeated.length, self.limit))
        position, state = self.length[self._end], self._repeated.state
        while state > 0:
            self.count[state] += 1
            self.latest[state] = position
            state = self.link[state]

    def step(self, cursor: Cursor, token: int) -> Cursor:
        """The cursor after one more token, which is not added to the text."""
        return self._advance(cursor, token, self.limit)

    def _advance(self, cursor: Cursor, token: int, limit: int) -> Cursor:
        state, length = cursor
        follow, link = self.follow, self.link
        while state > 0 and token not in follow[state]:
            state = link[state]
            length = self.length[state]
        if token not in follow[state]:
            return START
        return self._settle(follow[state][token], min(length + 1, limit))

    def _settle(self, state: int, length: int) -> Cursor:
        """The cursor of the suffix of this length, at the state that stands for it."""
        while state > 0 and length <= self.length[self.link[state]]:
            state = self.link[state]
        return Cursor(state, length)

    def _append(self, token: int) -> None:
        position = self.length[self._end] + 1
        new = self._add({}, position, 1, position)
        state = self._end
        while state >= 0 and token not in self.follow[state]:
            self.follow[state][token] = new
            state = self.link[state]
        self.link[new] = self._exact(state, token) if state >= 0 else 0
        self._end = new

    def _exact(self, state: int, token: int) -> int:
        """The state of exactly this state's longest substring and the token, split off its old one if necessary."""
        old, length = self.follow[state][token], self.length[state] + 1
        if self.length[old] == length:
            return old
        split = self._add(self.follow[old].copy(), length, self.count[old], self.latest[old])
        self.link[split], self.link[old] = self.link[old], split
        while state >= 0 and self.follow[state].get(token) == old:
            self.follow[state][token] = split
            state = self.link[state]
        return split

    def _add(self, follow: dict[int, int], length: int, count: int, latest: int) -> int:
        self.follow.append(follow)
        self.link.append(0)
        self.length.append(length)
        self.count.append(count)
        self.latest.append(latest)
        return len(self.follow) - 1


def blend(text: SuffixAutomaton, cursor: Cursor, shortest: int) -> Candidates:
    """What followed this suffix and its own suffixes down to `shortest` tokens, as a PPM-C mixture over all lengths.

    Each length, the longest first, distributes seen / (seen + doubt) of the probability and passes the rest on: `seen`
    counts its continuations, `doubt` grows with the number of distinct ones. The last rest goes to no token.
    """
    state, length = cursor
    weight = 1.0
    mass: dict[int, float] = {}
    latest: dict[int, int] = {}
    while length >= shortest:
        below = text.link[state]
        follow = text.follow[state]
        if follow:
            counts = [text.count[after] for after in follow.values()]
            seen = sum(counts)
            lengths = length - max(text.length[below], shortest - 1)  # a state stands for several lengths
            doubt = DOUBT * len(follow)
            passed = weight * (doubt / (seen + doubt)) ** lengths
            share = (weight - passed) / seen
            for (token, after), count in zip(follow.items(), counts, strict=True):
                mass[token] = mass.get(token, 0.0) + share * count
                latest.setdefault(token, text.latest[after])
            weight = passed
        state, length = below, text.length[below]
    order = sorted(mass, key=lambda token: (-mass[token], -latest[token], token))
    return [(token, min(mass[token], 1.0)) for token in order[:MAX_CANDIDATES]]  # rounding can add up to more than 1


def look_up(text: SuffixAutomaton, cursor: Cursor, shortest: int) -> Candidates:
    """What followed the longest suffix that has continuations, the latest first, each twice as likely as the next.

    The longer the suffix, the more probability they share.
    """
    state, length = cursor
    while length >= shortest and not text.follow[state]:
        state = text.link[state]
        length = text.length[state]
    if length < shortest:
        return []
    follow = text.follow[state]
    order = sorted(follow, key=lambda token: (-text.latest[follow[token]], token))[:MAX_CANDIDATES]
    known = 1 - (DOUBT / (1 + DOUBT)) ** length
    first = known / (2 - 0.5 ** (len(order) - 1))
    return [(token, first * 0.5**place) for place, token in enumerate(order)]


METHODS: dict[str, Callable[[SuffixAutomaton, Cursor, int], Candidates]] = {"suffix": blend, "lookup": look_up}


class History:
    """One sequence: its committed tokens, and the cursors of the nodes of its current tree."""

    def __init__(self, limit: int, tokens: list[int], dice: Dice | None = None) -> None:
        self.dice = dice
        self.text = SuffixAutomaton(limit, tokens)
        self.begin()

    def begin(self) -> None:
        self.cursors = {0: self.text.tail}  # by node

    def locate(self, tree: DraftTree, nodes: list[int]) -> list[Cursor]:
        """The cursors of these nodes: one step from their parents'."""
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()

        def find(node: int) -> Cursor:
            if node not in self.cursors:
                self.cursors[node] = self.text.step(find(parents[node]), tokens[node])
            return self.cursors[node]

        return [find(node) for node in nodes]


@dataclass
class NGramDrafter(Drafter):
    """What followed the last tokens earlier in this text; nothing is drafted if they are new."""

    method: str = option(
        "suffix", "suffix: blend all matching lengths; lookup: use the longest match", choices=tuple(METHODS)
    )
    min_match: int = option(2, "smallest number of context tokens that must match", low=1)
    max_match: int = option(16, "largest number of context tokens that are matched", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_match > self.max_match:
            raise InputError(f"min_match must be at most max_match ({self.max_match}), not {self.min_match}")
        self.histories: list[History] = []

    def start(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Sequence[Dice | None]) -> None:
        self.histories = []
        self.join(prompts, hidden, dice)

    def join(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Sequence[Dice | None]) -> None:
        self.histories += [History(self.max_match, *each) for each in zip(prompts, dice, strict=True)]

    def begin(self, tokens: list[int]) -> list[DraftTree]:
        for history in self.histories:
            history.begin()
        return super().begin(tokens)

    def expand(self, trees: list[DraftTree], grows: Sequence[Grow | None]) -> list[DraftTree]:
        pairs = zip(self.histories, trees, grows, strict=True)
        return [tree if grow is None else self._expand(history, tree, grow) for history, tree, grow in pairs]

    def commit(
        self, trees: list[DraftTree], paths: list[Tensor], bonus: list[int], hidden: list[Tensor] | None
    ) -> None:
        for history, tree, path, token in zip(self.histories, trees, paths, bonus, strict=True):
            for accepted in [*tree.tokens[path[1:]].tolist(), token]:
                history.text.extend(accepted)

    def retain(self, keep: list[int]) -> None:
        self.histories = [self.histories[place] for place in keep]

    def _expand(self, history: History, tree: DraftTree, grow: Grow) -> DraftTree:
        propose = METHODS[self.method]
        cursors = history.locate(tree, grow.nodes.tolist())
        rows = [propose(history.text, cursor, self.min_match) for cursor in cursors]
        width = max(map(len, rows), default=0)
        if width == 0:
            return tree
        padded = [row + [(0, 0.0)] * (width - len(row)) for row in rows]
        tokens = torch.tensor([[token for token, _ in row] for row in padded])  # [n, M]
        mass = torch.tensor([[chance for _, chance in row] for row in padded], dtype=torch.float64)  # [n, M]
        return add_children(tree, grow, mass.log(), history.dice, tokens)
