"""Decode token ids to text as they arrive, without broken characters and without text that a stop string may remove."""

from __future__ import annotations

import copy
import threading
from bisect import bisect_left
from functools import lru_cache
from typing import Any

REPLACEMENT = "\ufffd"  # what an unfinished character decodes to


class Detokenizer:
    """The text of one sequence: `push` adds tokens, `take` returns text that can no longer change."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = (), source: list[int] | None = None):
        """`source`: the caller's list, to which it appends the tokens itself; only without stop strings."""
        self.tokenizer = tokenizer
        self.stop = stop
        self.text = ""
        self._taken = 0
        self._ids = [] if source is None else source
        self._start = len(self._ids)
        self._settled = self._start  # ids up to this place have their text in `text`
        self._context = self._start  # where decoding starts: a little earlier, because tokenizers look at neighbours
        self._tried = self._start  # ids up to this place were tried and did not settle more

    def push(self, token: int) -> bool:
        """Add a token; True if its text completes a stop string (the text then ends before it)."""
        if self.tokenizer is None:
            return False
        self._ids.append(token)
        return bool(self.stop) and self._settle(len(self._ids))

    def take(self, final: bool = False, end: int | None = None) -> str:
        """The text that became certain since the last call; with `final`, all the rest.

        `end`: only this number of tokens count, which is for texts without stop strings.
        """
        last = len(self._ids) if end is None else min(self._start + end, len(self._ids))
        if self.tokenizer is not None and self._settled < last:
            self._catch_up(final, last)
        held = 0 if final else self._held()
        start, self._taken = self._taken, max(self._taken, len(self.text) - held)
        return self.text[start : self._taken]

    def copy(self, end: int) -> Detokenizer:
        """Another one in the same state, with only this number of tokens."""
        made = copy.copy(self)
        made._ids = self._ids[: self._start + end]
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
        tokenizer = self.tokenizer
        kind: type = type(tokenizer)
        if _decodes_in_rust(kind) and "decode" not in vars(tokenizer):
            text: str = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
        else:
            text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


@lru_cache
def _decodes_in_rust(kind: type) -> bool:
    """Whether `decode` of these tokenizers calls the tokenizers library and adds nothing.

    What transformers does around this call, such as looking at each id, takes longer than the call.
    """
    names = [getattr(getattr(kind, name, None), "__qualname__", "") for name in ("decode", "_decode")]
    return names == ["PreTrainedTokenizerBase.decode", "TokenizersBackend._decode"]


class LateText:
    """The text of a sequence's steps, decoded when it is first read, by any thread, in the order of the steps."""

    def __init__(self, detokenizer: Detokenizer):
        self._detokenizer = detokenizer
        self.ends: list[int] = []  # the number of tokens after each step; the caller appends them
        self.final = False  # whether the text ends with the last step; to be set after its end was appended
        self._pieces: list[str] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.ends)

    def number(self, end: int) -> int:
        """The number of the step after which there are this many tokens."""
        return bisect_left(self.ends, end)

    def whole(self, steps: int) -> str:
        """The text of the first steps; if none was read before, and there are no stop strings, decoded at once."""
        with self._lock:
            if len(self._pieces) >= steps:
                return "".join(self._pieces[:steps])
            if not self._pieces and not self._detokenizer.stop:
                return self._detokenizer.copy(self.ends[steps - 1]).take(self._ends_with(steps - 1))
        return "".join(self[number] for number in range(steps))

    def between(self, start: int, end: int) -> str:
        """The text of the steps from `start` to `end` - 1. If none of them was read so far, they are decoded at once,
        and the first of them then has the text of all."""
        with self._lock:
            if len(self._pieces) == start < end:
                self._pieces += [self._take(end - 1), *[""] * (end - start - 1)]
                return self._pieces[start]
        return "".join(self[number] for number in range(start, end))

    def __getitem__(self, number: int) -> str:
        """The text of a step."""
        with self._lock:
            while len(self._pieces) <= number:
                self._pieces.append(self._take(len(self._pieces)))
            return self._pieces[number]

    def _take(self, number: int) -> str:
        """The text from the one that was taken last to the end of this step."""
        return self._detokenizer.take(self._ends_with(number), self.ends[number])

    def _ends_with(self, number: int) -> bool:
        """Whether the text ends with this step."""
        return self.final and number == len(self.ends) - 1
