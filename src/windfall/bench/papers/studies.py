"""The papers' sweeps: each runs methods that differ in an option or a setting, and draws one figure.

The sweeps are data in `studies.toml`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windfall.bench import reading, results
from windfall.bench.methods import Method, parse_method
from windfall.bench.package_data import read_toml
from windfall.bench.papers.tables import MEAN, paper_tables, task_name
from windfall.bench.reading import ALL, Run
from windfall.bench.results import PLAIN, Row
from windfall.core.files import replace_text
from windfall.core.stats import Estimate
from windfall.core.types import InputError
from windfall.render import figures, plots
from windfall.render.figures import Panel, Series

if TYPE_CHECKING:
    from windfall.bench.runner import Settings
    from windfall.bench.tasks import Prompt

SPEED, TAU = "speed-up over plain decoding (×)", "tau: tokens per target pass"


@dataclass(frozen=True)
class Leg:
    """One run of a study: its own settings, and its place on the x axis."""

    name: str = ""  # also the name of its folder
    settings: Mapping[str, Any] = field(default_factory=dict)
    x: float | None = None
    methods: tuple[str, ...] = ()  # if empty, those of the study


@dataclass(frozen=True)
class Point:
    """One method in one run of a study."""

    series: str
    x: float | None
    leg: Leg
    method: Method
    row: Row
    records: Sequence[reading.Record]


@dataclass(frozen=True)
class Study:
    """A sweep. `option` is the policy's option on the x axis; without it, x is that of the leg or the temperature."""

    name: str
    title: str
    source: str
    methods: tuple[str, ...]
    figure: Callable[[Study, list[Point]], Any]
    across: str = ""
    option: str = ""
    temperatures: tuple[float, ...] = (0.0,)
    legs: tuple[Leg, ...] = (Leg(),)
    drafters: bool = False  # whether it compares several drafters
    texts: bool = False  # whether it needs long texts to be continued
    timed: bool = False  # whether it needs times
    published: Mapping[str, tuple[Series, Series]] = field(default_factory=dict)  # speed-up and tau by series
    log: bool = False

    def contenders(self, leg: Leg, drafters: Sequence[str] = ()) -> list[str]:
        """The methods of a leg; if drafters are compared, each method with each of them."""
        methods = list(leg.methods or self.methods)
        if not self.drafters:
            if len(drafters) > 1:
                raise InputError(f"study {self.name} takes one --drafter, not {len(drafters)}")
            return methods
        if len(drafters) < 2:
            raise InputError(f"study {self.name} compares drafters; give at least two, each with --drafter")
        return [f"{drafter}/{method}" for drafter in drafters for method in methods]


# ---- running


def run(
    study: Study,
    out: Path,
    common: Mapping[str, Any],
    prompts: Sequence[Prompt],
    target: Any,
    drafters: Sequence[str] = (),
    progress: Callable[[float], None] = lambda share: None,
    **more: Any,
) -> list[Path]:
    """Run what is not in the folder yet, then draw; `common` are the runner's settings, `more` its other arguments."""
    from windfall.bench import runner
    from windfall.bench.methods import DrafterSpec, parse_methods
    from windfall.bench.store import Store

    if study.timed and not common.get("timing", True):
        raise InputError(f"study {study.name} is about times; leave out --no-timing")
    drafter = DrafterSpec.parse(drafters[0]) if len(drafters) == 1 else None
    legs = []
    for leg in study.legs:
        methods = parse_methods(study.contenders(leg, drafters))
        own = {**common, "temperatures": study.temperatures, **leg.settings, "suite": study.name}
        labels = tuple(method.label for method in methods)
        legs.append((leg, methods, runner.Settings(labels, drafter=drafter.label if drafter else "", **own)))
    chosen = shared_prompts(study, prompts, target, [settings for _, _, settings in legs])
    for place, (leg, methods, settings) in enumerate(legs):
        folder = out / leg.name
        store = Store(folder, resume=(folder / reading.RUN_FILE).exists())
        runner.run(settings, methods, chosen, target, store, drafter, progress=_part(progress, place, study), **more)
    return draw(study, out)


def shared_prompts(study: Study, prompts: Sequence[Prompt], target: Any, legs: Sequence[Settings]) -> list[Prompt]:
    """The prompts that every leg can use, so that its points can be compared."""
    from windfall.bench import runner

    chosen = long_texts(prompts) if study.texts else list(prompts)
    for settings in legs:
        chosen = runner.fitting(chosen, target, settings)
    if study.texts:
        longest = max(settings.prompt_tokens for settings in legs)
        chosen = [prompt for prompt in chosen if runner.prompt_length(prompt, target, longest) == longest]
    if not chosen:
        more = f", or none is {longest} tokens long: give longer --tasks or a higher --limit" if study.texts else ""
        raise InputError(f"{study.name}: no prompt leaves room for the longest answer in the target's context{more}")
    return chosen


