"""The terminal: prompts and turns come in; texts, coloured drafts, tables and one-line errors go out."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from windfall.core.wording import counted as quantity  # `counted` is a bar here
from windfall.render.tables import Figures, Wrapped

if TYPE_CHECKING:
    from windfall.core.stats import Stats
    from windfall.core.types import Step
    from windfall.engine.engine import Engine, Generation
    from windfall.engine.profiling import Profile

Show = Callable[["Step"], None]

DRAFTED = "#56b4e9"  # sky blue and orange tell apart for every kind of colour vision; the underline needs no colour
OWN = "underline #e69f00"
UNBOUNDED = 10_000  # columns of an output that is no terminal
MARKS = {"ok": ("✓", "green"), "broken": ("✗", "bold red"), "missing": ("!", "yellow")}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # rich calls this while it handles the error; what to do about it is for the command line to say


def stdout() -> Console:
    """Lines may be as long as they like in files and pipes, unless COLUMNS says otherwise."""
    bounded = "COLUMNS" in os.environ or (sys.stdout is not None and sys.stdout.isatty())
    return _Console(highlight=False, soft_wrap=True, width=None if bounded else UNBOUNDED)


def stderr() -> Console:
    return _Console(stderr=True, highlight=False, soft_wrap=True)


# ---- in


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt as given, from a file, or (`-` or nothing) from standard input; one line end at the end is dropped."""
    from windfall.core.files import read_text
    from windfall.core.types import InputError

    if prompt is not None and file is not None:
        raise InputError("give a prompt or --file, not both")
    if file is not None:
        text = _cut_end(read_text(file))
    elif prompt not in (None, "-"):
        text = str(prompt)
    elif sys.stdin is None or (prompt is None and sys.stdin.isatty()):
        raise InputError("there is no prompt; give one as an argument, with --file, or on standard input")
    else:
        text = _decode(sys.stdin.buffer.read(), "standard input")
    if not text.strip():
        raise InputError("the prompt is empty")
    return text


def piped_lines() -> Iterator[str]:
    """The lines of standard input, without their ends."""
    for line in () if sys.stdin is None else sys.stdin.buffer:
        yield _decode(line, "standard input")


def _decode(content: bytes, place: str) -> str:
    from windfall.core.types import InputError

    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{place} is not UTF-8 text (byte {error.start})") from error
    return _cut_end(text)


def _cut_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


# ---- texts


