"""`windfall bench`: run methods over prompts, keep every finished conversation, and print a table of the results."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from windfall.bench.methods import parse_methods
from windfall.bench.paths import shorten
from windfall.bench.suites import SUITES, Suite, Workload, find, join
from windfall.cli.declare import argument, ignore_eos_option, json_option, numbers, option, tasks_option, words
from windfall.cli.options import ModelOptions
from windfall.cli.session import DIFFERENT, command_line, stop_on_interrupt
from windfall.core.errors import InputError
from windfall.core.wording import counted
from windfall.render import console
from windfall.render.tables import Figures, Wrapped

if TYPE_CHECKING:
    from windfall.bench.reading import Run
    from windfall.bench.results import Difference, Row
    from windfall.bench.runner import Part, Settings
    from windfall.core.stats import Estimate

MAX_SHOWN_DIFFERENCES = 5
ADDED = "+"  # prefix of a method that is added to those of a suite
EXACT = ("cpu", ("float32", "float64"))  # device and dtypes in which every text must equal plain decoding's


@dataclass
class BenchOptions:
    """What to run. Options that are not given come from the suite, or else have the defaults of `Suite`."""

    PANEL = "Benchmark"

    suite: str | None = option(None, "Named benchmarks; see `windfall bench suites`.", metavar="A,B,C")
    methods: list[str] = option(
        [],
        "Policies, presets or FILE.py:CLASS, separated by commas; or all. Repeatable. Settings follow after colons, "
        "with + for a comma in a value; a drafter stands before a slash: self:skip=3+5/beam:depth=4. They replace the "
        "methods of a suite; a method that begins with + is added to them.",
        metavar="A,B,C",
    )
    tasks: list[str] = tasks_option([])
    temperature: str | None = option(None, "Sampling temperatures, separated by commas; 0 is greedy.", metavar="A,B,C")
    repeats: int | None = option(
        None, "Rounds over all prompts. Default: the suite's, or 3; 1 with --no-timing.", min=1
    )
    limit: int | None = option(None, "Prompts per task, spread over its categories. Default: all.", min=1)
    max_new_tokens: int | None = option(None, "Maximum length of an answer. Default: the suite's, or 128.", min=1)
    prompt_tokens: int | None = option(None, "Length of texts to be continued. Default: the suite's, or 200.", min=1)
    ignore_eos: bool | None = ignore_eos_option(None)
    warm_up: int | None = option(None, "Untimed prompts before each method. Default: the suite's, or 2.", min=0)
    seed: int = option(0, "Random seed; the same seed gives the same texts.")
    batch: int = option(1, "Conversations decoded in one batch; needs --no-timing.", min=1)
    memory: bool | None = option(None, "On a CUDA device, also measure each method's peak memory in a new engine.")
    no_timing: bool = option(False, "Do not measure times; for tau and acceptance rates only.")
    profile: Path | None = option(
        None, "Costs of passes: run.json of another run, or the output of `windfall profile --json`."
    )

    def settings(self, methods: list[str], model: ModelOptions) -> Settings:
        from windfall.bench.runner import Settings

        base = self._suite
        given = {"repeats": self.rounds} | {name: value for name, value in vars(self).items() if value is not None}
        shared = {f.name: given.get(f.name, getattr(base, f.name)) for f in dataclasses.fields(Workload)}
        chosen = {
            "methods": tuple(methods),
            "tasks": tuple(map(shorten, self.task_names)),
            "temperatures": base.temperatures if self.temperature is None else self._temperatures,
            "seed": self.seed,
            "batch": self.batch,
            "timing": not self.no_timing,
            "coupled": not model.uncoupled,
            "suite": self.suite,
        }
        known = {field.name for field in dataclasses.fields(Settings)}
        chosen |= {name: value for name, value in vars(model.gpu_options).items() if name in known}
        return Settings(**{**shared, **chosen})

    @property
    def rounds(self) -> int:
        """The option, or else the suite's number; without timing one round."""
        return self.repeats or (1 if self.no_timing else self._suite.repeats)

    @property
    def suites(self) -> list[str]:
        return [] if self.suite is None else words([self.suite], "--suite")

    @property
    def _suite(self) -> Suite:
        return join(self.suites) if self.suites else Suite(("auto",), ("builtin",))

    @property
    def _temperatures(self) -> tuple[float, ...]:
        return numbers(str(self.temperature), "--temperature")

    def parts(self, settings: Settings, prompts: list[Any]) -> tuple[Part, ...]:
        """For several suites in one run, what each of them runs; empty otherwise."""
        from windfall.bench.runner import Part

        found, added = [], [method.label for method in parse_methods(self._added)]
        for name in self.suites if len(self.suites) > 1 else ():
            suite = find(name)
            own = [label for label in settings.methods if label in (*suite.methods, *added)]
            methods = settings.methods if self._replacing else tuple(own)
            temperatures = settings.temperatures if self.temperature is not None else suite.temperatures
            memory = suite.memory or bool(self.memory)
            found.append(Part(name, methods, _tasks_of(suite, prompts), temperatures, memory))
        return tuple(found)

    @property
    def _replacing(self) -> list[str]:
        """The methods that replace a suite's."""
        return [item for text in self.methods for item in text.split(",") if not item.strip().startswith(ADDED)]

    @property
    def _added(self) -> list[str]:
        """The methods that are added to a suite's."""
        items = [item.strip() for text in self.methods for item in text.split(",")]
        return [item.removeprefix(ADDED) for item in items if item.startswith(ADDED)]

    @property
    def method_names(self) -> list[str]:
        return [*(self._replacing or self._suite.methods), *self._added]

    @property
    def task_names(self) -> list[str]:
        return words(self.tasks, "--tasks") or list(self._suite.tasks)


