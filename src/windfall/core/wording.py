"""Words of messages: counts with a singular or plural noun, lists of names, errors in one line."""

from __future__ import annotations

from collections.abc import Sequence


def counted(count: int, one: str, many: str = "") -> str:
    """`1 token`, `2 tokens`; `many` is the plural if it is irregular."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def listed(names: Sequence[str]) -> str:
    """`one`, `one and two`, `one, two and three`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300].rstrip(".:")
