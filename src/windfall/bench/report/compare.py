"""The papers' tables with our rows among theirs, and a sentence on where the order of the methods differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import combinations
from statistics import fmean

from windfall.bench import results
from windfall.bench.papers.tables import (
    ALL,
    MEAN,
    RATE,
    SPEEDUP,
    TAU,
    Cells,
    Figure,
    Line,
    PaperTable,
    Values,
    bare,
    measured_how,
    paper_tables,
    task_name,
)
from windfall.bench.reading import Record, Run
from windfall.bench.report.parts import DASH, Section, Table
from windfall.bench.results import PLAIN
from windfall.core.stats import Estimate

HERE = "here"
SLASH = "\u00a0/\u00a0"  # between the figures of a cell, which stay on one line
MAX_NAMED_PAIRS = 6  # pairs of methods whose order differs


@dataclass(frozen=True)
class Own:
    """The records of our method for one line and task."""

    label: str
    records: list[Record]
    plain: list[Record]


@dataclass(frozen=True)
class Comparison:
    """One temperature of a paper's table: our figures and theirs."""

    table: PaperTable
    temperature: float
    own: Mapping[str, Mapping[str, Own]]  # by line and task

    @property
    def theirs(self) -> Mapping[str, Mapping[str, Cells]]:
        """The published cells by line and model."""
        return self.table.published[self.temperature]

    @property
    def tasks(self) -> list[str]:
        """The tasks of the table that were measured here."""
        return [task for task in self.table.tasks if any(task in own for own in self.own.values())]

    def cells(self, line: str) -> Cells:
        figures = self.table.figures
        return {
            task: tuple(figure.of(own.records, own.plain) for figure in figures)
            for task, own in self.own.get(line, {}).items()
        }


def sections(runs: Sequence[Run], notes: Mapping[str, str] | None = None) -> list[Section]:
    """A section for every table that these runs measured; the first one of a paper says how the paper measured."""
    found, introduced = [], set[str]()
    for table in paper_tables().values():
        measured = [each for temperature in table.temperatures if (each := compare(table, runs, temperature)).own]
        if not measured:
            continue
        how = [] if table.paper in introduced else [f"How the paper measured: {measured_how(table.paper)}"]
        introduced.add(table.paper)
        orders = [order(each, place) for each in measured for place in table.ranked_by]
        text = [*how, *orders, (notes or {}).get(table.key, ""), table.absent, *table.remarks]
        title = f"{table.paper}, {table.table}: {table.title}"
        found.append(Section(title, "\n\n".join(filter(None, text)), [as_table(each) for each in measured]))
    return found


def missing(runs: Sequence[Run]) -> list[str]:
    """The tables that none of these runs measured."""
    return [
        f"{table.paper}, {table.table}"
        for table in paper_tables().values()
        if not any(compare(table, runs, temperature).own for temperature in table.temperatures)
    ]


def read_notes(text: str) -> dict[str, str]:
    """Paragraphs under headings that are keys of tables, such as `## salf-t1`."""
    found: dict[str, str] = {}
    for part in ("\n" + text).split("\n## ")[1:]:
        key, _, words = part.partition("\n")
        found[key.strip()] = words.strip()
    return found


# ---- our records for the lines of a table


def compare(table: PaperTable, runs: Sequence[Run], temperature: float) -> Comparison:
    """Find the records of these runs that belong into a table."""
    own = {}
    chosen = [run for run in runs if table.suite in str(run.settings.get("suite") or "").split(",")]
    for line in table.lines:
        tasks = {task: found for task in table.tasks if (found := _own(table, line, task, chosen, temperature))}
        if tasks:
            own[line.name] = tasks
    if set(own) <= {line.name for line in table.lines if line.ours == PLAIN}:
        own = {}  # plain decoding alone is no table
    return Comparison(table, temperature, own)