def _tasks_of(suite: Suite, prompts: list[Any]) -> tuple[str, ...]:
    """The tasks of these prompts that a suite names, or its paper under another name; all tasks if there is none."""
    from windfall.bench.papers.tables import task_name

    every = list(dict.fromkeys(prompt.task for prompt in prompts))
    names = {task_name(task) for task in suite.tasks} - {None}
    own = [task for task in every if task in suite.tasks or task_name(task) in names]
    return tuple(own or every)


def run(
    bench: BenchOptions,
    model: ModelOptions,
    out: Path = option(..., "Folder for the results: a new one, or with --resume that of an earlier run."),
    resume: bool = option(False, "Continue the run in --out."),
    json: bool = json_option(),
) -> None:
    """Run methods and plain decoding over prompts, and keep every finished conversation."""
    from windfall.bench import runner, tasks
    from windfall.bench.store import Store

    methods = parse_methods(bench.method_names)
    model.check_drafter()
    if bench.repeats is None and bench.rounds == 1 < bench._suite.repeats:
        console.note("one round over the prompts, because nothing is timed; --repeats N samples with other seeds")
    settings = bench.settings([method.label for method in methods], model)
    profiles = None if bench.profile is None else runner.read_profiles(bench.profile)
    prompts = tasks.in_turns(tasks.load_tasks(bench.task_names, settings.limit))
    store = Store(out, resume)
    settings = dataclasses.replace(settings, parts=bench.parts(settings, prompts))
    prompts = [prompt for prompt in prompts if settings.asks(prompt.task)]
    target = model.load_target()
    drafter = model.drafter_spec(target)
    settings = dataclasses.replace(settings, drafter=drafter.label)
    prompts = _fitting(prompts, target, settings)
    if target.device.type != "cuda" and any(settings.measures_memory(method.label) for method in methods):
        console.note(f"peak memory is measured on CUDA devices only, not on {target.device.type}")
    with (
        stop_on_interrupt(lambda: f"stopped; {counted(len(store.done), 'conversation')} kept, and --resume continues"),
        console.progress("Benchmark", counts=True) as progress,
    ):
        work = settings, methods, prompts, target, store, drafter, profiles
        done = runner.run(*work, command_line(), model.trust_remote_code, progress)
    _show(done, json)
    _check_exact(done)


