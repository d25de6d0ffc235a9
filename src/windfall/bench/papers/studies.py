"""The papers' sweeps as data: what each one varies, what its x axis is, and which figure it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windfall.bench import reading, results
from windfall.bench.methods import Method, parse_method
from windfall.bench.papers import published as papers
from windfall.bench.reading import ALL, Run
from windfall.bench.report import figures
from windfall.bench.report.figures import Panel, Series
from windfall.bench.results import PLAIN, Estimate, Row
from windfall.core.files import replace_text
from windfall.core.types import InputError

if TYPE_CHECKING:
    from windfall.bench.runner import Settings
    from windfall.bench.tasks import Prompt

SPEED, TAU = "speed-up over plain decoding (×)", "tau: tokens per target pass"
HEATS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Leg:
    """One run of a study: its settings besides those that all share, and where it stands on the x axis."""

    name: str = ""  # also the name of its folder
    settings: Mapping[str, Any] = field(default_factory=dict)
    x: float | None = None
    methods: tuple[str, ...] = ()  # none: the study's


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
    """A sweep. `option` is the option of the policy on the x axis; without it the x is the leg's or the temperature."""

    name: str
    title: str
    source: str
    methods: tuple[str, ...]
    across: str
    draw: Callable[[Study, list[Point]], Any]
    option: str = ""
    temperatures: tuple[float, ...] = (0.0,)
    legs: tuple[Leg, ...] = (Leg(),)
    drafters: bool = False  # whether each of several drafters is a method
    texts: bool = False  # whether prompts must be long texts to be continued
    timed: bool = False  # whether it is about times alone
    paper: Mapping[str, tuple[Series, Series]] = field(default_factory=dict)  # published speed-up and tau
    log: bool = False

    def contenders(self, leg: Leg, drafters: Sequence[str] = ()) -> list[str]:
        """The methods of a leg; where drafters are compared, each method with each of them."""
        methods = list(leg.methods or self.methods)
        if not self.drafters:
            if len(drafters) > 1:
                raise InputError(f"study {self.name} takes one --drafter, not {len(drafters)}")
            return methods
        if len(drafters) < 2:
            raise InputError(f"study {self.name} compares drafters; give at least two, each with --drafter")
        return [f"{drafter}/{method}" for drafter in drafters for method in methods]


def sweep(policy: str, option: str, values: Sequence[float], **fixed: Any) -> tuple[str, ...]:
    """Methods that differ in one option."""
    more = "".join(f":{name}={value}" for name, value in fixed.items())
    return tuple(f"{policy}{more}:{option}={value:g}" for value in values)


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
    """Run what is not in the folder yet, then draw. `common` are settings of the runner, `more` goes to it as it is."""
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
    """The prompts that every leg can use: points with other prompts could not be compared."""
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
    """Texts to be continued as they are; of other prompts, each followed by all the others, so that it is long."""
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
    """The figure as SVG and PNG, and its figures as CSV."""
    from windfall.render import plots

    found = points(study, out)
    plots.check(out / f"{study.name}.svg")
    files = figures.save(study.draw(study, found), out, study.name)
    table = out / f"{study.name}.csv"
    replace_text(table, as_csv(found))
    return [*files, table]


def as_csv(found: Sequence[Point]) -> str:
    from windfall.bench.report.page import columns, lines_as_csv

    return lines_as_csv([{"series": point.series, "x": point.x, **columns(point.row)} for point in found])


# ---- figures


def _lines(study: Study, found: list[Point]) -> Any:
    """Speed-up above, tau below; the paper's own lines dashed."""
    own = _series(found)
    speeds = {name: _estimates(line) for name, line in own.items() if all(point.row.speedup for point in line)}
    taus = {name: Series([_x(p) for p in line], [p.row.tau for p in line]) for name, line in own.items()}
    for name, (speed, tau) in study.paper.items():
        if speed.x:
            speeds[name] = speed
        taus[name] = tau
    panels = [Panel(speeds, study.across, SPEED, base=1.0, log=study.log)] if speeds else []
    return figures.panels([*panels, Panel(taus, study.across, TAU, log=study.log)], study.title)