def _own(table: PaperTable, line: Line, task: str, runs: Sequence[Run], temperature: float) -> Own | None:
    """The records of the first run that has this method."""
    pattern = line.at.get(task, line.ours)
    names = set(table.pooled) if task == ALL else {task}
    for run in runs:
        for label in (label for label in run.methods if pattern and fnmatchcase(label, pattern)):
            records = _on(run.select(label, temperature=temperature), names)
            if records:
                return Own(label, records, _on(run.select(PLAIN, temperature=temperature), names))
    return None


def _on(records: Iterable[Record], names: set[str]) -> list[Record]:
    return [record for record in records if task_name(record.task) in names]


def mean(cells: Cells, tasks: Sequence[str], figures: int) -> Values:
    """The mean of each figure over these tasks; the paper's own mean if these are all of its tasks."""
    if MEAN in cells and set(tasks) >= set(cells) - {MEAN}:
        return cells[MEAN]
    return tuple(mean_of(cells, tasks, place) for place in range(figures))


def mean_of(cells: Cells, tasks: Sequence[str], place: int) -> float | None:
    """The mean of one figure over the tasks that have it."""
    known = [value for task in tasks if task in cells and (value := cells[task][place]) is not None]
    return fmean(known) if known else None


# ---- as a table


def as_table(comparison: Comparison) -> Table:
    """For each method first the row measured here, then the paper's rows, one for each of its models."""
    table, rows, best = comparison.table, list[list[str]](), set[tuple[int, int]]()
    several, shared = len(table.tasks) > 1, comparison.tasks
    for line in table.lines:
        own = comparison.own.get(line.name, {})
        labels = " · ".join(dict.fromkeys(each.label for each in own.values()))
        mine = [(f"{HERE}: {labels}", comparison.cells(line.name))] if own else []
        for number, (where, cells) in enumerate([*mine, *comparison.theirs.get(line.name, {}).items()]):
            texts = [_cell(cells.get(task), table.figures) for task in table.tasks]
            texts += [_cell(mean(cells, shared, len(table.figures)), table.figures)] if several else []
            best |= {(len(rows), column) for column in range(1, len(texts) + 2)} if where.startswith(HERE) else set()
            rows.append(["" if number else line.name, where, *texts])
    over = "mean" if len(shared) == len(table.tasks) else f"mean of {len(shared)}"
    columns = ("method", "where", *table.tasks, *([over] if several else []))
    sampling = f"temperature {comparison.temperature:g}" if comparison.temperature else "greedy"
    note = f"In a cell: {' / '.join(figure.name for figure in table.figures)}."
    note += _other_task_names(comparison) + _coupling(comparison)
    return Table(f"{table.table}, {sampling}", columns, rows, note, frozenset(best))


def _cell(values: Values | None, figures: Sequence[Figure]) -> str:
    if values is None or all(value is None for value in values):
        return DASH
    return SLASH.join(DASH if v is None else f"{v:.{f.digits}f}" for v, f in zip(values, figures, strict=False))


def _records(comparison: Comparison) -> list[Record]:
    return [record for own in comparison.own.values() for each in own.values() for record in each.records]


def _other_task_names(comparison: Comparison) -> str:
    """Which of our tasks stand for tasks that the paper calls by another name."""
    tasks = {record.task for record in _records(comparison)}
    other = {task: name for task in tasks if (name := task_name(task)) and bare(task) != bare(name)}
    return f" Here {', '.join(f'{task} stands for {name}' for task, name in sorted(other.items()))}." if other else ""


def _coupling(comparison: Comparison) -> str:
    """Whether drafters saw the sampling noise, which they do in no paper."""
    if not comparison.temperature:
        return ""
    coupled = {record.coupled for record in _records(comparison)} == {True}
    return f" The drafter {'sees' if coupled else 'does not see'} the noise of the draws here."


# ---- the order of the methods