@contextlib.contextmanager
def waiting(message: str) -> Iterator[None]:
    """A word on the terminal while nothing else is shown, gone afterwards."""
    shown = message if sys.stderr.isatty() else ""
    print(shown, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(f"\r{' ' * len(shown)}\r" if shown else "", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def counted(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that is told how many of how many are done, with the time left; gone afterwards."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    shown = sys.stderr.isatty()
    with Progress(*columns, console=stderr(), transient=True, disable=not shown, speed_estimate_period=600) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[float], None]]:
    """A bar on the terminal that is told the finished share, gone afterwards."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(title), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr(), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda share: bar.update(task, completed=share)


def show_nothing(step: Step) -> None:
    """For `--json`, which prints at the end."""


def show_text(step: Step) -> None:
    """The text of a step, as it is."""
    print(step.text, end="", flush=True)


class DraftColours:
    """The text token by token: the drafted ones in one colour, those the target had to add itself in another."""

    def __init__(self, engine: Engine, stop: tuple[str, ...]) -> None:
        from windfall.core.detokenizer import Detokenizer

        self._text = Detokenizer(engine.target.tokenizer, stop)
        self._console = stdout()

    def __call__(self, step: Step) -> None:
        for place, token in enumerate(step.tokens):
            self._text.push(token)
            last = step.finish is not None and place == len(step.tokens) - 1
            style = DRAFTED if place < step.accepted else OWN
            self._console.out(self._text.take(final=last), style=style, highlight=False, end="")


def legend(generation: Generation) -> None:
    """What the colours of `DraftColours` mean, and how many tokens have each."""
    drafted = sum(min(step.accepted, len(step.tokens)) for step in generation.steps)
    own = generation.stats.tokens - drafted
    named = (("drafted and accepted", DRAFTED), f": {drafted}, ", ("the target's own", OWN), f": {own}")
    stderr().print(Text.assemble(*named))


def end_text(generation: Generation, coloured: bool) -> None:
    """End the line of a streamed text, and say on stderr how it went."""
    print(flush=True)
    if coloured:
        legend(generation)
    note(summary(generation))


def summary(generation: Generation) -> str:
    """The figures of a text in one line; with them the seed, if tokens were drawn at random."""
    stats = generation.stats
    speed = f"{stats.tokens_per_second:.1f} tokens/s, {stats.tau:.2f} tokens per pass"
    ending = ", interrupted" if generation.finish_reason == "interrupted" else ""
    prompt = f"prompt: {quantity(stats.prompt_tokens, 'token')}, {stats.prompt_tokens_per_second:.1f} tokens/s"
    seed = "" if stats.seed is None else f"; seed {stats.seed}"
    return f"{quantity(stats.tokens, 'token')}, {speed}{ending}; {prompt}{seed}"


def heading(name: str) -> None:
    stdout().print(Text(name, style="bold"))


def note(message: str) -> None:
    """A dim line on stderr."""
    stderr().print(Text(message, style="dim"))


def fail(message: str) -> None:
    """One red line on stderr."""
    stderr().print(Text(f"windfall: {' '.join(message.split())}", style="red"))


def print_json(value: Any, indent: int | None = None) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=indent), flush=True)


def as_record(generation: Generation) -> dict[str, Any]:
    """A generation as plain data."""
    return {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason,
        "stats": generation.stats.as_dict(),
    }


# ---- tables


def figures(rows: Mapping[str, Stats], baseline: Stats | None = None) -> Figures:
    """What generations cost; with a baseline, how much faster than it they were."""
    last = "tokens/s" if baseline is None else "speed-up"
    table = Figures(["", "tokens", "target passes", "tokens per pass", "seconds", last], least=("target passes",))
    for name, stats in rows.items():
        speed = stats.tokens_per_second
        shown = f"{speed:.1f}" if baseline is None else f"{speedup(baseline, stats):.2f}x"
        passes = str(stats.target_passes)
        table.add(name, str(stats.tokens), passes, f"{stats.tau:.2f}", f"{stats.seconds:.2f}", shown)
    return table


def speedup(plain: Stats, chosen: Stats) -> float:
    """Tokens per second over plain decoding's."""
    return chosen.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0


def standings(rows: Mapping[str, Stats]) -> None:
    """A line for each policy: what it drafted and verified, where its time went, how fast it was."""
    columns = ("policy", "tau", "delta", "rows", "draft", "verify", "policy", "other", "tokens/s", "speed-up")
    table = Figures(columns, least=("other", "policy", "verify", "draft", "rows", "delta", "tau", "tokens/s"))
    for name, stats in rows.items():
        decoding = max(stats.seconds - stats.prefill, 1e-9)
        parts = stats.split.draft, stats.split.verify, stats.split.policy
        shares = [f"{100 * part / decoding:.0f}%" for part in (*parts, max(decoding - sum(parts), 0.0))]
        made = f"{stats.tau:.2f}", f"{stats.delta:.2f}", f"{stats.rows / stats.cycles:.1f}"
        gain = f"{speedup(rows['none'], stats):.2f}x"
        table.add(name, *made, *shares, f"{stats.tokens_per_second:.1f}", gain)
    stdout().print(table)


def agreement(wanted: list[int], wrong: Mapping[str, list[int]], engine: Engine) -> None:
    """Whether every policy gave plain decoding's tokens, and if not, where they part."""
    out = stdout()
    if not wrong:
        out.print(Text(f"Same {quantity(len(wanted), 'token')} from all", style="green"))
    for name, found in wrong.items():
        at = first_difference(wanted, found)
        ours, theirs = (_token_at(ids, at, engine) for ids in (wanted, found))
        out.print(Text(f"Different from token {at + 1} on: none has {ours}, {name} has {theirs}", style="red"))


def cost_tables(profile: Profile) -> None:
    """Milliseconds of draft passes by width and of verify passes by rows and context length."""
    costs, about, out = profile.costs, profile.about, stdout()
    where = about["machine"]["gpu"] or f"{about['machine']['cpu']}, {quantity(about['machine']['threads'], 'thread')}"
    kind = about["target"]["dtype"].removeprefix("torch.")
    out.print(Text.assemble((about["target"]["name"], "bold"), f" in {kind} on {where}"))
    drafts = {f"{width}": [seconds] for width, seconds in zip(costs.drafts.sizes, costs.drafts.seconds, strict=True)}
    name = about["drafter"]["class"].rpartition(".")[2]
    out.print(_milliseconds("nodes", [f"draft pass, {name}"], drafts))
    rows = {f"{size}": [curve.at(size) for _, curve in costs.verifies] for size in costs.verifies[0][1].sizes}
    out.print(_milliseconds("rows", [f"verify pass, context {length}" for length, _ in costs.verifies], rows))
    figures = f"overhead of a cycle {1000 * costs.overhead:.2f} ms · c = draft pass / plain step = {costs.ratio:.3f}"
    out.print(Text(f"{figures} · rounds: {profile.rounds}"))


def _milliseconds(first: str, columns: list[str], rows: Mapping[str, list[float]]) -> Figures:
    table = Figures([first, *(f"{column} (ms)" for column in columns)], names="right")
    for label, cells in rows.items():
        table.add(label, *(f"{1000 * seconds:.3g}" if seconds < 0.1 else f"{1000 * seconds:.0f}" for seconds in cells))
    return table


def comparison(plain: Generation, chosen: Generation, policy: str, engine: Engine) -> None:
    """The figures of both runs, and whether their tokens are the same."""
    out = stdout()
    out.print(figures({"plain": plain.stats, policy: chosen.stats}, baseline=plain.stats))
    if plain.token_ids == chosen.token_ids:
        out.print(Text(f"Same {quantity(len(plain.token_ids), 'token')}", style="green"))
        return
    at = first_difference(plain.token_ids, chosen.token_ids)
    ours, theirs = (_token_at(g.token_ids, at, engine) for g in (plain, chosen))
    out.print(Text(f"Different from token {at + 1} on: plain has {ours}, {policy} has {theirs}", style="red"))


def first_difference(one: list[int], other: list[int]) -> int:
    """The first place where two lists differ, which may be the end of the shorter."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _token_at(ids: list[int], place: int, engine: Engine) -> str:
    return f"{engine.target.tokenizer.decode([ids[place]])!r}" if place < len(ids) else "ended"


def catalogue(title: str, entries: list[dict[str, Any]]) -> None:
    """Policies or drafters: what each does, and its options."""
    out = stdout()
    out.print(Text(title, style="bold underline"))
    for entry in entries:
        default = " (default)" if entry["default"] else ""
        told = Text.assemble("\n", (entry["name"], "bold"), (default, "dim"), "  ", entry["summary"])
        out.print(Wrapped(told))
        if entry["options"]:
            out.print(Wrapped(_options(entry["options"])))
    out.print()


def _options(options: list[dict[str, Any]]) -> Table:
    """The name of each option, and beside it what it means, its type and its default."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for each in options:
        default = "none" if each["default"] is None else str(each["default"]) or "empty"
        told = Text.assemble(each["help"], (f" ({each['type']}; default {default})", "dim"))
        table.add_row(Text(f"  {each['name']}"), told)
    return table


def checklist(checks: list[dict[str, Any]]) -> None:
    """The doctor's findings, a line each."""
    out = stdout()
    table = Table.grid(padding=(0, 1, 0, 0))
    for _ in ("mark", "name", "detail"):
        table.add_column(overflow="fold")
    for check in checks:
        mark, style = MARKS["ok" if check["ok"] else "broken" if check["needed"] else "missing"]
        table.add_row(Text(mark, style), Text(check["name"]), Text(check["detail"]))
    out.print(Wrapped(table))


def reliability(found: Any) -> None:
    """How often nodes were accepted, by how likely they were said to be."""
    told = found.as_dict()
    table = Figures(["", "confidence", "accepted", "nodes"])
    for name, error in (("before", told["ece_before"]), ("after", told["ece_after"])):
        for place, (confidence, frequency, count) in enumerate(told["bins"][name]):
            table.add("" if place else name, f"{confidence:.2f}", f"{frequency:.2f}", str(count))
        table.add("", Text("ECE", "bold"), Text(f"{error:.3f}", "bold"), ends_section=True)
    stdout().print(table)
    stdout().print(Text(quantity(told["nodes"], "judged node"), style="dim"))
