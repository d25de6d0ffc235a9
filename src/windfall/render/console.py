"""Output on the terminal: texts, coloured drafts, progress bars, tables and one-line errors."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from windfall.core.wording import counted
from windfall.render.tables import Figures, Wrapped

if TYPE_CHECKING:
    from rich.progress import Progress

    from windfall.core.stats import Stats
    from windfall.core.types import Step
    from windfall.costs.curves import Costs

Show = Callable[["Step"], None]

DRAFTED = "#56b4e9"  # sky blue and orange can be told apart by people with any colour vision
OWN = "underline #e69f00"
UNBOUNDED_COLUMNS = 10_000  # width of an output that is not a terminal
SPEED_SECONDS = 600  # the last ten minutes decide how much time a progress bar estimates
MARKS = {"ok": ("✓", "green"), "broken": ("✗", "bold red"), "missing": ("!", "yellow")}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # rich calls this while it handles the error; the command line handles it


def stdout() -> Console:
    """In files and pipes lines have any length, unless COLUMNS is set."""
    bounded = "COLUMNS" in os.environ or (sys.stdout is not None and sys.stdout.isatty())
    return _Console(highlight=False, soft_wrap=True, width=None if bounded else UNBOUNDED_COLUMNS)


def stderr() -> Console:
    return _Console(stderr=True, highlight=False, soft_wrap=True)


# ---- progress, shown on terminals only and removed afterwards


@contextlib.contextmanager
def waiting(message: str) -> Iterator[None]:
    """Show a message while nothing else is printed."""
    visible = message if sys.stderr.isatty() else ""
    print(visible, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(f"\r{' ' * len(visible)}\r" if visible else "", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(title: str, counts: bool = False) -> Iterator[Callable[..., None]]:
    """A bar, moved by calling the function with a share of 1, or for `counts` with (done, total)."""
    with _bar(title, counts) as bar:
        task = bar.add_task(title, total=None if counts else 1.0)
        yield lambda done, total=1.0: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def live_progress(title: str) -> Iterator[Callable[..., None]]:
    """A bar with a changing description: call the function with a share of 1, the description and, if it is not
    empty, a line that stays on the terminal."""
    with _bar("{task.description}", counts=False) as bar:
        task = bar.add_task(title, total=1.0)

        def update(share: float, description: str, line: str = "") -> None:
            bar.update(task, completed=share, description=description)
            if line:
                bar.console.print(line)

        yield update


def _bar(title: str, counts: bool) -> Progress:
    from rich import progress as rich

    middle = (rich.MofNCompleteColumn(),) if counts else ()
    times = rich.TimeElapsedColumn(), rich.TimeRemainingColumn()
    columns = (rich.TextColumn(title), rich.BarColumn(20), *middle, *times)
    how: dict[str, Any] = {"disable": not sys.stderr.isatty(), "speed_estimate_period": SPEED_SECONDS}
    return rich.Progress(*columns, console=stderr(), transient=True, **how)


# ---- texts


def show_nothing(step: Step) -> None:
    """For `--json`, which prints at the end."""


def show_text(step: Step) -> None:
    """Print the text of a step."""
    print(step.text, end="", flush=True)


class DraftColours:
    """Prints accepted draft tokens in one colour and the target's own tokens in another."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        from windfall.core.detokenizer import Detokenizer

        self._text = Detokenizer(tokenizer, stop)
        self._console = stdout()

    def __call__(self, step: Step) -> None:
        for place, token in enumerate(step.tokens):
            self._text.push(token)
            last = step.finish is not None and place == len(step.tokens) - 1
            style = DRAFTED if place < step.accepted else OWN
            self._console.out(self._text.take(final=last), style=style, highlight=False, end="")


def print_origins(steps: Sequence[Step]) -> None:
    """Print on stderr how many tokens were drafted and how many are the target's own, in their colours."""
    drafted = sum(min(step.accepted, len(step.tokens)) for step in steps)
    own = sum(len(step.tokens) for step in steps) - drafted
    parts = (("drafted and accepted", DRAFTED), f": {drafted}, ", ("the target's own", OWN), f": {own}")
    stderr().print(Text.assemble(*parts))