def _fitting(prompts: list[Any], target: Any, settings: Settings) -> list[Any]:
    """The prompts that fit the target's context; a note says how many are left out."""
    from windfall.bench import runner

    fitting = runner.fitting(prompts, target, settings)
    if not fitting:
        wanted = f"a prompt and {settings.max_new_tokens} new tokens"
        raise InputError(f"no prompt fits: {target.name} has a context of {target.context} for {wanted}")
    if left_out := len(prompts) - len(fitting):
        console.note(f"{left_out} of {len(prompts)} prompts are too long for {target.name} and left out")
    return fitting


def suites(json: bool = json_option()) -> None:
    """List the named benchmarks."""
    if json:
        console.print_json({name: dataclasses.asdict(suite) for name, suite in SUITES.items()}, indent=2)
        return
    out = console.stdout()
    for name, suite in SUITES.items():
        out.print(Text.assemble((name, "bold"), "  ", suite.about))
        out.print(Text(f"  methods  {' '.join(suite.methods)}", style="dim"))
        temperatures = ", ".join(f"{temperature:g}" for temperature in suite.temperatures)
        out.print(Text(f"  tasks    {' '.join(suite.tasks)}; temperature {temperatures}", style="dim"))


def show(folder: Path = argument(..., "Folder that `windfall bench run` wrote."), json: bool = json_option()) -> None:
    """Print the results of a run."""
    from windfall.bench.reading import load

    _show(load(folder), json)


# ---- what is printed


def _show(done: Run, json: bool) -> None:
    from windfall.bench.disturbance import disturbances
    from windfall.bench.results import compared, differences, summary

    rows, wrong = summary(done), differences(done)
    disturbed = disturbances(done, rows)
    if json:
        found = {"different": [each._asdict() for each in wrong], "disturbed": [each._asdict() for each in disturbed]}
        console.print_json({"rows": [row.as_dict() for row in rows], **found}, indent=2)
        return
    for temperature in done.temperatures:
        console.stdout().print(table([row for row in rows if row.temperature == temperature], temperature))
    for each in disturbed:
        warning = f"At temperature {each.temperature:g} {each.warning}"
        console.stdout().print(Wrapped(Text(warning, style="bold yellow")))
    console.print_equality(len(wrong), len(compared(done.records)))
    for difference in wrong[:MAX_SHOWN_DIFFERENCES]:
        console.stdout().print(Text(_place(difference), style="red"))


def table(rows: list[Row], temperature: float) -> Figures:
    """The results at one temperature, with a section for each task."""
    columns = ("method", "tau", "delta", "rows", "accepted", "tokens/s", "speed-up (95%)")
    made = Figures(columns, f"temperature {temperature:g}", least=("accepted", "rows", "delta", "tokens/s", "tau"))
    task = None
    for row in rows:
        if task != row.task:
            made.end_section()
            made.add(Text(row.task, style="bold"))
        task = row.task
        figures = f"{row.tau:.2f}", f"{row.delta:.2f}", f"{row.rows:.1f}"
        accepted = "" if math.isnan(row.acceptance) else f"{100 * row.acceptance:.0f}%"
        speed = "" if row.tokens_per_second is None else f"{row.tokens_per_second:.1f}"
        made.add(row.method, *figures, accepted, speed, _interval(row.speedup))
    return made


def _interval(estimate: Estimate | None) -> str:
    return "" if estimate is None else f"{estimate.value:.2f} ({estimate.low:.2f}–{estimate.high:.2f})"


def _place(difference: Difference) -> str:
    where = f"temperature {difference.temperature:g}, repeat {difference.repeat}, turn {difference.turn}"
    return f"  {difference.method} on {difference.task} {difference.id}: {where}"


def _check_exact(done: Run) -> None:
    """Exit with an error if a text differs although all must be equal: on a CPU in float32, and with exact passes."""
    from windfall.bench.results import differences

    target = done.provenance["target"]
    in_float32 = target["device"] == EXACT[0] and target["dtype"] in EXACT[1]
    in_exact_passes = target.get("exact") and done.settings["batch"] == 1  # batches run without them
    if (in_float32 or in_exact_passes) and differences(done):
        raise typer.Exit(DIFFERENT)
