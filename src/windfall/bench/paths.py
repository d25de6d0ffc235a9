"""Paths in published records: without the folders of the machine they were made on."""

from __future__ import annotations

import re
from pathlib import Path

ABSOLUTE = re.compile(r"(?<![\w.~-])/[^,=:]*[^,=:/]")


def shorten(text: str) -> str:
    """Replace absolute paths in a text by paths relative to the working directory or, outside of it, by bare names."""
    here = Path.cwd()

    def short(match: re.Match[str]) -> str:
        path = Path(match.group())
        if path.is_relative_to(here):
            return str(path.relative_to(here))
        method = not path.exists() and path.parent.is_dir()  # a drafter's folder followed by a method
        return f"{path.parent.name}/{path.name}" if method else path.name

    return ABSOLUTE.sub(short, text)