def summary(stats: Stats, interrupted: bool) -> str:
    """The statistics of a text in one line, with the seed if tokens were sampled."""
    speed = f"{stats.tokens_per_second:.1f} tokens/s, {stats.tau:.2f} tokens per pass"
    ending = ", interrupted" if interrupted else ""
    prompt = f"prompt: {counted(stats.prompt_tokens, 'token')}, {stats.prompt_tokens_per_second:.1f} tokens/s"
    seed = "" if stats.seed is None else f"; seed {stats.seed}"
    return f"{counted(stats.tokens, 'token')}, {speed}{ending}; {prompt}{seed}"


def heading(name: str) -> None:
    stdout().print(Text(name, style="bold"))


def note(message: str) -> None:
    """Print a dim line on stderr."""
    stderr().print(Text(message, style="dim"))


def fail(message: str) -> None:
    """Print an error as one red line on stderr."""
    stderr().print(Text(f"windfall: {' '.join(message.split())}", style="red"))


def print_json(value: Any, indent: int | None = None) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=indent), flush=True)


# ---- tables


def stats_table(rows: Mapping[str, Stats], baseline: Stats | None = None) -> Figures:
    """Tokens, passes and times of generations; with a baseline, the speed-up over it."""
    last = "tokens/s" if baseline is None else "speed-up"
    table = Figures(["", "tokens", "target passes", "tokens per pass", "seconds", last], least=("target passes",))
    for name, stats in rows.items():
        speed = f"{stats.tokens_per_second:.1f}" if baseline is None else f"{speedup(baseline, stats):.2f}x"
        counts = str(stats.tokens), str(stats.target_passes)
        table.add(name, *counts, f"{stats.tau:.2f}", f"{stats.seconds:.2f}", speed)
    return table


def speedup(plain: Stats, chosen: Stats) -> float:
    """Speed-up over plain decoding, by tokens per second."""
    return chosen.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0


def print_policy_stats(rows: Mapping[str, Stats]) -> None:
    """A row for each policy: what it drafted and verified, the shares of its time, and its speed."""
    columns = ("policy", "tau", "delta", "rows", "draft", "verify", "policy", "other", "tokens/s", "speed-up")
    table = Figures(columns, least=("other", "policy", "verify", "draft", "rows", "delta", "tau", "tokens/s"))
    for name, stats in rows.items():
        decoding = max(stats.seconds - stats.prefill, 1e-9)
        parts = stats.split.draft, stats.split.verify, stats.split.policy
        shares = [f"{100 * part / decoding:.0f}%" for part in (*parts, max(decoding - sum(parts), 0.0))]
        means = f"{stats.tau:.2f}", f"{stats.delta:.2f}", f"{stats.rows / stats.cycles:.1f}"
        gain = f"{speedup(rows['none'], stats):.2f}x"
        table.add(name, *means, *shares, f"{stats.tokens_per_second:.1f}", gain)
    stdout().print(table)


def print_agreement(baseline: str, wanted: list[int], others: Mapping[str, list[int]], tokenizer: Any) -> None:
    """Whether the other texts have the baseline's tokens, and if not, where they first differ."""
    from windfall.core.stats import first_difference

    places = {name: first_difference(wanted, ids) for name, ids in others.items()}
    wrong = {name: place for name, place in places.items() if place is not None}
    if not wrong:
        stdout().print(Text(f"Same {counted(len(wanted), 'token')}", style="green"))
    for name, at in wrong.items():
        one, other = (_token_at(each, at, tokenizer) for each in (wanted, others[name]))
        message = f"Different from token {at + 1} on: {baseline} has {one}, {name} has {other}"
        stdout().print(Text(message, style="red"))


def _token_at(ids: list[int], place: int, tokenizer: Any) -> str:
    return f"{tokenizer.decode([ids[place]])!r}" if place < len(ids) else "ended"


