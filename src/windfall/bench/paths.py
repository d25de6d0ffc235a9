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
        if path.is_relative_to(here):
            return str(path.relative_to(here))
        method = not path.exists() and path.parent.is_dir()  # a drafter's folder and how it is used
        return f"{path.parent.name}/{path.name}" if method else path.name

    return ABSOLUTE.sub(short, text)
