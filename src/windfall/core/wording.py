"""Counts in words, for everything that is printed."""

from __future__ import annotations


def counted(count: int, one: str, many: str = "") -> str:
    """`1 token`, `2 tokens`; `many` is the plural where it is not formed with an s."""
    return f"{count} {one if count == 1 else many or one + 's'}"
