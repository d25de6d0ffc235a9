"""The messages of a user: typed or pasted at a terminal, or read from a pipe."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windfall.core.errors import InputError
from windfall.render import console

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

QUOTES = '"""'  # a line of its own before and after a message of several lines
PROMPT, CONTINUATION = "> ", "  "
TAKES_FILES = ("/save ", "/load ")

Complete = Callable[[str], list[str]]  # the text before the cursor → words that can take the place of its last one


def at_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def messages(history: Path | None, complete: Complete) -> Iterator[str]:
    """The user's messages, until Ctrl-D or the end of the pipe.

    At a terminal with prompt_toolkit, pasted text is one message. Without prompt_toolkit, and in a pipe, each line is
    a message, unless lines of three quotes stand around several.
    """
    if not at_terminal():
        return joined(console.piped_lines())
    if importlib.util.find_spec("prompt_toolkit") is None:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (gives `input` line editing and a history)
        return joined(_typed(lambda: input(PROMPT)), strict=False)
    session = editor(history, complete)
    return _typed(lambda: session.prompt(PROMPT))


def joined(lines: Iterable[str], strict: bool = True) -> Iterator[str]:
    """Messages from lines; the lines between two lines of three quotes are one message."""
    block: list[str] | None = None
    for line in lines:
        if line.strip() == QUOTES:
            if block is not None:
                yield "\n".join(block)
            block = [] if block is None else None
        elif block is not None:
            block.append(line)
        else:
            yield line.strip()
    if block is not None and strict:
        raise InputError(f"the message that begins with {QUOTES} has no line {QUOTES} at its end")


def _typed(ask: Callable[[], str]) -> Iterator[str]:
    while True:
        try:
            typed = ask()
        except EOFError:
            return
        except KeyboardInterrupt:
            console.note("/exit or Ctrl-D leaves")
            continue
        yield typed


# ---- prompt_toolkit


def editor(history: Path | None, complete: Complete, **more: Any) -> PromptSession[str]:
    """Enter sends, Alt-Enter makes a new line, the arrows go through the history, Tab completes."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.layout.processors import TabsProcessor
    from prompt_toolkit.output import create_output
    from prompt_toolkit.shortcuts import CompleteStyle

    return PromptSession(
        multiline=True,
        prompt_continuation=CONTINUATION,
        key_bindings=_keys(),
        history=_history(history),
        completer=_completer(complete),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        reserve_space_for_menu=0,
        input_processors=[TabsProcessor(char1=" ", char2=" ")],
        enable_suspend=True,
        **{"output": create_output(always_prefer_tty=True), **more},
    )


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()
    quoted = False  # whether the opening quotes were typed: those of pasted text mean nothing

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        nonlocal quoted
        buffer = event.current_buffer
        if buffer.text.strip() == QUOTES:
            quoted = True
            buffer.insert_text("\n")
            return
        first, *lines = buffer.text.split("\n")
        quoted = quoted and first.strip() == QUOTES
        if quoted and lines[-1].strip() != QUOTES:
            buffer.insert_text("\n")
            return
        if quoted:
            buffer.text, quoted = "\n".join(lines[:-1]), False
        buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def clear(event: KeyPressEvent) -> None:
        nonlocal quoted
        quoted = False
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return keys


def _history(file: Path | None) -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError, UnicodeEncodeError):  # a full disk does not end a conversation
                super().store_string(string)

    return InMemoryHistory() if file is None else Kept(str(file))


def _completer(complete: Complete) -> Completer:
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    class Words(Completer):
        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
            text = document.text_before_cursor
            for start in TAKES_FILES:
                if text.startswith(start):
                    path = Document(text.removeprefix(start))
                    yield from PathCompleter(expanduser=True).get_completions(path, complete_event)
                    return
            word = "" if text.endswith(" ") else text.split(" ")[-1]
            for each in complete(text):
                yield Completion(each, start_position=-len(word))

    return Words()
