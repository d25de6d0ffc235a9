"""The report of one run: a summary in words, tables, figures, and the papers' numbers next to ours."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from windfall.bench import reading, results
from windfall.bench.disturbance import disturbances
from windfall.bench.papers import tables
from windfall.bench.reading import ALL, Run
from windfall.bench.report import compare, parts
from windfall.bench.report.parts import DASH, Progress, Report, Section, Table, interval, number
from windfall.bench.report.run_figures import drawings
from windfall.bench.results import PLAIN, Row
from windfall.core.files import make_folder, replace_text
from windfall.core.stats import Estimate
from windfall.core.types import InputError

PLAIN_DELTA = 0.01  # draft passes per target pass; a method with fewer decodes plainly
MAX_NAMED_METHODS = 40  # a summary counts more methods than these instead of naming them
FEW_PROMPTS = 10  # with fewer prompts, an interval over them is rough


def make(folder: Path, loaded: Run | None = None) -> Report:
    """Make the report of a folder, which is read unless `loaded` is given."""
    loaded = reading.load(folder) if loaded is None else loaded
    run = by_category(loaded)
    if not run.records:
        raise InputError(f"'{folder}' holds no finished conversation yet; run the benchmark again to go on with it")
    rows = results.summary(run)
    warnings = {each.temperature: each.warning for each in disturbances(run, rows)}
    return Report(
        title=f"Benchmark: {folder.resolve().name}",
        summary=[_setting(run), *_winners(run, rows, warnings), *_caution(run, rows), _sameness(run)],
        facts=_facts(run, rows, warnings),
        sections=[*_sections(run, rows, warnings), *(compare.sections([loaded]) or [compared_with_papers(run, rows)])],
        trees=[(file.stem, file.read_text("utf-8")) for file in sorted((folder / "trees").glob("*.svg"))],
        commands=[*commands(run), f"windfall report {shlex.quote(folder.resolve().name)}"],
        about=provenance_lines(run),
        rows=rows,
    )


def by_category(run: Run) -> Run:
    """A run of a single task with several categories, with the categories as tasks."""
    categories = {record.category for record in run.records}
    if len(run.tasks) != 1 or len(categories) < 2:
        return run
    return replace(run, records=[replace(record, task=record.category or "other") for record in run.records])


# ---- in words


def _setting(run: Run) -> str:
    prompts = len({(record.task, record.id) for record in run.records})
    repeats = len({record.repeat for record in run.records})
    tokens = sum(record.tokens for record in run.select(PLAIN))
    temperatures = _list([f"{each:g}" for each in run.temperatures])
    more = f", {repeats} times each" if repeats > 1 else ""
    methods = _few(run.methods, "methods", MAX_NAMED_METHODS)
    return (
        f"The model {_target(run)} answered {prompts} prompts ({_list(run.tasks)}){more}, at temperature "
        f"{temperatures}, with {methods}. Plain decoding wrote {tokens:,} tokens of text. {_machine(run)}."
    )


def _target(run: Run) -> str:
    target = run.provenance.get("target") or run.settings.get("target") or "under test"
    name = str(target.get("name", "under test") if isinstance(target, dict) else target)
    kind = f" in {target['dtype']}" if isinstance(target, dict) and target.get("dtype") else ""
    return (name.rstrip("/").rpartition("/")[2] or name) + kind


def _machine(run: Run) -> str:
    machine = run.provenance.get("machine") or "unknown"
    if not isinstance(machine, dict):
        return f"Machine: {machine}"
    threads = machine.get("threads")
    threads = f", {threads} thread{'s' if threads != 1 else ''}" if threads else ""
    return f"Machine: {machine.get('gpu') or str(machine.get('cpu', 'unknown')) + threads}"


def _winners(run: Run, rows: list[Row], warnings: Mapping[float, str]) -> list[str]:
    """The fastest method at each temperature, unless the times are wrong."""
    found = []
    for temperature in run.temperatures:
        if temperature in warnings:
            found.append(f"At temperature {temperature:g} {warnings[temperature]}.")
        elif not run.settings.get("parts"):
            found += _winner(_ranked(rows, _whole(run), temperature), temperature)
    return found


def _winner(rows: list[Row], temperature: float) -> list[str]:
    """The fastest method, its speed-up, and whether that is certain."""
    at = f"At temperature {temperature:g}"
    timed = [row for row in rows if row.speedup is not None and row.method != PLAIN]
    if not timed:
        best = max((row for row in rows if row.method != PLAIN), key=lambda row: row.tau, default=None)
        text = f" {best.method} had most tokens per target pass: {best.tau:.2f}." if best else ""
        return [f"{at} nothing was timed against plain decoding.{text}"]
    first = timed[0]
    gain = first.speedup
    assert gain is not None
    if gain.value < 1:
        return [f"{at} no method was faster than plain decoding; {first.method} came closest: {_times(gain)}."]
    text = f"{at} {first.method} was fastest: {_times(gain)}, with {first.tau:.2f} tokens per target pass."
    if first.delta < PLAIN_DELTA:
        text += " It hardly drafted, so this is plain decoding and the difference is noise."
    elif gain.low < 1:
        text += " The interval contains 1, so this may be no gain at all."
    if len(timed) > 1 and timed[1].speedup is not None:
        second = timed[1].speedup
        close = second.high >= gain.low
        text += f" Next came {timed[1].method}, {_times(second)}{'; their intervals overlap' if close else ''}."
    return [text]


def _caution(run: Run, rows: list[Row]) -> list[str]:
    prompts, found = max(row.prompts for row in rows), []
    if run.settings.get("parts"):
        found.append(SEVERAL_SUITES)
    if prompts < FEW_PROMPTS:
        found.append(f"Only {prompts} prompts: the intervals are rough, and small differences mean nothing.")
    return found


SEVERAL_SUITES = (
    "Several suites ran at once, and a method answered only the tasks of its own suites: figures over all tasks are of "
    "different tasks. Compare only the rows of one paper's table."
)


def _times(gain: Estimate) -> str:
    return f"{gain.value:.2f} times plain decoding's speed ({_bounds(gain)})"


def _bounds(gain: Estimate) -> str:
    return f"95% interval {gain.low:.2f} to {gain.high:.2f}"


def _sameness(run: Run) -> str:
    judged, wrong = len(results.compared(run.records)), results.differences(run)
    alone = sum(record.method != PLAIN for record in run.records) - judged
    text = f" {alone:,} more have no plain counterpart: the run is unfinished." if alone else ""
    if not judged:
        return "No text was compared with plain decoding's." + text
    if not wrong:
        same = f"{judged:,} of {judged:,} conversations"
        return f"Every text was identical to plain decoding's, token for token: {same}." + text
    names = _list(sorted({each.method for each in wrong}))
    return (
        f"{judged - len(wrong):,} of {judged:,} conversations were identical to plain decoding's, token for token; "
        f"{len(wrong):,} were not ({names}). {_why_not(run)}"
    ) + text


def _why_not(run: Run) -> str:
    """Why texts can differ, which depends on the precision."""
    target = run.provenance.get("target")
    kind = target.get("dtype") if isinstance(target, dict) else None
    if kind in ("bfloat16", "float16"):
        return f"In {kind} near-ties can flip with the number of rows in a pass."
    return "In full precision that should not happen."


def _facts(run: Run, rows: list[Row], warnings: Mapping[float, str]) -> list[tuple[str, str]]:
    """The large figures of the page with their descriptions."""
    found = []
    for temperature in run.temperatures:
        if temperature in warnings:
            found.append(("disturbed", f"temperature {temperature:g}: {warnings[temperature]}"))
            continue
        ranked = [row for row in _ranked(rows, _whole(run), temperature) if row.method != PLAIN and row.speedup]
        if ranked and ranked[0].speedup:
            gain, what = ranked[0].speedup, f"speed-up of {ranked[0].method}, temperature {temperature:g}"
            found.append((f"{gain.value:.2f}×", f"{what} ({_bounds(gain)})"))
    if judged := len(results.compared(run.records)):
        same = 1 - len(results.differences(run)) / judged
        found.append((f"{math.floor(1000 * same) / 10:g}%", "texts identical to plain decoding"))
    return [*found, (f"{judged:,}", "conversations compared with plain decoding")]


# ---- sections


def _sections(run: Run, rows: list[Row], warnings: Mapping[float, str]) -> list[Section]:
    found = []
    for temperature in run.temperatures:
        ranked = _ranked(rows, _whole(run), temperature)
        name = f"Temperature {temperature:g}" + (" (greedy)" if temperature == 0 else "")
        shown = [_overall(ranked, name), *_by_task(run, rows, ranked, temperature)]
        text = f"{_capital(warnings[temperature])}.\n\n{_TERMS}" if temperature in warnings else _TERMS
        found.append(Section(name, text, shown, drawings(run, rows, ranked, temperature)))
    return found


_TERMS = (
    "tau: tokens per pass of the target. delta: draft passes per target pass. Rows: tree nodes that a target pass "
    "verifies, including the root. Speed-up: tokens per second over plain decoding's on the same prompts, with a 95% "
    "bootstrap interval over the prompts."
)


def _whole(run: Run) -> str:
    return ALL if len(run.tasks) > 1 else run.tasks[0]


def _ranked(rows: Sequence[Row], task: str, temperature: float) -> list[Row]:
    """The rows by speed-up; without times, by tokens per pass."""
    own = [row for row in rows if row.task == task and row.temperature == temperature]
    return sorted(own, key=lambda row: (-(row.speedup.value if row.speedup else 0.0), -row.tau))


def _overall(rows: list[Row], name: str) -> Table:
    columns = ("method", "speed-up", "tokens/s", "tau", "delta", "rows", "draft", "verify", "policy", "other", "same")
    cells = [
        [
            row.method,
            interval(row.speedup),
            number(row.tokens_per_second, 1),
            number(row.tau),
            number(row.delta),
            number(row.rows, 1),
            *_shares(row),
            DASH if row.method == PLAIN else f"{row.compared - row.different}/{row.compared}",
        ]
        for row in rows
    ]
    note = "Draft, verify, policy, other: shares of the time, the rest is the prompt. Same: texts equal to plain ones."
    return Table(f"All tasks, {name.lower()}", columns, cells, note, frozenset(_best(rows)))


def _best(rows: list[Row]) -> list[tuple[int, int]]:
    places = {1: [row.speedup.value if row.speedup else 0.0 for row in rows], 3: [row.tau for row in rows]}
    return [(values.index(max(values)), column) for column, values in places.items() if rows and max(values) > 0]


def _shares(row: Row) -> list[str]:
    parts = ("draft", "verify", "policy", "other")
    return [DASH] * len(parts) if row.split is None else [f"{100 * row.split[part]:.0f}%" for part in parts]


def _by_task(run: Run, rows: list[Row], ranked: list[Row], temperature: float) -> list[Table]:
    if len(run.tasks) < 2:
        return []
    found = {(row.method, row.task): row for row in rows if row.temperature == temperature}
    methods, columns = [row.method for row in ranked], ("method", *run.tasks)

    def cells(text: Callable[[Row], str]) -> list[list[str]]:
        return [
            [method, *(text(found[method, task]) if (method, task) in found else DASH for task in run.tasks)]
            for method in methods
        ]

    taus = Table("tau by task", columns, cells(lambda row: number(row.tau)), folded=True)
    if not any(row.speedup for row in ranked):
        return [taus]
    return [Table("Speed-up by task", columns, cells(lambda row: interval(row.speedup))), taus]


# ---- compared with the papers


def compared_with_papers(run: Run, rows: list[Row]) -> Section:
    """Our figures next to the papers' for the same method, and what differs."""
    found = [line for row in rows if row.task == _whole(run) for line in _published(row, run.tasks)]
    columns = ("method", "T", "speed-up here", "tau here", "published as", "models", "tasks", "speed-up", "tau")
    theirs = dict.fromkeys(paper for paper, _ in found)
    text = (
        "The same kinds of trees as the papers measured them. Ranges run over a paper's models and tasks: the tasks "
        "that were measured here too, or all of its own where none is shared. Models, drafters, settings, hardware and "
        "baselines differ, so this tells what to expect elsewhere, not who is right."
    )
    differing = [f"Here: {_here(run)}", *(f"{paper}: {tables.measured_how(paper)}" for paper in theirs)]
    shown = [Table("Ours and theirs", columns, [line for _, line in found])] if found else []
    return Section("Compared with the papers", "\n\n".join([text, *differing]) if found else NO_PAPER, shown)