def _series(found: list[Point]) -> dict[str, list[Point]]:
    """The points of each line, from left to right; plain decoding is what the others are compared with."""
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
    """Speed-up of each variant, and the paper's own."""
    timed = all(point.row.speedup for point in found)
    values = {p.row.method: p.row.speedup or Estimate(p.row.tau, p.row.tau, p.row.tau) for p in found}
    if timed:
        values |= {f"the paper: {name}": Estimate(gain, gain, gain) for name, _, gain in papers.DYNATREE_ABLATION}
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
    from windfall.bench.report.run_figures import prompt_efficiency

    drafting = {p.row.method: prompt_efficiency(p.records) for p in found if p.row.delta > 0}
    return figures.efficiency(drafting)


def _drafters(study: Study, found: list[Point]) -> Any:
    """tau of each drafter by task, and the paper's own."""
    taus: dict[str, dict[str, float]] = {}
    for point in (p for p in found if p.row.method != PLAIN):
        for task in dict.fromkeys(record.task for record in point.records):
            own = [record for record in point.records if record.task == task]
            taus.setdefault(point.row.method, {})[papers.task_name(task) or task] = results.tau(own)
    for name, *published in papers.TALF_K:
        taus[f"the paper: {name}"] = dict(zip(("MT-bench", "HumanEval", "GSM8K"), published, strict=True))
    tasks = list(dict.fromkeys(task for own in taus.values() for task in own))
    return figures.table(list(taus), tasks, [[own.get(task) for task in tasks] for own in taus.values()], TAU)


# ---- what the papers published


def _salf_paper() -> dict[str, tuple[Series, Series]]:
    cells = [c for c in papers.published() if c.table.startswith("Table 4, th=") and c.task == papers.MEAN]
    xs = [float(cell.table.partition("=")[2]) for cell in cells]
    speed = Series(xs, [cell.speedup or 0.0 for cell in cells], faded=True)
    return {"the paper, DeepSeek 8B": (speed, Series(xs, [cell.tau or 0.0 for cell in cells], faded=True))}


def _gt_paper() -> dict[str, tuple[Series, Series]]:
    costs, _, taus = zip(*papers.GT_COSTS, strict=True)
    return {"the paper, Vicuna 7B": (Series([], []), Series(costs, taus, faded=True))}


# ---- the studies

DYNATREES = ("chain:depth=8", "fixed-wikitext2", "dynatree-wikitext2")
COUPLING = (Leg("coupled", {"coupled": True}), Leg("uncoupled", {"coupled": False}))
LENGTHS, PROMPTS = (100, 200, 500, 1000, 1500, 2000), (100, 200, 400, 600, 800, 1000)

