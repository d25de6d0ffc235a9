"""Named benchmarks: a quick one, and the papers' tables as far as their methods are here. The data is in suites.toml.

Suites do not name a drafter: it is the one of `--drafter`. At temperature above 0 the papers hide the sampling noise
from it, as `--uncoupled` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from windfall.bench.package_data import read_toml
from windfall.core.errors import InputError


@dataclass(frozen=True)
class Suite:
    """What `windfall bench run --suite` runs; options on the command line take precedence."""

    about: str
    methods: tuple[str, ...]
    tasks: tuple[str, ...]
    temperatures: tuple[float, ...] = (0.0,)
    repeats: int = 3
    limit: int | None = None
    max_new_tokens: int = 128
    prompt_tokens: int = 200
    ignore_eos: bool = False
    warm_up: int = 2
    memory: bool = False  # whether each method's peak memory is measured separately


def _suite(given: dict[str, Any]) -> Suite:
    known: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    return Suite(**known)


SUITES = {name: _suite(given) for name, given in read_toml("suites.toml").items()}


def find(name: str) -> Suite:
    """A suite by name."""
    if name not in SUITES:
        raise InputError(f"there is no suite '{name}'; choose from {', '.join(SUITES)}")
    return SUITES[name]


def join(names: Sequence[str]) -> Suite:
    """Several suites as one, with all methods and tasks; they must agree on how texts are made."""
    found = [find(name) for name in names]
    for option in ("ignore_eos", "prompt_tokens"):
        if len({getattr(suite, option) for suite in found}) > 1:
            raise InputError(f"{names[0]} and the other suites differ in {option}; run those that differ by themselves")
    limits = [suite.limit for suite in found]
    return Suite(
        "; ".join(suite.about for suite in found),
        _union(suite.methods for suite in found),
        _union(suite.tasks for suite in found),
        tuple(sorted({heat for suite in found for heat in suite.temperatures})),
        max(suite.repeats for suite in found),
        None if None in limits else max(limit for limit in limits if limit is not None),
        max(suite.max_new_tokens for suite in found),
        found[0].prompt_tokens,
        found[0].ignore_eos,
        max(suite.warm_up for suite in found),
        any(suite.memory for suite in found),
    )


def _union(lists: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in lists for name in names))