def order(comparison: Comparison, place: int) -> str:
    """The methods ranked by a figure, and whether the paper ranks them the same."""
    table, figure = comparison.table, comparison.table.figures[place]
    means = {name: mean_of(comparison.cells(name), comparison.tasks, place) for name in comparison.own}
    ours = {name: value for name, value in means.items() if value is not None}
    ranked = sorted(ours, key=lambda name: -ours[name])
    if not ranked:
        return ""
    at = f"At temperature {comparison.temperature:g}" if len(table.temperatures) > 1 else "Here"
    values = "; ".join(f"{name} {ours[name]:.{figure.digits}f}" for name in ranked)
    text = f"{at}, by {figure.name}{' (mean of the tasks)' if len(comparison.tasks) > 1 else ''}: {values}."
    more = _best_value(comparison, ranked[0], place) if table.sweep else _pairs(comparison, ours, place)
    return f"{text} {more}".strip()


def _best_value(comparison: Comparison, first: str, place: int) -> str:
    """In a sweep: which value of the option is the paper's best."""
    theirs = {
        name: value
        for name, models in comparison.theirs.items()
        for cells in models.values()
        if (value := mean_of(cells, comparison.tasks, place)) is not None
    }
    if not theirs:
        return ""
    best = max(theirs, key=lambda name: theirs[name])
    if best == first:
        return f"The paper's best is the same, {best}."
    return f"The paper's best is {best}, here {first}{_certainty(comparison, first, best, place)}."


def _pairs(comparison: Comparison, ours: Mapping[str, float], place: int) -> str:
    """How many pairs of methods the paper has in the same order, and which ones it has not."""
    compared, reversed_pairs, unsure = 0, list[tuple[bool, str]](), ""
    for a, b in combinations(sorted(ours, key=lambda name: -ours[name]), 2):
        gap = _published_gap(comparison, a, b, place)
        if not gap or ours[a] == ours[b]:
            continue
        compared += 1
        if gap < 0:
            unsure = _certainty(comparison, a, b, place)
            reversed_pairs.append((bool(unsure), f"{a} before {b}{unsure}"))
    if not compared:
        return ""
    if not reversed_pairs:
        return "The paper's order is the same." if compared > 1 else "So it is in the paper."
    if compared == 1:
        return f"The paper has them the other way round{unsure}."
    reversed_pairs.sort(key=lambda pair: pair[0])
    named = "; ".join(text for _, text in reversed_pairs[:MAX_NAMED_PAIRS])
    if len(reversed_pairs) > MAX_NAMED_PAIRS:
        named += f"; {len(reversed_pairs) - MAX_NAMED_PAIRS} more"
    same = compared - len(reversed_pairs)
    return f"In the paper's order: {same} of {compared} pairs. The other way round here: {named}."


def _published_gap(comparison: Comparison, a: str, b: str, place: int) -> float | None:
    """By how much the paper has `a` before `b`, over the models that have both and the tasks measured here."""
    one, two = comparison.theirs.get(a, {}), comparison.theirs.get(b, {})
    gaps = []
    for model in one.keys() & two.keys():
        left, right = (mean_of(cells[model], comparison.tasks, place) for cells in (one, two))
        gaps += [left - right] if left is not None and right is not None else []
    return fmean(gaps) if gaps else None


def _certainty(comparison: Comparison, a: str, b: str, place: int) -> str:
    """A remark if the prompts are too few to tell which of two methods is better here."""
    found = ratio(comparison, a, b, place)
    return "" if found is None or found.low > 1 or found.high < 1 else " (within the error)"


def ratio(comparison: Comparison, a: str, b: str, place: int) -> Estimate | None:
    """The ratio of a figure of two methods, on the same prompts."""
    figure = comparison.table.figures[place]
    one, two = ([r for own in comparison.own.get(name, {}).values() for r in own.records] for name in (a, b))
    if figure == TAU:
        return results.tau_ratio(one, two)
    return results.speedup(one, two) if figure in (SPEEDUP, RATE) else None
