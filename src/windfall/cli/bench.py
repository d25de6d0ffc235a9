"""`windfall bench`: methods over prompts, with every finished conversation kept, and a table of what came of it."""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from windfall.bench.suites import SUITES, Suite, find, join
from windfall.cli.bench_speed import speed
from windfall.cli.help import Command, Group
from windfall.cli.options import Json, ModelOptions, loading_model, takes_records, words
from windfall.cli.session import DIFFERENT, ON_INTERRUPT
from windfall.core.errors import InputError
from windfall.core.wording import counted
from windfall.render import console
from windfall.render.tables import Figures, Wrapped

if TYPE_CHECKING:
    from windfall.bench.reading import Run
    from windfall.bench.results import Difference, Estimate, Row
    from windfall.bench.runner import Part, Settings

SHOWN = 5  # differing texts that are named
BESIDES = "+"  # before a method that comes to those of a suite
EXACT = ("cpu", ("float32", "float64"))  # where every text must be plain decoding's

app = typer.Typer(
    cls=Group,
    help="Run methods over prompts, and keep what came of it.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=Command)(speed)


def _bench(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="Benchmark", **more)


@dataclass
class BenchOptions:
    """What to run; what is not given here comes from the suite, or else from the defaults."""

    suite: Annotated[
        str | None,
        _bench("--suite", "A named benchmark, or several at once; see `windfall bench suites`.", metavar="A,B,C"),
    ] = None
    methods: Annotated[
        list[str],
        _bench(
            "--methods",
            "Policies, presets or FILE.py:CLASS, separated by commas; repeatable. Settings follow after "
            "colons, a drafter goes before a slash, + stands for a comma in a value: self:skip=3+5/beam:depth=4. Or "
            "all. Beside a suite they take the place of its own; with a + in front they come to them.",
            metavar="A,B,C",
        ),
    ] = field(default_factory=list)
    tasks: Annotated[
        list[str],
        _bench("--tasks", "JSONL files, builtin, or known datasets, separated by commas; repeatable.", metavar="A,B,C"),
    ] = field(default_factory=list)
    temperature: Annotated[
        str | None, _bench("--temperature", "0 is greedy; several are separated by commas.", metavar="A,B,C")
    ] = None
    repeats: Annotated[
        int | None,
        _bench("--repeats", "Rounds over all prompts; 3 if no suite says otherwise, 1 with --no-timing.", min=1),
    ] = None
    limit: Annotated[
        int | None, _bench("--limit", "Prompts of each task, spread over its categories; none: all.", min=1)
    ] = None
    max_new_tokens: Annotated[
        int | None,
        _bench("--max-new-tokens", "Length of an answer at the most; 128 if no suite says otherwise.", min=1),
    ] = None
    prompt_tokens: Annotated[
        int | None, _bench("--prompt-tokens", "Of texts to be continued; 200 if no suite says otherwise.", min=1)
    ] = None
    ignore_eos: Annotated[bool | None, _bench("--ignore-eos", "Go on after the model's end of text.")] = None
    warm_up: Annotated[
        int | None,
        _bench("--warm-up", "Prompts that each method answers first, untimed; 2 if no suite says otherwise.", min=0),
    ] = None
    seed: Annotated[int, _bench("--seed", "Same seed, same texts.")] = 0
    batch: Annotated[int, _bench("--batch", "Conversations decoded together; needs --no-timing.", min=1)] = 1
    memory: Annotated[
        bool | None, _bench("--memory", "On a CUDA device, measure each method's peak memory apart, in a new engine.")
    ] = None
    no_timing: Annotated[bool, _bench("--no-timing", "Keep no times: for tau and acceptance alone.")] = False
    profile: Annotated[
        Path | None,
        _bench("--profile", "Costs of passes: another run's run.json, or the output of `windfall profile --json`."),
    ] = None

    def settings(self, methods: list[str], model: ModelOptions, drafter: str) -> Settings:
        from windfall.bench.paths import shorten
        from windfall.bench.runner import Settings

        base = self._suite
        given = {"repeats": self.rounds} | {name: value for name, value in vars(self).items() if value is not None}
        shared = {f.name: given.get(f.name, getattr(base, f.name)) for f in dataclasses.fields(Suite)}
        del shared["about"]
        chosen = {
            "methods": tuple(methods),
            "tasks": tuple(map(shorten, self.task_names)),
            "temperatures": _numbers(self.temperature) if self.temperature is not None else base.temperatures,
            "seed": self.seed,
            "batch": self.batch,
            "timing": not self.no_timing,
            "coupled": not model.uncoupled,
            "drafter": drafter,
            "suite": self.suite,
            **dataclasses.asdict(model.launch),
        }
        return Settings(**{**shared, **chosen})

    @property
    def rounds(self) -> int:
        """As asked for, or as the suite says; without times one, unless it was asked for."""
        return self.repeats or (1 if self.no_timing else self._suite.repeats)

    @property
    def suites(self) -> list[str]:
        return [] if self.suite is None else words([self.suite], "--suite")

    @property
    def _suite(self) -> Suite:
        return join(self.suites) if self.suites else Suite("", ("auto",), ("builtin",))

    def parts(self, settings: Settings, prompts: list[Any]) -> tuple[Part, ...]:
        """Where several suites run at once, what each of them runs; of tasks that were given, those it has too."""
        from windfall.bench.methods import parse_methods
        from windfall.bench.runner import Part

        found, added = [], [method.label for method in parse_methods(self.added)]
        for name in self.suites if len(self.suites) > 1 else ():
            suite = find(name)
            own = [label for label in settings.methods if label in (*suite.methods, *added)]
            chosen = settings.methods if self.given else tuple(own)
            heats = settings.temperatures if self.temperature is not None else suite.temperatures
            found.append(Part(name, chosen, _tasks_of(suite, prompts), heats, suite.memory or bool(self.memory)))
        return tuple(found)

    @property
    def given(self) -> list[str]:
        """The methods that take the place of a suite's."""
        return [item for text in self.methods for item in text.split(",") if not item.strip().startswith(BESIDES)]

    @property
    def added(self) -> list[str]:
        """Those that come to them."""
        items = [item.strip() for text in self.methods for item in text.split(",")]
        return [item.removeprefix(BESIDES) for item in items if item.startswith(BESIDES)]

    @property
    def method_names(self) -> list[str]:
        return [*(self.given or self._suite.methods), *self.added]

    @property
    def task_names(self) -> list[str]:
        return words(self.tasks, "--tasks") or list(self._suite.tasks)


def _tasks_of(suite: Suite, prompts: list[Any]) -> tuple[str, ...]:
    """The tasks that a suite names, or that its paper calls the same; all of them where there is none."""
    from windfall.bench.papers.tables import task_name

    every = list(dict.fromkeys(prompt.task for prompt in prompts))
    names = {task_name(task) for task in suite.tasks} - {None}
    own = [task for task in every if task in suite.tasks or task_name(task) in names]
    return tuple(own or every)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise InputError(f"write --temperature as numbers separated by commas, for example 0,1, not '{text}'") from None


@app.command(cls=Command)
@takes_records
def run(
    bench: BenchOptions,
    model: ModelOptions,
    out: Annotated[Path, typer.Option("--out", help="Folder for the results: new, or with --resume an earlier run's.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    json: Json = False,
) -> None:
    """Run methods over prompts, plain decoding among them, and keep every finished conversation."""
    from windfall.bench import runner, tasks
    from windfall.bench.methods import DrafterSpec, parse_methods
    from windfall.bench.store import Store
    from windfall.core.options import split_settings
    from windfall.engine import loading

    methods = parse_methods(bench.method_names)
    drafter = DrafterSpec(model.drafter_name, split_settings(model.drafter_settings))
    drafter.check()
    if bench.repeats is None and bench.rounds == 1 < bench._suite.repeats:
        console.note("one round over the prompts, as nothing is timed; --repeats N gives samples with other seeds")
    settings = bench.settings([method.label for method in methods], model, drafter.label)
    labels = [(method.drafter or drafter).label for method in methods]
    profiles = None if bench.profile is None else runner.read_profiles(bench.profile, labels)
    prompts = tasks.in_turns(tasks.load_tasks(bench.task_names, settings.limit))
    store = Store(out, resume)
    settings = dataclasses.replace(settings, parts=bench.parts(settings, prompts))
    prompts = [prompt for prompt in prompts if settings.asks(prompt.task)]
    with loading_model():
        how: dict[str, Any] = {"device": model.device, "dtype": model.dtype}
        target = loading.as_target(model.target, **how, trust_remote_code=model.trust_remote_code)
    prompts = _fitting(prompts, target, settings)
    if target.device.type != "cuda" and any(settings.measures_memory(method.label) for method in methods):
        console.note(f"peak memory is measured on CUDA devices alone, not on {target.device.type}: left out")
    try:
        with console.counted("Benchmark") as tell:
            done = runner.run(
                settings,
                methods,
                prompts,
                target,
                store,
                drafter,
                profiles,
                ["windfall", *sys.argv[1:]],
                model.trust_remote_code,
                tell,
            )
    except KeyboardInterrupt:
        console.note(f"stopped; {counted(len(store.done), 'conversation')} kept, and --resume goes on from there")
        raise typer.Exit(ON_INTERRUPT) from None
    _show(done, json)
    _judge(done)


def _fitting(prompts: list[Any], target: Any, settings: Settings) -> list[Any]:
    """The prompts that the target has room for; how many were left out is said."""
    from windfall.bench import runner

    fitting = runner.fitting(prompts, target, settings)
    if not fitting:
        wanted = f"a prompt and {settings.max_new_tokens} new tokens"
        raise InputError(f"no prompt fits: {target.name} has a context of {target.context} for {wanted}")
    if len(fitting) < len(prompts):
        console.note(
            f"{len(prompts) - len(fitting)} of {len(prompts)} prompts are too long for {target.name}: left out"
        )
    return fitting


@app.command(cls=Command)
def suites(json: Json = False) -> None:
    """List the named benchmarks."""
    if json:
        console.print_json({name: dataclasses.asdict(suite) for name, suite in SUITES.items()}, indent=2)
        return
    out = console.stdout()
    for name, suite in SUITES.items():
        out.print(Text.assemble((name, "bold"), "  ", suite.about))
        out.print(Text(f"  methods  {' '.join(suite.methods)}", style="dim"))
        heat = ", ".join(f"{temperature:g}" for temperature in suite.temperatures)
        out.print(Text(f"  tasks    {' '.join(suite.tasks)}; temperature {heat}", style="dim"))


@app.command(cls=Command)
def show(
    folder: Annotated[Path, typer.Argument(help="Folder that `windfall bench run` wrote.")], json: Json = False
) -> None:
    """Print the figures of a run."""
    from windfall.bench.reading import load

    _show(load(folder), json)


# ---- what is printed


def _show(done: Run, json: bool) -> None:
    from windfall.bench.disturbance import disturbances
    from windfall.bench.results import differences, summary

    rows, wrong = summary(done), differences(done)
    disturbed = disturbances(done, rows)
    if json:
        found = {"different": [each._asdict() for each in wrong], "disturbed": [each._asdict() for each in disturbed]}
        console.print_json({"rows": [row.as_dict() for row in rows], **found}, indent=2)
        return
    for temperature in done.temperatures:
        console.stdout().print(table([row for row in rows if row.temperature == temperature], temperature))
    for each in disturbed:
        told = f"At temperature {each.temperature:g} {each.warning}"
        console.stdout().print(Wrapped(Text(told, style="bold yellow")))
    _tell_differences(wrong, done)


def table(rows: list[Row], temperature: float) -> Figures:
    """The figures at one temperature, a section for each task."""
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
        made.add(row.method, *figures, accepted, speed, _gain(row.speedup))
    return made


def _gain(estimate: Estimate | None) -> str:
    return "" if estimate is None else f"{estimate.value:.2f} ({estimate.low:.2f}–{estimate.high:.2f})"


def _tell_differences(wrong: list[Difference], done: Run) -> None:
    from windfall.bench.results import compared

    out, texts = console.stdout(), len(compared(done.records))
    if not texts:
        out.print(Text("No text was compared with plain decoding's", style="yellow"))
        return
    if not wrong:
        out.print(Text(f"Same text as plain decoding's in all {counted(texts, 'conversation')}", style="green"))
        return
    out.print(Text(f"{len(wrong)} of {texts} conversations differ from plain decoding's", style="red"))
    for each in wrong[:SHOWN]:
        where = f"temperature {each.temperature:g}, repeat {each.repeat}, turn {each.turn}"
        out.print(Text(f"  {each.method} on {each.task} {each.id}: {where}", style="red"))


def _judge(done: Run) -> None:
    """Where arithmetic is exact enough for it, another text is a failure."""
    from windfall.bench.results import differences

    target = done.provenance["target"]
    if target["device"] == EXACT[0] and target["dtype"] in EXACT[1] and differences(done):
        raise typer.Exit(DIFFERENT)
