"""Reads the tool calls in a text that arrives in pieces, and reports each part as soon as it is certain."""

from __future__ import annotations

import json
import re
import string
from typing import NamedTuple

from windfall.serve.text_reader import SPACE, Ended, Reading, TextReader, Unexpected
from windfall.serve.tool_calls import CLOSING, MARKS, MISTRAL_ARGUMENTS, OPENING

AFTER_CALL = SPACE + ";,]}"  # what may lie between two calls, or after one: the end of a list, a bracket too many
NAME_LETTERS = string.ascii_letters + string.digits + "_.-"
ARGUMENT_KEYS = ("arguments", "parameters")
FENCE, LANGUAGE_LETTERS = "```", string.ascii_letters + "_"  # of a code block
OBJECT_START, MAYBE_OBJECT = re.compile(r'\{\s*["}]'), re.compile(r"\{\s*\Z")


class Content(NamedTuple):
    """Text that belongs to no call."""

    text: str


class Call(NamedTuple):
    """A call begins."""

    name: str


class Arguments(NamedTuple):
    """A piece of the arguments of the last call, as the model has written it."""

    text: str


Part = Content | Call | Arguments


class CallParser(TextReader):
    """Finds calls of tools with these names.

    A call is certain when its name is known and its arguments begin as a JSON object does. From then on its arguments
    are reported as they are written, until their last bracket. If the text ends before it, or they are not valid JSON,
    the call has the arguments that were written. Before a call is certain, its text is held back.
    """

    def __init__(self, names: set[str]):
        super().__init__(CLOSING)
        self._names = names
        self._begin = 0  # the first character that is neither reported nor dropped
        self._spaces = ""  # at the end of the content; dropped if a call follows
        self._parts: list[Part] = []
        self._wrote = self.called = False
        self._reading = self._read()

    def push(self, text: str) -> list[Part]:
        """What a new piece of the text makes certain."""
        self._text += text
        return self._go_on()

    def end(self) -> list[Part]:
        """The rest, at the end of the text."""
        self._ended = True
        return self._go_on()

    def _go_on(self) -> list[Part]:
        next(self._reading, None)
        parts, self._parts = self._parts, []
        return parts

    # ---- the text

    def _read(self) -> Reading[None]:
        try:
            yield from self._attempt(self._read_bare_calls())
            while True:
                yield from self._read_content()
                yield from self._attempt(self._read_tagged_calls())
        except Ended:
            self._add_content(self._text[self._begin :])
            if self._spaces and not self.called:
                self._parts.append(Content(self._spaces))

    def _attempt(self, reading: Reading[None]) -> Reading[None]:
        """Read calls. Where something else follows, the content begins."""
        try:
            yield from reading
        except Unexpected:
            self._at = self._begin
            if self._text.startswith(OPENING, self._at):
                self._at += len(OPENING)

    def _read_content(self) -> Reading[None]:
        """Text up to the next opening tag."""
        while (place := self._text.find(OPENING, self._at)) < 0:
            self._add_content(self._text[self._begin : (safe := self._before_started_tag())])
            self._at = self._begin = safe
            if self._ended:
                raise Ended
            yield
        self._add_content(self._text[self._begin : place])
        self._at = self._begin = place

    def _before_started_tag(self) -> int:
        """The end of the text without a tail that may become an opening tag."""
        length = len(self._text)
        places = range(max(self._at, length - len(OPENING) + 1), length)
        return next((place for place in places if OPENING.startswith(self._text[place:])), length)

    def _add_content(self, text: str) -> None:
        whole = self._spaces + text
        words = whole.rstrip()
        self._spaces = whole[len(words) :]
        if words:
            self._add(Content(words if self._wrote or not self.called else words.lstrip()))
            self._wrote = True

    def _add(self, part: Content | Arguments) -> None:
        last = self._parts[-1] if self._parts else None
        if type(last) is type(part):
            self._parts[-1] = type(part)(self._parts[-1][0] + part.text)
        else:
            self._parts.append(part)

    # ---- calls

    def _read_bare_calls(self) -> Reading[None]:
        """Calls without tags, with which a text begins. They may be in code blocks, as Qwen2.5-Coder writes them."""
        in_block = False
        yield from self._skip(SPACE)
        while not (yield from self._starts(OPENING)):
            if not in_block and (in_block := (yield from self._take(FENCE))):
                yield from self._skip(LANGUAGE_LETTERS)
                yield from self._skip(SPACE)
            for mark in MARKS:
                yield from self._take(mark)
                yield from self._skip(SPACE)
            if in_block or (yield from self._peek()) in "{[":
                yield from self._read_json_call()
            else:
                yield from self._read_named_call()
            yield from self._drop(AFTER_CALL)
            if in_block and (yield from self._drop_closing(FENCE)):
                in_block = False
                yield from self._drop(AFTER_CALL)

    def _read_tagged_calls(self) -> Reading[None]:
        """Calls from an opening tag to the closing one."""
        self._at += len(OPENING)
        yield from self._skip(SPACE)
        while True:
            yield from self._read_json_call()
            yield from self._drop(AFTER_CALL)
            if (yield from self._drop_closing(CLOSING)) or (yield from self._starts(OPENING)):
                return

    def _read_named_call(self) -> Reading[None]:
        """The name, and then the arguments: Mistral's newer form."""
        start = self._at
        while (yield from self._peek()) in NAME_LETTERS:
            self._at += 1
            word = self._text[start : self._at]
            if not any(name.startswith(word) for name in self._names):
                raise Unexpected
        if (name := self._text[start : self._at]) not in self._names:
            raise Unexpected
        yield from self._take(MISTRAL_ARGUMENTS)
        yield from self._skip(SPACE)
        yield from self._stream_arguments(name)

    def _read_json_call(self) -> Reading[None]:
        """A JSON object with a name and arguments. A list is a bracket before the first one."""
        if (yield from self._peek()) == "[":
            self._at += 1
            yield from self._skip(SPACE)
        yield from self._expect("{")
        name: str | None = None
        arguments: str | None = None
        yield from self._skip(SPACE)
        while (yield from self._peek()) != "}":
            key = yield from self._read_key()
            if key == "name" and name is None:
                if (name := (yield from self._read_string())) not in self._names:
                    raise Unexpected
            elif key in ARGUMENT_KEYS and arguments is None:
                if name is not None and (yield from self._peek()) == "{":
                    yield from self._stream_arguments(name)
                    yield from self._scan(1, self._drop_text)
                    return
                arguments = yield from self._read_arguments()
            else:
                yield from self._skip_value()
            if name is not None and arguments is not None:
                self._add_call(name, arguments)
                yield from self._scan(1, self._drop_text)
                return
            yield from self._skip(SPACE)
            if (yield from self._peek()) != "}":
                yield from self._expect(",")
                yield from self._skip(SPACE)
        self._at += 1
        if name is None:
            raise Unexpected
        self._add_call(name, "{}")

    def _stream_arguments(self, name: str) -> Reading[None]:
        """Report a call whose name is known, and its arguments while they are written."""
        while MAYBE_OBJECT.match(self._text, self._at) and not self._ended:
            yield
        if not OBJECT_START.match(self._text, self._at):
            raise Unexpected
        self._add_call(name)
        yield from self._scan(0, self._report_arguments)

    def _add_call(self, name: str, arguments: str = "") -> None:
        self._parts.append(Call(name))
        self.called, self._spaces, self._begin = True, "", self._at
        if arguments:
            self._parts.append(Arguments(arguments))

    def _report_arguments(self, text: str) -> None:
        self._add(Arguments(text))
        self._begin = self._at

    def _drop_text(self, _: str) -> None:
        self._begin = self._at

    def _read_arguments(self) -> Reading[str]:
        """Whole arguments, because the name is not known yet, or because they are a text with JSON in it."""
        if (yield from self._peek()) == "{":
            text = yield from self._read_bracketed()
            if not OBJECT_START.match(text):
                raise Unexpected
            return text
        text = yield from self._read_string()
        try:
            text.encode()  # an escape may stand for half a character
            fits = isinstance(json.loads(text), dict)
        except (ValueError, RecursionError):
            fits = False
        if not fits:
            raise Unexpected
        return text

    def _drop(self, letters: str) -> Reading[None]:
        """Skip these characters, and leave them out of the content."""
        while (yield from self._peek()) in letters:
            self._at += 1
            self._begin = self._at

    def _drop_closing(self, closing: str) -> Reading[bool]:
        """Leave this closing tag out of the content, if it comes next, also if the text ends within it."""
        if found := (yield from self._take(closing)):
            self._begin = self._at
        elif self._ended and closing.startswith(self._text[self._at :]):
            self._begin = len(self._text)
            raise Ended
        return found
