"""JSON between fixed texts as a Lark grammar, which both libraries read."""

from __future__ import annotations

import json
from typing import Any


def lark(parts: dict[str, Any], inner: str) -> str:
    """The grammar of a `tagged_json` constraint; `inner` is how the library writes the JSON in it."""
    call = " ".join([*_quoted(parts["begin"]), inner, *_quoted(parts["end"])])
    more = f" ({' '.join([*_quoted(parts['separator']), 'call'])})*" if parts["many"] else ""
    return f"start: call{more}\ncall: {call}\n"


def _quoted(text: str) -> list[str]:
    return [json.dumps(text)] if text else []
