"""The papers' tables with our rows among theirs, and where the order of the methods is another one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import combinations
from statistics import fmean

from windfall.bench import results
from windfall.bench.papers import published as papers
from windfall.bench.papers.tables import ALL, EXHIBITS, RATE, SPEEDUP, TAU, Exhibit, Figure, Line
from windfall.bench.reading import Record, Run
from windfall.bench.report.parts import DASH, Section, Table
from windfall.bench.results import PLAIN, Estimate

HERE = "here"
SLASH = "\u00a0/\u00a0"  # between a cell's figures, which stay on one line
TOLD = 6  # pairs of methods that are named
Values = tuple[float | None, ...]  # of a cell, one for each figure
Cells = dict[str, Values]  # by task


@dataclass(frozen=True)
class Own:
    """What a method did on one task here."""

    label: str
    records: list[Record]
    plain: list[Record]


@dataclass(frozen=True)
class Held:
    """One temperature of an exhibit: ours and theirs."""

    exhibit: Exhibit
    temperature: float
    own: Mapping[str, Mapping[str, Own]]  # by line and task
    theirs: Mapping[str, Mapping[str, Cells]]  # by line and model

    @property
    def tasks(self) -> list[str]:
        """Those that were measured here."""
        return [task for task in self.exhibit.tasks if any(task in own for own in self.own.values())]

    def cells(self, line: str) -> Cells:
        figures = self.exhibit.figures
        return {
            task: tuple(figure.of(own.records, own.plain) for figure in figures)
            for task, own in self.own.get(line, {}).items()
        }


def sections(runs: Sequence[Run], notes: Mapping[str, str] | None = None) -> list[Section]:
    """A section for every table that these runs have something of; each paper's first one says how it measured."""
    found, told = [], set[str]()
    for exhibit in EXHIBITS:
        held = [each for heat in exhibit.temperatures if (each := hold(exhibit, runs, heat)).own]
        if not held:
            continue
        how = [] if exhibit.paper in told else [f"How the paper measured: {papers.difference(exhibit.paper)}"]
        told.add(exhibit.paper)
        orders = [order(each, place) for each in held for place in exhibit.by]
        text = [*how, *orders, (notes or {}).get(exhibit.key, ""), exhibit.absent]
        title = f"{exhibit.paper}, {exhibit.table}: {exhibit.title}"
        words = "\n\n".join(part for part in [*text, *exhibit.remarks] if part)
        found.append(Section(title, words, [table(each) for each in held]))
    return found


def missing(runs: Sequence[Run]) -> list[str]:
    """The tables that none of these runs has anything of."""
    return [
        f"{exhibit.paper}, {exhibit.table}"
        for exhibit in EXHIBITS
        if not any(hold(exhibit, runs, heat).own for heat in exhibit.temperatures)
    ]


def read_notes(text: str) -> dict[str, str]:
    """Paragraphs under headings that are keys of exhibits: `## salf-t1`."""
    found: dict[str, str] = {}
    for part in ("\n" + text).split("\n## ")[1:]:
        key, _, words = part.partition("\n")
        found[key.strip()] = words.strip()
    return found


# ---- ours and theirs


def hold(exhibit: Exhibit, runs: Sequence[Run], temperature: float) -> Held:
    own = {}
    chosen = [run for run in runs if exhibit.suite in str(run.settings.get("suite") or "").split(",")]
    for line in exhibit.lines:
        tasks = {task: found for task in exhibit.tasks if (found := _own(exhibit, line, task, chosen, temperature))}
        if tasks:
            own[line.name] = tasks
    if set(own) <= {line.name for line in exhibit.lines if line.ours == PLAIN}:
        own = {}  # plain decoding alone is no table
    return Held(exhibit, temperature, own, published(exhibit, temperature))


def _own(exhibit: Exhibit, line: Line, task: str, runs: Sequence[Run], temperature: float) -> Own | None:
    """From the first run that has this method."""
    pattern = line.at.get(task, line.ours)
    names = set(exhibit.pooled) if task == ALL else {task}
    for run in runs:
        for label in (label for label in run.methods if pattern and fnmatchcase(label, pattern)):
            records = _on(run.select(label, temperature=temperature), names)
            if records:
                return Own(label, records, _on(run.select(PLAIN, temperature=temperature), names))
    return None