def _part(progress: Callable[[float], None], place: int, study: Study) -> Callable[[int, int], None]:
    return lambda done, total: progress((place + done / max(total, 1)) / len(study.legs))


def long_texts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Texts to be continued; other prompts become long texts, each followed by all the others."""
    every = [" ".join(prompt.turns) for prompt in prompts]
    return [
        prompt if prompt.raw else replace(prompt, turns=("\n\n".join(every[place:] + every[:place]),), raw=True)
        for place, prompt in enumerate(prompts)
    ]


# ---- reading and drawing


def points(study: Study, out: Path) -> list[Point]:
    """Every method of every leg that has been run."""
    found = []
    begun = [leg for leg in study.legs if (out / leg.name / reading.RUN_FILE).exists()]
    for leg in begun or study.legs[:1]:
        run = reading.load(out / leg.name)
        if run.settings.get("suite", study.name) != study.name:
            raise InputError(f"'{out / leg.name}' holds another run, not one of study {study.name}")
        rows = results.summary(run)
        whole = ALL if any(row.task == ALL for row in rows) else None
        found += [_point(study, leg, run, row) for row in rows if whole in (None, row.task)]
    if not any(point.row.method != PLAIN for point in found):
        raise InputError(f"'{out}' holds no finished conversation of study {study.name} yet; run it first")
    return found


def _point(study: Study, leg: Leg, run: Run, row: Row) -> Point:
    method, x, series = parse_method(row.method), leg.x, row.method
    if study.option and study.option in method.settings:
        x = float(method.settings[study.option])
        rest = [f"{name}={value}" for name, value in method.settings.items() if name != study.option]
        series = ":".join([method.policy, *rest])
    elif x is None and len(study.temperatures) > 1:
        x = row.temperature
    series = f"{series}, {leg.name}" if leg.name and leg.x is None else series
    return Point(series, x, leg, method, row, run.select(row.method, temperature=row.temperature))


def draw(study: Study, out: Path) -> list[Path]:
    """Draw the figure as SVG and PNG, and write its data as CSV."""
    found = points(study, out)
    plots.check(out / f"{study.name}.svg")
    files = figures.save(study.figure(study, found), out, study.name)
    table = out / f"{study.name}.csv"
    replace_text(table, results.as_csv([{"series": p.series, "x": p.x, **p.row.as_columns()} for p in found]))
    return [*files, table]


# ---- figures


def _lines(study: Study, found: list[Point]) -> Any:
    """Speed-up above, tau below; published lines are dashed."""
    own = _series(found)
    speeds = {name: _estimates(line) for name, line in own.items() if all(point.row.speedup for point in line)}
    taus = {name: Series([_x(p) for p in line], [p.row.tau for p in line]) for name, line in own.items()}
    for name, (speed, tau) in study.published.items():
        if speed.x:
            speeds[name] = speed
        taus[name] = tau
    panels = [Panel(speeds, study.across, SPEED, base=1.0, log=study.log)] if speeds else []
    return figures.panels([*panels, Panel(taus, study.across, TAU, log=study.log)], study.title)


def _series(found: list[Point]) -> dict[str, list[Point]]:
    """The points of each line from left to right, without plain decoding."""
    lines: dict[str, list[Point]] = {}
    for point in sorted((p for p in found if p.x is not None and p.row.method != PLAIN), key=_x):
        lines.setdefault(point.series, []).append(point)
    return lines


def _x(point: Point) -> float:
    assert point.x is not None
    return point.x


def _estimates(line: list[Point]) -> Series:
    gains = [point.row.speedup for point in line if point.row.speedup]
    return Series([_x(p) for p in line], [g.value for g in gains], [g.low for g in gains], [g.high for g in gains])


def _ablation(study: Study, found: list[Point]) -> Any:
    """Speed-up of each variant, with the published ones."""
    timed = all(point.row.speedup for point in found)
    values = {p.row.method: p.row.speedup or Estimate(p.row.tau, p.row.tau, p.row.tau) for p in found}
    if timed:
        (published,) = paper_tables()["dynatree-t4"].published.values()
        for name, models in published.items():
            gain = models["Pythia 2.8B"]["WikiText-2"][1] or 0.0
            values[f"the paper: {name}"] = Estimate(gain, gain, gain)
    return figures.bars(values, SPEED if timed else TAU, base=1.0)


def _grid(study: Study, found: list[Point]) -> Any:
    """Speed-up by two options; without times, tau."""
    down, across = ("depth", "nodes")
    swept = [point for point in found if {down, across} <= set(point.method.settings)]
    cells = {
        (int(p.method.settings[down]), int(p.method.settings[across])): p.row.speedup.value
        if p.row.speedup
        else p.row.tau
        for p in swept
    }
    rows, columns = (sorted({key[place] for key in cells}) for place in (0, 1))
    unit = SPEED if all(point.row.speedup for point in found) else TAU
    values = [[cells.get((row, column)) for column in columns] for row in rows]
    return figures.table([f"depth {row}" for row in rows], [str(c) for c in columns], values, f"rows verified; {unit}")


def _times(study: Study, found: list[Point]) -> Any:
    """Milliseconds of drafting and verifying in a cycle, by depth and by rows."""
    panels = []
    for option, label in (("depth", "depth: draft passes of a cycle"), ("nodes", "rows of the target pass")):
        own = [p for p in found if p.leg.name == option and p.row.method != PLAIN and p.row.split]
        own.sort(key=lambda point: int(point.method.settings[option]))
        xs = [int(point.method.settings[option]) for point in own]
        lines = {part: Series(xs, [_milliseconds(point, part) for point in own]) for part in ("draft", "verify")}
        panels.append(Panel(lines, label, "milliseconds per cycle"))
    return figures.panels(panels, study.title)


def _milliseconds(point: Point, part: str) -> float:
    row = point.row
    assert row.split is not None and row.tokens_per_second
    return 1000 * row.split[part] * row.tokens / row.tokens_per_second / row.cycles


def _efficiency(study: Study, found: list[Point]) -> Any:
    return figures.efficiency({p.row.method: results.tau_and_delta(p.records) for p in found if p.row.delta > 0})


def _drafters(study: Study, found: list[Point]) -> Any:
    """tau of each drafter by task, with the published ones."""
    taus: dict[str, dict[str, float | None]] = {}
    for point in (p for p in found if p.row.method != PLAIN):
        for task in dict.fromkeys(record.task for record in point.records):
            own = [record for record in point.records if record.task == task]
            taus.setdefault(point.row.method, {})[task_name(task) or task] = results.tau(own)
    for name, models in paper_tables()["salf-t3"].published[0.0].items():
        for cells in models.values():
            taus[f"the paper: {name}"] = {task: values[0] for task, values in cells.items()}
    tasks = list(dict.fromkeys(task for own in taus.values() for task in own))
    return figures.table(list(taus), tasks, [[own.get(task) for task in tasks] for own in taus.values()], TAU)


# ---- the studies

FIGURES = {
    "lines": _lines,
    "ablation": _ablation,
    "grid": _grid,
    "times": _times,
    "efficiency": _efficiency,
    "drafters": _drafters,
}


def expand(method: str) -> list[str]:
    """`beam:depth=4|5:nodes=40|60` as the methods with each combination of the values."""
    parts = []
    for part in method.split(":"):
        name, equals, values = part.partition("=")
        parts.append([f"{name}{equals}{value}" for value in values.split("|")])
    return [":".join(choice) for choice in itertools.product(*parts)]


def _expanded(methods: Sequence[str]) -> tuple[str, ...]:
    return tuple(each for method in methods for each in expand(method))


def _published(name: str, table: str) -> dict[str, tuple[Series, Series]]:
    """The published speed-ups and taus of a table whose methods are values of one option, as lines to compare with."""
    found = paper_tables()[table]
    (methods,) = found.published.values()
    cells = {float(method.partition("=")[2]): next(iter(models.values())) for method, models in methods.items()}
    means = {x: own.get(MEAN) or next(iter(own.values())) for x, own in cells.items()}

    def line(figure: str) -> Series:
        place = found.place(figure)
        values = {} if place is None else {x: mean[place] or 0.0 for x, mean in means.items()}
        return Series(list(values), list(values.values()), faded=True)

    return {name: (line("speed-up"), line("tau"))}


def _study(name: str, given: Mapping[str, Any]) -> Study:
    legs = [Leg(**{**leg, "methods": _expanded(leg.get("methods", ()))}) for leg in given.get("legs", [{}])]
    known = {
        "methods": _expanded(given.get("methods", ())),
        "figure": FIGURES[given["figure"]],
        "temperatures": tuple(given.get("temperatures", (0.0,))),
        "legs": tuple(legs),
        "published": _published(**given["published"]) if "published" in given else {},
    }
    return Study(name, **{**given, **known})


STUDIES = {name: _study(name, given) for name, given in read_toml("papers/studies.toml").items()}


def find(name: str) -> Study:
    """A study by name."""
    if name not in STUDIES:
        raise InputError(f"there is no study '{name}'; choose from {', '.join(STUDIES)}")
    return STUDIES[name]