STUDIES = {
    study.name: study
    for study in (
        Study(
            "salf-threshold",
            "SALF: when to stop drafting",
            "SALF & TALF, Table 4",
            sweep("salf", "th", [place / 10 for place in range(10)]),
            "th: stop when the nodes to expand sum to less than this",
            _lines,
            option="th",
            paper=_salf_paper(),
        ),
        Study(
            "talf-k",
            "TALF: heads trained on wider trees",
            "SALF & TALF, Table 3",
            ("salf:th=0",),
            "head",
            _drafters,
            drafters=True,
        ),
        Study(
            "talon-mu",
            "TALON: how strict the gate is",
            "TALON, Figure 13",
            sweep("talon", "mu", (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.1, 0.2)),
            "mu: share of the best candidate's probability that passes",
            _lines,
            option="mu",
            log=True,
        ),
        Study(
            "talon-budget",
            "TALON and EAGLE-3: rows of a target pass",
            "TALON, Figure 12",
            (
                *sweep("talon", "nodes", (32, 40, 48, 60, 72, 84, 96)),
                *sweep("beam", "nodes", (32, 40, 48, 60, 72, 84, 96), depth=8),
            ),
            "rows of the target pass at the most",
            _lines,
            option="nodes",
        ),
        Study(
            "talon-init",
            "TALON: full layers before the gate",
            "TALON, Figure 7",
            sweep("talon", "init_layers", (0, 1, 2, 3)),
            "layers of the k best before the gate is used",
            _lines,
            option="init_layers",
        ),
        Study(
            "talon-temperature",
            "TALON and EAGLE-3 by temperature",
            "TALON, Table 3",
            ("talon", "eagle-3"),
            "temperature",
            _lines,
            temperatures=HEATS,
            legs=COUPLING,
        ),
        Study(
            "gt-c",
            "GT: what a draft pass is said to cost",
            "GT, Table 4",
            sweep("gt", "c", [c for c, _, _ in papers.GT_COSTS]),
            "c: cost of a draft pass, in plain steps",
            _lines,
            option="c",
            paper=_gt_paper(),
            log=True,
        ),
        Study(
            "gt-temperature",
            "GT and EAGLE-2 by temperature",
            "GT, Figure 3",
            ("gt", "eagle-2"),
            "temperature",
            _lines,
            temperatures=HEATS,
            legs=COUPLING,
        ),
        Study(
            "dynatree-ablation",
            "DynaTree: what each part brings",
            "DynaTree, Table 4 and Figure 5",
            ("fixed-tree:depth=5:breadth=2", *(f"dynatree:history={each}" for each in ("none", "paper", "release"))),
            "",
            _ablation,
        ),
        Study(
            "length",
            "Length of the answer",
            "DynaTree, Figure 6",
            DYNATREES,
            "tokens generated",
            _lines,
            legs=tuple(Leg(f"tokens-{n}", {"max_new_tokens": n, "ignore_eos": True}, x=n) for n in LENGTHS),
        ),
        Study(
            "prompt-length",
            "Length of the prompt",
            "DynaTree, Figure 9",
            DYNATREES,
            "tokens of the prompt",
            _lines,
            legs=tuple(Leg(f"prompt-{n}", {"prompt_tokens": n, "ignore_eos": True}, x=n) for n in PROMPTS),
            texts=True,
        ),
        Study(
            "fixed-tree",
            "Fixed trees: depth, breadth and threshold",
            "DynaTree, Figure 7",
            tuple(
                method
                for breadth, tau in ((2, 0.1), (3, 0.1), (4, 0.1), (3, 0.01), (3, 0.03))
                for method in sweep("fixed-tree", "depth", range(3, 9), breadth=breadth, tau=tau)
            ),
            "depth: levels below the first token",
            _lines,
            option="depth",
        ),
        Study(
            "grid",
            "EAGLE-3's tree: every depth with every size",
            "LTD, the grid-search baseline",
            tuple(m for depth in range(4, 13) for m in sweep("beam", "nodes", range(40, 241, 20), depth=depth)),
            "rows of the target pass",
            _grid,
            option="nodes",
        ),
        Study(
            "time-by-depth-and-rows",
            "What depth and rows cost",
            "LTD, Figure 2",
            (),
            "",
            _times,
            timed=True,
            legs=(
                Leg("depth", methods=sweep("beam", "depth", range(1, 13), nodes=60)),
                Leg("nodes", methods=sweep("beam", "nodes", range(20, 241, 20), depth=8)),
            ),
        ),
        Study(
            "delta-tau",
            "Drafting against what it brings",
            "TALON, Figure 6",
            ("eagle-3", "talon", "salf", "gt", "dynatree", "auto"),
            TAU,
            _efficiency,
        ),
    )
}


def find(name: str) -> Study:
    """A study by name."""
    if name not in STUDIES:
        raise InputError(f"there is no study '{name}'; choose from {', '.join(STUDIES)}")
    return STUDIES[name]
