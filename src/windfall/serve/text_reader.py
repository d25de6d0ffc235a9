"""Reads JSON in a text that arrives in pieces: each method is a generator that stops where more text is needed."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # stops where more text is needed

SPACE = string.whitespace
SCALAR_LETTERS = string.ascii_letters + string.digits + "+-."  # of numbers, true, false and null
IN_STRING, BETWEEN_STRINGS = re.compile(r'["\\\n]'), re.compile(r'["{}\[\]<]')
OF_STRING = re.compile(r'["\\\x00-\x1f]')


class Unexpected(Exception):
    """The text is something else."""


class Ended(Exception):
    """The text has ended."""


class TextReader:
    """A place in a text that may still grow."""

    def __init__(self, closing: str):
        """`closing`: a tag that ends JSON which is not complete."""
        self._closing = closing
        self._text, self._ended = "", False
        self._at = 0  # the next character to read

    # ---- JSON

    def _scan(self, depth: int, take: Callable[[str], None]) -> Reading[bool]:
        """Hand over text up to the bracket that closes as many as are open. False: the closing tag came before it.

        A line break in a string is not valid JSON. A closing tag after it therefore ends an open string, too.
        """
        in_string, closing = False, self._closing
        while True:
            found = (IN_STRING if in_string else BETWEEN_STRINGS).search(self._text, self._at)
            self._advance(len(self._text) if found is None else found.start(), take)
            if found is None:
                yield from self._peek()
                continue
            letter = found[0]
            if letter in "<\n" and (yield from self._starts(closing if letter == "<" else letter + closing)):
                return False
            self._advance(self._at + 1, take)
            if letter == "\\":
                yield from self._peek()
                self._advance(self._at + 1, take)
            elif letter == '"':
                in_string = not in_string
            else:
                depth += (letter in "{[") - (letter in "}]")
                if depth <= 0 and letter in "}]":
                    return True

    def _advance(self, place: int, take: Callable[[str], None]) -> None:
        text, self._at = self._text[self._at : place], place
        if text:
            take(text)

    def _read_bracketed(self) -> Reading[str]:
        """An object or a list, as it is written."""
        start = self._at
        if (yield from self._peek()) not in "{[" or not (yield from self._scan(0, lambda _: None)):
            raise Unexpected
        return self._text[start : self._at]

    def _skip_value(self) -> Reading[None]:
        letter = yield from self._peek()
        if letter == '"':
            yield from self._read_string()
        elif letter in "{[":
            yield from self._read_bracketed()
        elif letter in SCALAR_LETTERS:
            yield from self._skip(SCALAR_LETTERS)
        else:
            raise Unexpected

    def _read_key(self) -> Reading[str]:
        key = yield from self._read_string()
        yield from self._skip(SPACE)
        yield from self._expect(":")
        yield from self._skip(SPACE)
        return key

    def _read_string(self) -> Reading[str]:
        start = self._at
        yield from self._expect('"')
        while True:
            found = OF_STRING.search(self._text, self._at)
            self._at = len(self._text) if found is None else found.end()
            if found is None:
                yield from self._peek()
            elif found[0] == '"':
                break
            elif found[0] != "\\":
                raise Unexpected
            else:
                yield from self._peek()
                self._at += 1
        try:
            text: str = json.loads(self._text[start : self._at])
        except ValueError:
            raise Unexpected from None
        return text

    # ---- characters

    def _peek(self) -> Reading[str]:
        """The next character."""
        while self._at >= len(self._text):
            if self._ended:
                raise Ended
            yield
        return self._text[self._at]

    def _expect(self, letter: str) -> Reading[None]:
        if (yield from self._peek()) != letter:
            raise Unexpected
        self._at += 1

    def _skip(self, letters: str) -> Reading[None]:
        while (yield from self._peek()) in letters:
            self._at += 1

    def _starts(self, word: str) -> Reading[bool]:
        """Whether this word comes next."""
        while not self._ended and word.startswith(rest := self._text[self._at : self._at + len(word)]) and rest != word:
            yield
        return self._text.startswith(word, self._at)

    def _take(self, word: str) -> Reading[bool]:
        """Skip this word, if it comes next."""
        if found := (yield from self._starts(word)):
            self._at += len(word)
        return found
