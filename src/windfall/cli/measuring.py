"""What `bench speed` and `bench throughput` have in common: their settings in a result, and how they end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from windfall.bench.methods import DrafterSpec, Method
from windfall.bench.paths import shorten
from windfall.render import console

Report = dict[str, Any]


class Result(Protocol):
    """What was measured so far."""

    def as_dict(self) -> Report: ...


class Options(Protocol):
    """The options that both commands have."""

    limit: int
    widen: str | None


def chosen(
    options: Options, methods: Sequence[Method], tasks: Sequence[str], drafter: DrafterSpec, settings: Any
) -> dict[str, Any]:
    """What was asked for, for the result; `settings` is a dataclass."""
    return {
        "methods": [method.label for method in methods],
        "tasks": list(map(shorten, tasks)),
        "limit": options.limit,
        "drafter": drafter.label,
        "widen": options.widen,
        **dataclasses.asdict(settings),
    }


def run(
    result: Result,
    work: Callable[[], None],
    save: Callable[[Any], None],
    draw: Callable[[Report], None],
    show: Callable[[Report], None],
    json: bool,
) -> bool:
    """Measure, save and show the result; returns whether Ctrl-C ended the work, which keeps what is finished."""
    interrupted = False
    try:
        work()
    except KeyboardInterrupt:
        interrupted = True
        console.note("stopped; finished measurements are kept")
    save(result)
    present(result.as_dict(), draw, show, json)
    return interrupted


def present(report: Report, draw: Callable[[Report], None], show: Callable[[Report], None], json: bool) -> None:
    """Draw and show a result."""
    draw(report)
    if json:
        console.print_json(report, indent=2)
    else:
        show(report)
