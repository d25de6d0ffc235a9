"""Tables of constants that are kept as TOML files in the package."""

from __future__ import annotations

import sys
from functools import cache
from importlib.resources import files
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@cache
def read_toml(name: str) -> dict[str, Any]:
    """The content of a TOML file, given by its path inside `windfall.bench`."""
    found: dict[str, Any] = tomllib.loads(files("windfall.bench").joinpath(*name.split("/")).read_text("utf-8"))
    return found
