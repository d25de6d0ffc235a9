"""Log-probabilities in the shapes of OpenAI's API."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from windfall.core.detokenizer import Detokenizer
from windfall.core.errors import InputError
from windfall.core.logprobs import LOWEST, TokenLogprob
from windfall.core.token_text import TokenTexts
from windfall.engine.generation import Generation
from windfall.engine.prompts import ModelInfo
from windfall.serve.protocol import ChatLogprobs, CompletionLogprobs, LogprobOfToken, LogprobWithTop
from windfall.serve.texts import End, Piece


class Placed(NamedTuple):
    """A token, and the character at which it begins in the text."""

    offset: int
    token: int
    logprob: TokenLogprob | None  # None for the first token of a prompt


class TextLogprobs:
    """Tells which tokens of one text to report.

    A token is reported as soon as the text at its beginning is certain, and never if a stop string cuts the text there.
    """

    def __init__(self, tokenizer: Any, start: int):
        """`start`: characters before the text."""
        self._text = Detokenizer(tokenizer)  # of all tokens, also of those after a cut
        self._length = self._certain = start  # characters of this text, and of the answer
        self._waiting: deque[Placed] = deque()

    def of(self, piece: Piece | End) -> list[Placed]:
        """The tokens to report with this Step, or at the end of the text."""
        if isinstance(piece, End):
            self._length += len(self._text.take(final=True))
            return [] if self._length > self._certain else [*self._waiting]
        for each in piece.logprobs or ():
            self._waiting.append(Placed(self._length, each.token, each))
            self._text.push(each.token)
            self._length += len(self._text.take())
        self._certain += len(piece.text)
        return [*self._take_certain()]

    def _take_certain(self) -> Iterable[Placed]:
        while self._waiting and self._waiting[0].offset < self._certain:
            yield self._waiting.popleft()


class Reports:
    """The log-probabilities of the texts of one answer."""

    def __init__(self, names: TokenTexts, starts: list[int]):
        """`starts`: of each text, the characters before it."""
        self._names = names
        self._texts = [TextLogprobs(names.tokenizer, start) for start in starts]

    def of_piece(self, index: int, piece: Piece | End) -> list[Placed]:
        """The tokens to report with this piece of a text."""
        return self._texts[index].of(piece)

    def of_text(self, index: int, done: Generation) -> list[Placed]:
        """The tokens to report of a whole text."""
        pieces: list[Piece | End] = [*done.steps, End(done.finish_reason, not done.steps)]
        return [placed for piece in pieces for placed in self.of_piece(index, piece)]

    def of_prompt(self, ids: list[int], found: Iterable[TokenLogprob | None]) -> list[Placed]:
        """The tokens of a prompt."""
        text, length, placed = Detokenizer(self._names.tokenizer), 0, list[Placed]()
        for token, logprob in zip(ids, found, strict=True):
            placed.append(Placed(length, token, logprob))
            text.push(token)
            length += len(text.take())
        return placed

    def as_chat(self, placed: list[Placed]) -> ChatLogprobs:
        """These tokens as chat reports them."""
        found = [each.logprob for each in placed if each.logprob is not None]
        return ChatLogprobs(
            content=[
                LogprobWithTop(
                    **self._of_token(each.token, each.logprob),
                    top_logprobs=[LogprobOfToken(**self._of_token(*other)) for other in each.top],
                )
                for each in found
            ]
        )

    def _of_token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._names[token]
        return {"token": text.text, "logprob": max(logprob, LOWEST), "bytes": [*text.bytes]}

    def as_completion(self, placed: list[Placed]) -> CompletionLogprobs:
        """These tokens as completions report them."""
        return CompletionLogprobs(
            text_offset=[each.offset for each in placed],
            token_logprobs=[None if each.logprob is None else max(each.logprob.logprob, LOWEST) for each in placed],
            tokens=[self._name(each.token) for each in placed],
            top_logprobs=[None if each.logprob is None else self._top(each.logprob) for each in placed],
        )

    def _top(self, found: TokenLogprob) -> dict[str, float]:
        """The most likely tokens, and the one that was drawn; of tokens with the same text, the most likely."""
        named: dict[str, float] = {}
        for token, value in (*found.top, (found.token, found.logprob)):
            named.setdefault(self._name(token), max(value, LOWEST))
        return named

    def _name(self, token: int) -> str:
        text = self._names[token]
        return text.text if text.whole else f"bytes:{text.text}"


def token_texts(model: ModelInfo) -> TokenTexts | None:
    """The texts of the model's tokens; None if it has no tokenizer."""
    return None if model.tokenizer is None else TokenTexts(model.tokenizer)


def make_reports(names: TokenTexts | None, wanted: bool, starts: list[int]) -> Reports | None:
    """Reports for texts that begin after these numbers of characters, if they are wanted."""
    if wanted and names is None:
        raise InputError("logprobs need a tokenizer; this model has none")
    return Reports(names, starts) if wanted and names is not None else None
