"""What each cycle of a stream did: its tokens and its draft tree, for `stream_options.include_speculation`."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import Any

import numpy as np
from pydantic import BaseModel

from windfall.core.detokenizer import Detokenizer
from windfall.core.step import NodeArrays, Split, Step
from windfall.serve.protocol import Answer
from windfall.serve.texts import Texts

MAX_NODES = 256  # of a tree that are sent, besides the accepted ones
CACHED_WORDS = 2**16
DIGITS = 6  # of seconds and probabilities


class Token(BaseModel):
    id: int
    text: str  # what it adds to the answer; empty for a part of a character and for the end of the text
    drafted: bool  # False: the target's own token


class Node(BaseModel):
    """A drafted token. The first node is the root, which is the last token of the cycle before."""

    parent: int  # the place of the parent in the list; -1 for the root
    id: int
    text: str
    probability: float  # that the drafter gives the token after its parent
    path_probability: float  # that the drafter gives the path from the root to here
    verified: bool
    accepted: bool


class Seconds(BaseModel):
    draft: float
    verify: float
    policy: float
    other: float
    prompts: float


class Cycle(BaseModel):
    """One cycle of one text."""

    index: int  # of the choice
    at: float  # seconds from the start of the request to the end of this cycle
    seconds: Seconds  # of the parts of the cycle; requests that run together share it
    tokens: list[Token]
    draft_passes: int
    drafted_tokens: int
    verified_tokens: int
    accepted_tokens: int
    nodes: list[Node]
    left_out: int  # nodes that are not in the list
    whole_tree: bool  # False: drafted nodes that were not verified are unknown, because they stay on the GPU


class CycleChunk(Answer):
    """A chunk of a stream, with the cycle that it comes from."""

    speculation: Cycle


class Cycles:
    """Describes the cycles of the texts of one request."""

    def __init__(self, texts: Texts, tokenizer: Any, stop: tuple[str, ...]):
        self._texts, self._words = texts, _words(tokenizer)
        self._pieces = defaultdict[int, Detokenizer](lambda: Detokenizer(tokenizer, stop))  # by the text's number
        self._counts = defaultdict[int, int](int)  # cycles of each text so far

    def describe(self, number: int, step: Step) -> Cycle:
        """The next cycle of the text with this number."""
        self._counts[number] += 1
        about = step.node_arrays
        nodes = _nodes(about, self._words)
        return Cycle(
            index=number,
            at=round(self._texts.seconds(number, self._counts[number] - 1), DIGITS),
            seconds=Seconds(**{name: round(getattr(step.seconds, name), DIGITS) for name in Split._fields}),
            tokens=self._tokens(number, step),
            draft_passes=step.draft_passes,
            drafted_tokens=step.drafted_tokens,
            verified_tokens=step.rows - 1,
            accepted_tokens=min(step.accepted, len(step.tokens)),
            nodes=nodes,
            left_out=len(about.drafted.tokens) - len(nodes),
            whole_tree=step.whole_tree,
        )

    def _tokens(self, number: int, step: Step) -> list[Token]:
        """The tokens with their shares of the Step's text. Together they always are that text."""
        made, last = self._pieces[number], len(step.tokens) - 1
        shares = []
        for place, token in enumerate(step.tokens):
            made.push(token)
            shares.append(made.take(final=place == last and step.finish is not None))
        if "".join(shares) != step.text:
            shares = [""] * last + [step.text]
        return [
            Token(id=token, text=share, drafted=place < step.accepted)
            for place, (token, share) in enumerate(zip(step.tokens, shares, strict=True))
        ]


def _nodes(about: NodeArrays, words: Any) -> list[Node]:
    """The most likely nodes and the accepted ones, each after its parent."""
    tree = about.drafted
    verified, accepted = np.zeros((2, len(tree.tokens)), bool)
    verified[about.verified] = True
    accepted[about.accepted] = True
    shown = accepted.copy()
    shown[np.argsort(-tree.score, kind="stable")[:MAX_NODES]] = True
    for node in np.flatnonzero(shown)[1:].tolist():
        shown[node] = shown[tree.parents[node]]
    places = np.cumsum(shown) - 1
    logq, score = np.exp(tree.logq.astype(float)), np.exp(tree.score.astype(float))
    return [
        Node(
            parent=int(places[tree.parents[node]]) if node else -1,
            id=int(tree.tokens[node]),
            text=words(int(tree.tokens[node])),
            probability=round(float(logq[node]), DIGITS),
            path_probability=round(float(score[node]), DIGITS),
            verified=bool(verified[node]),
            accepted=bool(accepted[node]),
        )
        for node in np.flatnonzero(shown).tolist()
    ]


@lru_cache(maxsize=4)
def _words(tokenizer: Any) -> Any:
    """The text of a token alone, or its id if there is no tokenizer."""

    @lru_cache(maxsize=CACHED_WORDS)
    def word(token: int) -> str:
        return str(token) if tokenizer is None else str(tokenizer.decode([token]))

    return word
