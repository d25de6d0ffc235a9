"""Names of files and folders, for what others will read: nobody's own folders are in them."""

from __future__ import annotations

import re
from pathlib import Path

ABSOLUTE = re.compile(r"(?<![\w.~-])/[^,=:]*[^,=:/]")


def shorten(text: str) -> str:
    """Absolute paths in a text relative to the working directory or, outside of it, as bare names."""
    here = Path.cwd()

    def short(match: re.Match[str]) -> str:
        path = Path(match.group())
        return str(path.relative_to(here)) if path.is_relative_to(here) else path.name

    return ABSOLUTE.sub(short, text)
