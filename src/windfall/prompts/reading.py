"""Reading a prompt from the command line, a file or standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from windfall.core.errors import InputError
from windfall.core.files import read_text


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt itself, the content of a file, or (`-` or None) standard input, without the last line break."""
    if prompt is not None and file is not None:
        raise InputError("give a prompt or --file, not both")
    if file is not None:
        text = _without_line_break(read_text(file))
    elif prompt not in (None, "-"):
        text = str(prompt)
    elif sys.stdin is None or (prompt is None and sys.stdin.isatty()):
        raise InputError("there is no prompt; give one as an argument, with --file, or on standard input")
    else:
        text = _decode(sys.stdin.buffer.read())
    if not text.strip():
        raise InputError("the prompt is empty")
    return text


def piped_lines() -> Iterator[str]:
    """The lines of standard input, without line breaks."""
    for line in () if sys.stdin is None else sys.stdin.buffer:
        yield _decode(line)


def _decode(content: bytes) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 text (byte {error.start})") from error
    return _without_line_break(text)


def _without_line_break(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")