NO_PAPER = "None of these methods is in the papers' tables at these temperatures."


def _here(run: Run) -> str:
    drafters = sorted({record.drafter for record in run.records} - {PLAIN})
    text = f", drafted by {_list(drafters)}" if drafters else ""
    coupled = any(record.coupled and record.temperature > 0 for record in run.records)
    dice = " At temperature above 0 the drafter sees the noise of the draws here, and in no paper." if coupled else ""
    return f"{_target(run)}{text}; the baseline is plain decoding by the same code. {_machine(run)}.{dice}"


def _published(row: Row, tasks: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(paper, line) for every table with this method."""
    ours = {tables.task_name(task) for task in tasks}
    found: dict[tuple[str, str, str], list[tables.Published]] = {}
    for cell in tables.published_for(row.policy, row.temperature):
        found.setdefault((cell.paper, cell.table, cell.method), []).append(cell)
    lines: list[tuple[str, list[str]]] = []
    for (paper, table, method), cells in found.items():
        shared = [cell for cell in cells if cell.task in ours] or cells
        names, models = (list(dict.fromkeys(getattr(cell, part) for cell in shared)) for part in ("task", "model"))
        here = [row.method, f"{row.temperature:g}", interval(row.speedup), number(row.tau)] if not lines else [""] * 4
        there = [f"{method} ({paper}, {table})", _few(models, "models"), _few(names, "tasks")]
        ranges = [_range([cell.speedup for cell in shared]), _range([cell.tau for cell in shared])]
        lines.append((paper, [*here, *there, *ranges]))
    return lines


def _few(names: list[str], what: str, many: int = 3) -> str:
    return _list(names) if len(names) < many else f"{len(names)} {what}"


def _range(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return DASH
    low, high = min(known), max(known)
    return f"{low:.2f}" if low == high else f"{low:.2f}–{high:.2f}"


# ---- the rest of the page


def provenance_lines(run: Run, short: bool = False) -> list[tuple[str, str]]:
    """Settings and provenance as (name, text); `short` leaves out methods and command."""
    settings = {name: value for name, value in run.settings.items() if name != "parts"}
    provenance = {name: value for name, value in run.provenance.items() if not (short and name == "command")}
    if short:
        settings.pop("methods", None)
    return [*_flat(settings), *_flat(provenance)]


def commands(run: Run) -> list[str]:
    """The commands that repeat the run."""
    found = run.provenance.get("command") or []
    return [found] if isinstance(found, str) else list(found)


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as (name, text)."""
    lines = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            lines += _flat(value, f"{prefix}{key}.")
        elif value not in (None, "", [], {}):
            lines.append((f"{prefix}{key}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return lines


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else "".join(names)


# ---- files


def write(folder: Path, out: Path | None = None, progress: Progress = lambda share: None) -> list[Path]:
    """Write the page, report.md, report.csv and the figures; returns the first three, the page first."""
    from windfall.render import plots

    out = folder / "report.html" if out is None else out
    report = make(folder)
    plots.check(folder / "figure.svg")
    drawn = parts.draw(report, folder / "figures", progress)
    texts = {
        out: parts.as_html(report, drawn),
        folder / "report.md": parts.as_markdown(report, "figures"),
        folder / "report.csv": results.as_csv([row.as_columns() for row in report.rows]),
    }
    for file, text in texts.items():
        make_folder(file.parent)
        replace_text(file, text)
    return list(texts)


def draw_trees(
    engine: Any,
    drafter: str,
    run: Run,
    folder: Path,
    prompt: Any,
    sampling: dict[str, Any],
    progress: Progress,
) -> list[Path]:
    """Draw an example tree for each method with this drafter: of one text, the cycle that accepted most."""
    from windfall import registry
    from windfall.bench.provenance import model_hash
    from windfall.engine.loading import attach_costs
    from windfall.render import tree_drawing

    known = run.provenance.get("target")
    if isinstance(known, dict) and known.get("weights") != model_hash(engine.target.model):
        raise InputError(
            f"'{folder}' was run with {known.get('name')}, not {engine.target.name}; give that as --target"
        )
    own = [record for record in run.records if record.method != PLAIN and record.drafter == drafter]
    if not own:
        served = sorted({record.drafter for record in run.records if record.method != PLAIN})
        raise InputError(f"no method of '{folder}' drafted with {drafter}; give --drafter, one of {', '.join(served)}")
    firsts = {record.method: record for record in reversed(own)}
    make_folder(folder / "trees")
    files = []
    for method, record in firsts.items():
        engine.policy = registry.policy(record.policy, **record.settings)
        attach_costs(engine, engine.policy)
        steps = engine.generate(prompt, **sampling).steps
        chosen = max(steps, key=lambda step: step.accepted)
        files.append(folder / "trees" / f"{_file_name(method)}.svg")
        replace_text(files[-1], tree_drawing.svg(chosen, engine.target.tokenizer, most=1))
        progress(len(files) / len(firsts))
    return files


def _file_name(method: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-.=" else "_" for letter in method)
