"""The papers' tables as data: what was published, and which of our methods stands for which of theirs.

The data is in `tables.toml`. Here are its types, and the functions that compute the same figures from our records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

from windfall.bench import results
from windfall.bench.package_data import read_toml
from windfall.bench.reading import Record

FILE = "papers/tables.toml"
ALL = "all tasks"  # the column of a table that has no tasks
MEAN = "mean"  # the paper's own mean over its tasks
BYTES_PER_MB = 2.0**20

Records = Sequence[Record]
Values = tuple[float | None, ...]  # the figures of one cell
Cells = dict[str, Values]  # by task


class Figure(NamedTuple):
    """One number of a cell, computed from the records of a method and those of plain decoding on the same prompts."""

    name: str
    of: Callable[[Records, Records], float | None]
    digits: int = 2


class Line(NamedTuple):
    """A method of a table, and the pattern of our labels that stand for it; `at` has the patterns of single tasks."""

    name: str
    ours: str = ""
    at: Mapping[str, str] = {}


@dataclass(frozen=True)
class PaperTable:
    """A table: methods down, tasks across, one or more figures in each cell."""

    key: str
    suite: str  # the suite that measures it
    paper: str
    table: str
    title: str
    tasks: tuple[str, ...]
    lines: tuple[Line, ...]
    figures: tuple[Figure, ...]
    published: Mapping[float, Mapping[str, Mapping[str, Cells]]]  # by temperature, method and model
    ranked_by: tuple[int, ...] = (0,)  # the places of the figures that rank the methods
    sweep: bool = False  # whether the methods are values of one option
    pooled: tuple[str, ...] = ()  # the tasks that `ALL` stands for
    absent: str = ""  # what the paper has and we do not
    remarks: tuple[str, ...] = field(default=())  # on how figures are meant here
    reference: bool = False  # whether it is shown next to any run of the same policies
    taus: str = ""  # the key of the table with the tokens per pass, where this one has none

    @property
    def temperatures(self) -> tuple[float, ...]:
        return tuple(self.published)

    def place(self, figure: str) -> int | None:
        """Where a figure is in the cells of this table."""
        names = [each.name for each in self.figures]
        return names.index(figure) if figure in names else None


# ---- figures of our records


def _speedup(own: Records, plain: Records) -> float | None:
    found = results.speedup(own, plain)
    return None if found is None else found.value


def _milliseconds(value: float | None) -> float | None:
    return None if value is None else 1000 * value


def _memory_change(own: Records, plain: Records) -> float | None:
    peak, other = results.peak_memory(own), results.peak_memory(plain)
    return 100 * (peak / other - 1) if peak and other else None


def _peak(unit: float) -> Callable[[Records, Records], float | None]:
    def of(own: Records, plain: Records) -> float | None:
        peak = results.peak_memory(own)
        return None if peak is None else peak / unit

    return of


def _accepted(own: Records, plain: Records) -> float | None:
    share = results.dynatree_accept(own)
    return None if share is None else 100 * share


def _policy_time(own: Records, plain: Records) -> float | None:
    taken = [turn.split["policy"] for record in own for turn in record.turns if turn.split]
    return 1000 * sum(taken) / len(own) if taken else None


def _latency(own: Records, plain: Records) -> float | None:
    times = [record.seconds for record in own if record.seconds is not None]
    return fmean(times) if times else None


def _policy_share(own: Records, plain: Records) -> float | None:
    shares = results.time_split(own)
    return None if shares is None else 100 * shares["policy"]


SPEEDUP = Figure("speed-up", _speedup)
TAU = Figure("tau", lambda own, plain: results.tau(own))
RATE = Figure("tokens/s", lambda own, plain: results.tokens_per_second(own), 1)
FIGURES = {
    figure.name: figure
    for figure in (
        SPEEDUP,
        TAU,
        RATE,
        Figure("ms to the first token", lambda own, plain: _milliseconds(results.ttft(own))),
        Figure("ms for each further one", lambda own, plain: _milliseconds(results.tpot(own))),
        Figure("accepted %", _accepted, 1),
        Figure("mean of each text's tau", lambda own, plain: results.tau(own, "samples")),
        Figure("target passes of a text", lambda own, plain: fmean(record.cycles for record in own), 0),
        Figure("peak MB", _peak(BYTES_PER_MB), 1),
        Figure("change %", _memory_change),
        Figure("peak GB", _peak(results.BYTES_PER_GB), 3),
        Figure("R: speed-up for a GB", results.memory_to_speed, 3),
        Figure("policy, ms of a conversation", _policy_time, 1),
        Figure("seconds of it", _latency),
        Figure("policy %", _policy_share),
    )
}


# ---- reading the file


@cache
def paper_tables() -> dict[str, PaperTable]:
    """Every table of the file, by key."""
    return {given["key"]: _table(given) for given in read_toml(FILE)["tables"]}


def _table(given: Mapping[str, Any]) -> PaperTable:
    names, lists = list(given["figures"]), ("tasks", "pooled", "remarks")
    ranked = given.get("ranked_by", names[:1])
    known: dict[str, Any] = {name: tuple(value) if name in lists else value for name, value in given.items()}
    known |= {
        "suite": given.get("suite", given["key"]),
        "lines": tuple(_line(name, ours) for name, ours in known.pop("methods").items()),
        "figures": tuple(FIGURES[name] for name in names),
        "ranked_by": tuple(names.index(name) for name in ranked),
        "published": {
            block.get("temperature", 0.0): _published(block["rows"], given["tasks"], len(names))
            for block in given["published"]
        },
    }
    return PaperTable(**known)


def _line(name: str, ours: str | dict[str, str]) -> Line:
    if isinstance(ours, str):
        return Line(name, ours)
    return Line(name, ours["default"], {task: pattern for task, pattern in ours.items() if task != "default"})


def _published(rows: str, tasks: Sequence[str], figures: int) -> dict[str, dict[str, Cells]]:
    """Rows of the form `model | method | cells` as cells by method and model; missing figures are None."""
    found: dict[str, dict[str, Cells]] = {}
    for row in rows.strip().splitlines():
        model, method, numbers = (part.strip() for part in row.split("|"))
        cells = [tuple(float(number) for number in cell.split("/")) for cell in numbers.split()]
        whole = [(*cell, *[None] * (figures - len(cell))) for cell in cells]
        found.setdefault(method, {})[model] = dict(zip((*tasks, MEAN), whole, strict=False))
    return found


# ---- what was published for a policy


class Published(NamedTuple):
    """One cell of a paper's table."""

    paper: str
    table: str
    model: str
    method: str
    task: str
    temperature: float
    tau: float | None  # tokens per target pass, including the target's own token
    speedup: float | None  # over plain decoding


