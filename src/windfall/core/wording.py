"""Counts with a singular or plural noun, for messages."""

from __future__ import annotations


def counted(count: int, one: str, many: str = "") -> str:
    """`1 token`, `2 tokens`; `many` is the plural if it is irregular."""
    return f"{count} {one if count == 1 else many or one + 's'}"
