"""Keeps one text within a grammar: prunes its draft trees, drafts forced text, and says which tokens may be drawn."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from windfall.core.errors import InputError
from windfall.core.tree import DraftTree, Flags
from windfall.grammar.base import Grammar

ILLEGAL_LOGQ = -1e4  # the log-probability of a node that the grammar forbids: 0 as a probability, yet finite
MAX_FORCED_NODES = 32  # nodes of forced text that a tree gets
MAX_FORCED_STARTS = 4  # nodes after which forced text is looked for; each costs a mask
MAX_SPELLINGS = 64  # tokens that may begin a forced text
MAX_ROWS = 256  # of a tree with forced text
MAX_SECONDS, MAX_SECONDS_PER_TOKEN = 3.0, 0.25  # of CPU time that a library may take for a text; usual are milliseconds
SURE, FIRST = np.zeros(1, np.float32), np.zeros(1, np.int64)  # log-probability and rank of forced nodes


class Guide:
    """The state of one text in its grammar. A text that has ended, by a token of `eos` too, is not followed further.

    The matcher may run ahead of the text, down a path of the draft tree. `go_to` moves it.
    """

    def __init__(self, grammar: Grammar, eos: Iterable[int]):
        self._vocabulary = grammar.vocabulary
        self._matcher = grammar.matcher()
        texts = self._vocabulary.tokens
        self._eos = sorted(token for token in set(eos) if 0 <= token < len(texts) and not texts[token])
        self._committed = 0  # tokens of the text that the matcher has taken
        self._ahead: list[int] = []  # tokens that it has taken after these
        self._legal: list[bool] = []  # by node of the drafted tree
        self._paths: list[list[int]] = []  # by node of the drafted tree: the tokens from the root's child to the node
        self._mask: Flags | None = None  # at the present state
        self._seconds = 0.0  # that the library has taken so far

    def follow(self, text: Sequence[int]) -> None:
        """Go to the end of the text: all of its tokens after the prompt. A text only grows."""
        self.go_to(text[self._committed :])
        self._committed, self._ahead = len(text), []

    def go_to(self, ahead: Sequence[int]) -> None:
        """Go to the state after these tokens, which continue the text."""
        same = 0
        while same < min(len(ahead), len(self._ahead)) and ahead[same] == self._ahead[same]:
            same += 1
        if same == len(ahead) == len(self._ahead):
            return
        self._mask = None
        self._matcher.undo(len(self._ahead) - same)
        del self._ahead[same:]
        for token in ahead[same:]:
            self._matcher.advance(token)
            self._ahead.append(token)

    # ---- the present state

    def legal(self, token: int) -> bool:
        """Whether this token may come next."""
        if token in self._eos:
            return self._matcher.may_end
        known = 0 <= token < len(self._vocabulary) and bool(self._vocabulary.tokens[token])
        if not known or self._mask is not None:
            return known and self._mask is not None and bool(self._mask[token])
        start = time.thread_time()
        found = self._matcher.legal(token)
        self._count(time.thread_time() - start)
        return found

    def mask(self) -> Flags:
        """Which tokens may come next [V]."""
        if self._mask is None:
            start = time.thread_time()
            self._mask = self._matcher.mask()
            self._mask[self._eos] = self._matcher.may_end
            self._count(time.thread_time() - start)
        return self._mask

    def _count(self, seconds: float) -> None:
        """Refuse a grammar that takes too long: other texts wait for it in every cycle."""
        self._seconds += seconds
        if self._seconds > MAX_SECONDS + MAX_SECONDS_PER_TOKEN * self._committed:
            raise InputError(f"the grammar cannot be followed: it has taken {self._seconds:.1f} seconds of CPU time")

    @property
    def over(self) -> bool:
        """Whether nothing but the end of the text can come next."""
        if not self._matcher.may_end:
            return False
        mask = self.mask().copy()
        mask[self._eos] = False
        return not mask.any()

    # ---- draft trees

    def begin(self, text: Sequence[int]) -> None:
        """A new cycle begins, with a tree of the root alone."""
        self.follow(text)
        self._legal, self._paths = [True], [[]]

    def rate(self, tree: DraftTree) -> DraftTree:
        """The tree with a probability of 0 for the new nodes that the grammar forbids.

        xgrammar's `traverse_draft_tree` computes the masks of a whole tree in one call. On one CPU core, a tree of 60
        nodes and 49,152 tokens that grows in six passes takes 2.0 ms with it inside a JSON string and 0.3 to 0.4 ms
        elsewhere; asking for each new node takes 0.7 and 0.5 to 0.7 ms, and works with any library.
        """
        known, start = tree.arrays, len(self._legal)
        parents, tokens = known.parents.tolist(), known.tokens.tolist()
        for node in range(start, len(tree)):
            parent, token = parents[node], tokens[node]
            self._legal.append(self._is_legal(parent, token))
            self._paths.append([*self._paths[parent], token])
        illegal = start + np.flatnonzero(~np.array(self._legal[start:], bool))
        if not len(illegal):
            return tree
        logq, score = known.logq.copy(), known.score.copy()
        logq[illegal] = ILLEGAL_LOGQ
        score[illegal] = score[known.parents[illegal]] + np.float32(ILLEGAL_LOGQ)
        return DraftTree.of(known._replace(logq=logq, score=score))

    def _is_legal(self, parent: int, token: int) -> bool:
        path = self._paths[parent]
        if not self._legal[parent] or (path and path[-1] in self._eos):  # nothing follows the end of a text
            return False
        self.go_to(path)
        return self.legal(token)

    @staticmethod
    def _path(tree: DraftTree, node: int) -> list[int]:
        return tree.arrays.tokens[tree.path(node)[1:]].tolist()  # type: ignore[no-any-return]

    def allows(self, node: int) -> bool:
        """Whether this node of the drafted tree is legal."""
        return self._legal[node]

    def prune(self, kept: Tensor) -> Tensor:
        """These nodes of the drafted tree without those that the grammar forbids."""
        return kept[torch.tensor([self._legal[node] for node in kept.tolist()])]

    def add_forced(self, tree: DraftTree, kept: Tensor, room: int) -> tuple[DraftTree, Tensor]:
        """Add nodes for text that must follow the likeliest of the kept nodes; `room`: tokens until the end.

        The target still scores them: only the text is certain, not how tokens spell it.
        """
        known, nodes = tree.arrays, kept.tolist()
        edges = zip(known.parents.tolist(), known.tokens.tolist(), strict=True)
        child, chosen = {edge: node for node, edge in enumerate(edges)}, set(nodes)
        limit = min(len(nodes) + MAX_FORCED_NODES, MAX_ROWS)
        starts = [node for node in nodes if not node or known.tokens[node] not in self._eos]
        for start in sorted(starts, key=lambda node: -known.score[node])[:MAX_FORCED_STARTS]:
            self.go_to(self._path(tree, start))
            node = start
            for token in self._forced_tokens(room - 1 - int(known.depth[start])):
                found = child.get((node, token), len(tree))
                if found not in chosen and len(chosen) >= limit:
                    break
                if found == len(tree):
                    tree = tree.append(np.array([node]), np.array([token]), SURE, FIRST)
                    child[node, token] = found
                chosen.add(found)
                node = found
        return tree, torch.tensor(sorted(chosen))

    def _forced_tokens(self, most: int) -> list[int]:
        """Tokens for the text that must come next."""
        here, tokens = list(self._ahead), list[int]()
        while len(tokens) < min(most, MAX_FORCED_NODES) and (token := self._forced_token()) is not None:
            tokens.append(token)
            self.go_to([*here, *tokens])
        return tokens

    def _forced_token(self) -> int | None:
        """The longest token that all others continue or begin like; None if the text is not certain."""
        if self._matcher.may_end:
            return None
        legal = np.flatnonzero(self.mask())
        if len(legal) > MAX_SPELLINGS:
            return None
        texts: dict[bytes, int] = {self._vocabulary.tokens[token]: token for token in legal.tolist()}
        if len({text[0] for text in texts}) != 1:
            return None
        for text in sorted(texts, key=len, reverse=True):
            if all(text.startswith(other) or other.startswith(text) for other in texts):
                return texts[text]
        return None
