"""Decode token ids to text as they arrive, without broken characters and without text that a stop string may remove."""

from __future__ import annotations

import copy
import threading
from typing import Any

REPLACEMENT = "\ufffd"  # what an unfinished character decodes to


class Detokenizer:
    """The text of one sequence: `push` adds tokens, `take` returns text that can no longer change."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()):
        self.tokenizer = tokenizer
        self.stop = stop
        self.text = ""
        self._taken = 0
        self._ids: list[int] = []
        self._settled = 0  # ids whose text is in `text`
        self._context = 0  # where decoding starts: a little earlier, because tokenizers look at neighbours
        self._tried = 0  # ids that were tried and did not settle more

    def push(self, token: int) -> bool:
        """Add a token; True if its text completes a stop string (the text then ends before it)."""
        if self.tokenizer is None:
            return False
        self._ids.append(token)
        return bool(self.stop) and self._settle(len(self._ids))

    def extend(self, tokens: list[int]) -> None:
        """Add tokens; only without stop strings."""
        if self.tokenizer is not None:
            self._ids += tokens

    def take(self, final: bool = False, end: int | None = None) -> str:
        """The text that became certain since the last call; with `final`, all the rest.

        `end`: only tokens before this place count, which is for texts without stop strings.
        """
        last = len(self._ids) if end is None else min(end, len(self._ids))
        if self.tokenizer is not None and self._settled < last:
            self._catch_up(final, last)
        held = 0 if final else self._held()
        start, self._taken = self._taken, max(self._taken, len(self.text) - held)
        return self.text[start : self._taken]

    def copy(self, end: int) -> Detokenizer:
        """Another one in the same state, with only the ids before `end`."""
        made = copy.copy(self)
        made._ids = self._ids[:end]
        return made

    def _catch_up(self, final: bool, last: int) -> None:
        """Without stop strings, decode all new tokens at once; if the last one ends within a character, as many as
        possible."""
        before = self._settled
        self._settle(last, final)
        if self._settled == before and not self.stop:
            for end in range(max(before, self._tried) + 1, last):
                self._settle(end)
        self._tried = last

    def _settle(self, end: int, final: bool = False) -> bool:
        """Add the text of the ids up to `end`, unless it ends within a character (with `final`, even then).

        Returns True if the text completes a stop string.
        """
        known = self._decode(self._ids[self._context : self._settled])
        whole = self._decode(self._ids[self._context : end])
        if not final and (len(whole) <= len(known) or whole.endswith(REPLACEMENT)):
            return False
        self._context, self._settled = self._settled, end
        before = len(self.text)
        self.text += whole[len(known) :]
        found = [at for stop in self.stop if (at := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)

    def _held(self) -> int:
        """Length of the longest tail of the text that could be the beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self.stop), default=0)
        for size in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self.stop):
                return size
        return 0

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


class LateText:
    """The text of a sequence's steps, decoded when it is first read, by any thread, in the order of the steps."""

    def __init__(self, detokenizer: Detokenizer):
        self._detokenizer = detokenizer
        self._ends: list[tuple[int, bool]] = []  # of each step: tokens so far, and whether the text ends
        self._pieces: list[str] = []
        self._lock = threading.Lock()

    def add(self, tokens: int, final: bool) -> int:
        """A step after which there are this number of tokens; returns its number."""
        self._ends.append((tokens, final))
        return len(self._ends) - 1

    @property
    def whole(self) -> str:
        """The text of all steps. If none was read so far, and there are no stop strings, it is decoded at once."""
        with self._lock:
            if self._ends and not self._pieces and not self._detokenizer.stop:
                end, final = self._ends[-1]
                return self._detokenizer.copy(end).take(final)
        return "".join(self[number] for number in range(len(self._ends)))

    def between(self, start: int, end: int) -> str:
        """The text of the steps from `start` to `end` - 1. If none of them was read so far, they are decoded at once,
        and the first of them then has the text of all."""
        with self._lock:
            if len(self._pieces) == start < end:
                tokens, final = self._ends[end - 1]
                self._pieces += [self._detokenizer.take(final, tokens), *[""] * (end - start - 1)]
                return self._pieces[start]
        return "".join(self[number] for number in range(start, end))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> str:
        """The text of a step."""
        with self._lock:
            while len(self._pieces) <= number:
                end, final = self._ends[len(self._pieces)]
                self._pieces.append(self._detokenizer.take(final, end))
            return self._pieces[number]
