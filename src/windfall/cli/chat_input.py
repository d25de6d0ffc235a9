"""The user's messages: typed or pasted at a terminal, or read from a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windfall.core.errors import InputError
from windfall.prompts.reading import piped_lines
from windfall.render import console

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

QUOTES = '"""'  # a line with these quotes begins and ends a message of several lines
PROMPT, CONTINUATION = "> ", "  "
TAKES_FILES = ("/save ", "/load ")

Complete = Callable[[str], list[str]]  # text before the cursor → words that can complete its last word


def at_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def messages(history: Path | None, complete: Complete) -> Iterator[str]:
    """The user's messages, until Ctrl-D or the end of the pipe.

    At a terminal, pasted text is one message. In a pipe, each line is a message, except between lines of three quotes.
    """
    if not at_terminal():
        yield from joined(piped_lines())
        return
    session = editor(history, complete)
    while True:
        try:
            typed = session.prompt(PROMPT)
        except EOFError:
            return
        except KeyboardInterrupt:
            console.note("/exit or Ctrl-D ends the chat")
            continue
        yield typed


def joined(lines: Iterable[str]) -> Iterator[str]:
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
    if block is not None:
        raise InputError(f"the message that begins with {QUOTES} has no line {QUOTES} at its end")


def editor(history: Path | None, complete: Complete, **more: Any) -> PromptSession[str]:
    """A prompt_toolkit editor: Enter sends, Alt-Enter starts a new line, arrows browse the history, Tab completes."""
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
    quoted = False  # whether the opening quotes were typed; quotes in pasted text have no meaning

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

    class SavedHistory(FileHistory):
        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError, UnicodeEncodeError):  # a full disk does not end a conversation
                super().store_string(string)

    return InMemoryHistory() if file is None else SavedHistory(str(file))


def _completer(complete: Complete) -> Completer:
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    class WordCompleter(Completer):
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

    return WordCompleter()