def _on(records: Iterable[Record], names: set[str]) -> list[Record]:
    return [record for record in records if papers.task_name(record.task) in names]


def published(exhibit: Exhibit, temperature: float) -> dict[str, dict[str, Cells]]:
    """By line and model; the paper's own means are under `mean`."""
    found: dict[str, dict[str, Cells]] = {}
    if exhibit.rows:
        for row in exhibit.rows.strip().splitlines() if temperature == exhibit.temperatures[0] else ():
            model, method, numbers = (part.strip() for part in row.split("|"))
            cells = [tuple(float(n) if n else None for n in cell.split("/")) for cell in numbers.split()]
            found.setdefault(method, {})[model] = dict(zip((*exhibit.tasks, papers.MEAN), cells, strict=False))
        return found
    for cell in papers.published():
        if (cell.paper, cell.table, cell.temperature) == (exhibit.paper, exhibit.table, temperature):
            found.setdefault(cell.method, {}).setdefault(cell.model, {})[cell.task] = (cell.speedup, cell.tau)
    return found


def mean(cells: Cells, tasks: Sequence[str], figures: int) -> Values:
    """Of each figure over these tasks; the paper's own where it has one for them all."""
    if papers.MEAN in cells and set(tasks) >= set(cells) - {papers.MEAN}:
        return cells[papers.MEAN]
    columns = [[cells[task][place] for task in tasks if task in cells] for place in range(figures)]
    known = [[value for value in column if value is not None] for column in columns]
    return tuple(fmean(values) if values else None for values in known)


# ---- as a table


def table(held: Held) -> Table:
    """Under each method the row that was measured here, then the paper's, a row for each of its models."""
    exhibit, rows, best = held.exhibit, list[list[str]](), set[tuple[int, int]]()
    several = len(exhibit.tasks) > 1
    shared = held.tasks
    every = len(shared) == len(exhibit.tasks)
    for line in exhibit.lines:
        own = held.own.get(line.name, {})
        labels = " · ".join(dict.fromkeys(each.label for each in own.values()))
        mine = [(f"{HERE}: {labels}", held.cells(line.name))] if own else []
        for number, (whose, cells) in enumerate([*mine, *held.theirs.get(line.name, {}).items()]):
            told = [_cell(cells.get(task), exhibit.figures) for task in exhibit.tasks]
            told += [_cell(mean(cells, shared, len(exhibit.figures)), exhibit.figures)] if several else []
            best |= {(len(rows), column) for column in range(1, len(told) + 2)} if whose.startswith(HERE) else set()
            rows.append(["" if number else line.name, whose, *told])
    heads = [*exhibit.tasks, *(["mean" if every else f"mean of {len(shared)}"] if several else [])]
    heat = f"temperature {held.temperature:g}" if held.temperature else "greedy"
    note = f"In a cell: {' / '.join(figure.name for figure in exhibit.figures)}."
    return Table(
        f"{exhibit.table}, {heat}",
        ("method", "where", *heads),
        rows,
        note + _stand_ins(held) + _dice(held),
        frozenset(best),
    )


def _cell(values: Values | None, figures: Sequence[Figure]) -> str:
    if values is None or all(value is None for value in values):
        return DASH
    shown = [DASH if v is None else f"{v:.{f.digits}f}" for v, f in zip(values, figures, strict=False)]
    return SLASH.join(shown)


def _stand_ins(held: Held) -> str:
    """Which of our tasks stands for one that the paper calls otherwise."""
    ours = {record.task for own in held.own.values() for each in own.values() for record in each.records}
    other = {task: name for task in ours if (name := papers.task_name(task)) and papers.bare(task) != papers.bare(name)}
    if not other:
        return ""
    return f" Here {', '.join(f'{task} stands for {name}' for task, name in sorted(other.items()))}."