def published_for(policy: str, wanted: float | None = None) -> list[Published]:
    """The cells published for the method that a policy implements, at a wanted temperature or (None) at all."""
    policies, found = read_toml(FILE)["policies"], []
    for table in (table for table in paper_tables().values() if table.reference):
        other = paper_tables()[table.taus] if table.taus else table
        name = f"{table.table} and {other.table}" if table.taus else table.table
        for temperature, methods in table.published.items():
            for method in (method for method in methods if policies.get(method) == policy):
                for model, cells in methods[method].items() if wanted in (None, temperature) else ():
                    taus = other.published[temperature][method][model]
                    found += [
                        Published(
                            table.paper, name, model, method, task, temperature, _value(other, taus[task], TAU), speedup
                        )
                        for task, values in cells.items()
                        if task != MEAN and (speedup := _value(table, values, SPEEDUP)) is not None
                    ]
    return found


def _value(table: PaperTable, values: Values, figure: Figure) -> float | None:
    place = table.place(figure.name)
    return None if place is None else values[place]


def task_name(task: str) -> str | None:
    """The papers' name for a task, for example "GSM8K" for "gsm8k"; None if they have no such task."""
    found: str | None = read_toml(FILE)["tasks"].get(bare(task))
    return found


def bare(name: str) -> str:
    """A name without case and punctuation."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def measured_how(paper: str) -> str:
    """How a paper measured, in a sentence."""
    how = read_toml(FILE)["papers"][paper]
    text = f"{how['hardware']}, drafted by {how['drafter']}; the baseline is {how['baseline']}. {how.get('note', '')}"
    return text.strip()