def print_equality(different: int, texts: int, failed: bool = True) -> None:
    """How many conversations differ from plain decoding; in red if that is a failure."""
    if not texts:
        line = Text("No text was compared with plain decoding", style="yellow")
    elif not different:
        line = Text(f"Same text as plain decoding in all {counted(texts, 'conversation')}", style="green")
    else:
        style = "red" if failed else "yellow"
        line = Text(f"{different} of {texts} conversations differ from plain decoding", style=style)
    stdout().print(line)


def print_costs(costs: Costs, about: Mapping[str, Any], rounds: int) -> None:
    """Milliseconds of draft passes by width, and of verify passes by rows and context length, as a profile has them."""
    out = stdout()
    where = about["machine"]["gpu"] or f"{about['machine']['cpu']}, {counted(about['machine']['threads'], 'thread')}"
    dtype = about["target"]["dtype"].removeprefix("torch.")
    out.print(Text.assemble((about["target"]["name"], "bold"), f" in {dtype} on {where}"))
    drafts = {f"{width}": [seconds] for width, seconds in zip(costs.drafts.sizes, costs.drafts.seconds, strict=True)}
    name = about["drafter"]["class"].rpartition(".")[2]
    out.print(_milliseconds("nodes", [f"draft pass, {name}"], drafts))
    rows = {f"{size}": [curve.at(size) for _, curve in costs.verifies] for size in costs.verifies[0][1].sizes}
    out.print(_milliseconds("rows", [f"verify pass, context {length}" for length, _ in costs.verifies], rows))
    figures = f"overhead of a cycle {1000 * costs.overhead:.2f} ms · c = draft pass / plain step = {costs.ratio:.3f}"
    out.print(Text(f"{figures} · rounds: {rounds}"))


def _milliseconds(first: str, columns: list[str], rows: Mapping[str, list[float]]) -> Figures:
    table = Figures([first, *(f"{column} (ms)" for column in columns)], names="right")
    for label, cells in rows.items():
        table.add(label, *(f"{1000 * seconds:.3g}" if seconds < 0.1 else f"{1000 * seconds:.0f}" for seconds in cells))
    return table


def print_reliability(found: Any) -> None:
    """The acceptance rate of nodes by the drafter's confidence, before and after calibration."""
    record = found.as_dict()
    table = Figures(["", "confidence", "accepted", "nodes"])
    for name, error in (("before", record["ece_before"]), ("after", record["ece_after"])):
        for place, (confidence, frequency, count) in enumerate(record["bins"][name]):
            table.add("" if place else name, f"{confidence:.2f}", f"{frequency:.2f}", str(count))
        table.add("", Text("ECE", "bold"), Text(f"{error:.3f}", "bold"), ends_section=True)
    stdout().print(table)
    stdout().print(Text(counted(record["nodes"], "verified node"), style="dim"))


# ---- lists


def print_catalogue(title: str, entries: list[dict[str, Any]]) -> None:
    """Policies or drafters, with a summary and the options of each."""
    out = stdout()
    out.print(Text(title, style="bold underline"))
    for entry in entries:
        default = " (default)" if entry["default"] else ""
        about = Text.assemble("\n", (entry["name"], "bold"), (default, "dim"), "  ", entry["summary"])
        out.print(Wrapped(about))
        if entry["options"]:
            out.print(Wrapped(_option_table(entry["options"])))
    out.print()


def _option_table(options: list[dict[str, Any]]) -> Table:
    """The name of each option, and next to it its meaning, type and default."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for each in options:
        default = "none" if each["default"] is None else str(each["default"]) or "empty"
        about = Text.assemble(each["help"], (f" ({each['type']}; default {default})", "dim"))
        table.add_row(Text(f"  {each['name']}"), about)
    return table


def print_checks(checks: list[dict[str, Any]]) -> None:
    """The results of `windfall doctor`, a line each."""
    table = Table.grid(padding=(0, 1, 0, 0))
    for _ in ("mark", "name", "detail"):
        table.add_column(overflow="fold")
    for check in checks:
        mark, style = MARKS["ok" if check["ok"] else "broken" if check["needed"] else "missing"]
        table.add_row(Text(mark, style), Text(check["name"]), Text(check["detail"]))
    stdout().print(Wrapped(table))
