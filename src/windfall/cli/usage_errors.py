"""Errors of typer, which reads the command line, in the words of windfall's other errors."""

from __future__ import annotations

from typing import Any

from windfall.core.options import WORDS

NUMBERS = {"int": WORDS[int], "float": WORDS[float]}  # what the text of an option should be
BOUNDS = {"ge": "at least", "le": "at most"}


def message_of(error: Any) -> str:
    """What is wrong with the command line. typer's own text about a number names neither the number nor its limits."""
    option, problem = getattr(error, "param", None), _first_problem(error)
    if option is None or problem is None:
        return str(error.format_message())
    flag, given = option.opts[0], problem["input"]
    wanted = NUMBERS.get(problem["type"].partition("_")[0])
    if wanted is not None:
        return f"{flag} takes {wanted}, not '{given}'"
    for bound, words in BOUNDS.items():
        if bound in problem.get("ctx", {}):
            return f"{flag} must be {words} {problem['ctx'][bound]:g}, not {given}"
    return str(error.format_message())


def _first_problem(error: Any) -> dict[str, Any] | None:
    """What pydantic, with which typer reads values, found first; None if the error is of another kind."""
    list_problems = getattr(error.__cause__, "errors", None)
    found: list[dict[str, Any]] = list_problems() if callable(list_problems) else []
    return found[0] if found else None
