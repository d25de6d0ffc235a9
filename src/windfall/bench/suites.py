"""Named benchmarks: a quick one, and tables of papers whose methods windfall has. The data is in suites.toml.

Suites do not name a drafter: it is the one of `--drafter`. At temperature above 0 the papers hide the sampling noise
from it, as `--uncoupled` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from windfall.bench.package_data import read_toml
from windfall.core.errors import InputError

PROMPT_TOKENS = 200  # of a text to be continued


@dataclass(frozen=True)
class Workload:
    """Which methods answer which tasks, and how the texts are generated."""

    methods: tuple[str, ...]
    tasks: tuple[str, ...]
    temperatures: tuple[float, ...] = (0.0,)
    repeats: int = 3
    limit: int | None = None
    max_new_tokens: int = 128
    prompt_tokens: int = PROMPT_TOKENS
    ignore_eos: bool = False
    warm_up: int = 2  # prompts for each method and temperature
    memory: bool = False  # whether each method's peak memory is measured separately, on CUDA


@dataclass(frozen=True)
class Suite(Workload):
    """What `windfall bench run --suite` runs; options on the command line take precedence."""

    about: str = ""


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
    return replace(
        found[0],
        about="; ".join(suite.about for suite in found),
        methods=_union(suite.methods for suite in found),
        tasks=_union(suite.tasks for suite in found),
        temperatures=tuple(sorted({temperature for suite in found for temperature in suite.temperatures})),
        limit=None if None in limits else max(limit for limit in limits if limit is not None),
        memory=any(suite.memory for suite in found),
        **{name: max(getattr(suite, name) for suite in found) for name in ("repeats", "max_new_tokens", "warm_up")},
    )


def _union(lists: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in lists for name in names))