def _dice(held: Held) -> str:
    """Whether drafters saw the noise of the draws, which no paper's do."""
    if not held.temperature:
        return ""
    coupled = {record.coupled for own in held.own.values() for each in own.values() for record in each.records}
    return f" The drafter {'sees' if coupled == {True} else 'does not see'} the noise of the draws here."


# ---- the order of the methods


def order(held: Held, place: int) -> str:
    """The methods by a figure here and, pair by pair, whether the paper has them in the same order."""
    exhibit, figure = held.exhibit, held.exhibit.figures[place]
    ours = {name: value for name in held.own if (value := _mean_of(held.cells(name), held.tasks, place)) is not None}
    ranked = sorted(ours, key=lambda name: -ours[name])
    if not ranked:
        return ""
    at = f"At temperature {held.temperature:g}" if len(exhibit.temperatures) > 1 else "Here"
    shown = "; ".join(f"{name} {ours[name]:.{figure.digits}f}" for name in ranked)
    told = f"{at}, by {figure.name}{' (mean of the tasks)' if len(held.tasks) > 1 else ''}: {shown}."
    return f"{told} {_best(held, ranked[0], place) if exhibit.sweep else _pairs(held, ours, place)}".strip()


def _mean_of(cells: Cells, tasks: Sequence[str], place: int) -> float | None:
    known = [value for task in tasks if task in cells and (value := cells[task][place]) is not None]
    return fmean(known) if known else None


def _best(held: Held, first: str, place: int) -> str:
    theirs = {
        name: value
        for name, models in held.theirs.items()
        for cells in models.values()
        if (value := _mean_of(cells, held.tasks, place)) is not None
    }
    if not theirs:
        return ""
    best = max(theirs, key=lambda name: theirs[name])
    if best == first:
        return f"The paper's best is the same, {best}."
    return f"The paper's best is {best}, here {first}{_certainty(held, first, best, place)}."


def _pairs(held: Held, ours: Mapping[str, float], place: int) -> str:
    """How many pairs the paper has in the same order, and which not."""
    compared, other, unsure = 0, list[tuple[bool, str]](), ""
    for a, b in combinations(sorted(ours, key=lambda name: -ours[name]), 2):
        gap = _gap(held, a, b, place)
        if not gap or ours[a] == ours[b]:
            continue
        compared += 1
        if gap < 0:
            unsure = _certainty(held, a, b, place)
            other.append((bool(unsure), f"{a} before {b}{unsure}"))
    if not compared:
        return ""
    if not other:
        return "The paper's order is the same." if compared > 1 else "So it is in the paper."
    if compared == 1:
        return f"The paper has them the other way round{unsure}."
    other.sort(key=lambda pair: pair[0])
    named = "; ".join(told for _, told in other[:TOLD]) + (f"; {len(other) - TOLD} more" if len(other) > TOLD else "")
    return f"In the paper's order: {compared - len(other)} of {compared} pairs. The other way round here: {named}."


def _gap(held: Held, a: str, b: str, place: int) -> float | None:
    """By how much the first is ahead in the paper, over the models that have both and the tasks that are here, too."""
    one, two = held.theirs.get(a, {}), held.theirs.get(b, {})
    gaps = []
    for model in one.keys() & two.keys():
        left, right = (_mean_of(cells[model], held.tasks, place) for cells in (one, two))
        gaps += [left - right] if left is not None and right is not None else []
    return fmean(gaps) if gaps else None


def _certainty(held: Held, a: str, b: str, place: int) -> str:
    """Whether the prompts leave it open which of two methods is ahead here."""
    ratio = ahead(held, a, b, place)
    return "" if ratio is None or ratio.low > 1 or ratio.high < 1 else " (within the error)"


def ahead(held: Held, a: str, b: str, place: int) -> Estimate | None:
    """How many times another method's figure one has, on the same prompts."""
    figure = held.exhibit.figures[place]
    one, two = ([r for own in held.own.get(name, {}).values() for r in own.records] for name in (a, b))
    if figure == TAU:
        return results.tau_ratio(one, two)
    return results.speedup(one, two) if figure in (SPEEDUP, RATE) else None
