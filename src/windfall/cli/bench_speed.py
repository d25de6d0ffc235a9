"""`windfall bench speed`: passes against the memory's bandwidth limit, methods against plain decoding, transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from windfall.bench.methods import parse_methods
from windfall.bench.paths import shorten
from windfall.bench.tasks import load_tasks
from windfall.cli import measuring
from windfall.cli.declare import ignore_eos_option, json_option, numbers, option, plot_option, tasks_option, words
from windfall.cli.options import ModelOptions
from windfall.cli.session import ON_INTERRUPT, check_result_file, command_line, write_json
from windfall.core.errors import InputError
from windfall.render import console
from windfall.render.tables import Figures, figure

if TYPE_CHECKING:
    from windfall.bench.speed.race import Settings

RESULT_KEYS = ("target", "passes", "methods")  # of the JSON


@dataclass
class SpeedOptions:
    """What is measured, on which prompts."""

    PANEL = "Speed"

    methods: list[str] = option([], "As in `windfall bench run`. Default: a few of each kind.", metavar="A,B,C")
    tasks: list[str] = tasks_option(["builtin"])
    limit: int = option(12, "Prompts per task, spread over its categories.", min=1)
    max_new_tokens: int = option(128, "Maximum length of an answer.", min=2)
    ignore_eos: bool = ignore_eos_option()
    temperature: str = option("0,1", "Sampling temperatures, separated by commas; 0 is greedy.", metavar="A,B,C")
    coupled: bool = option(False, "Measure only coupled drafting. Default: coupled and uncoupled.")
    rounds: int = option(3, "Runs of every method; medians are reported.", min=1)
    widen: str | None = option(None, "Zero-pad the model to a larger one's size, e.g. llama-3.1-8b; for timing only.")
    lengths: str | None = option(None, "Context lengths at which passes are timed.", metavar="A,B,C")
    hf: bool = option(True, "Also time transformers' own generation loops.", "--hf/--no-hf")
    hf_limit: int = option(2, "Prompts per task for transformers.", min=1)
    hf_tokens: int = option(64, "Maximum length of transformers' answers.", min=2)
    profile: Path | None = option(None, "Costs of passes, as in `windfall bench run`. Default: measured.")
    seed: int = option(0, "Random seed; the same seed gives the same texts.")

    def settings(self, model: ModelOptions) -> Settings:
        from windfall.bench.speed.race import LENGTHS, Settings

        if self.coupled and model.uncoupled:
            raise InputError("choose one of --coupled and --uncoupled; without them both are measured")
        return Settings(
            temperatures=numbers(self.temperature, "--temperature"),
            couplings=(True, False) if self.coupled == model.uncoupled else (self.coupled,),
            rounds=self.rounds,
            max_new_tokens=self.max_new_tokens,
            lengths=LENGTHS if self.lengths is None else numbers(self.lengths, "--lengths", int, "512,2048"),
            hf=self.hf,
            hf_limit=self.hf_limit,
            hf_tokens=self.hf_tokens,
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            gpu_options=model.gpu_options,
        )


def speed(
    options: SpeedOptions,
    model: ModelOptions,
    out: Path | None = option(None, "Write the JSON to this file after every step."),
    plot: Path | None = plot_option("the results"),
    json: bool = json_option(),
) -> None:
    """Time passes against the memory's bandwidth limit, and methods against plain decoding and transformers."""
    from windfall.bench import provenance, runner
    from windfall.bench.speed import plot as speed_plot
    from windfall.bench.speed.speed import METHODS, Result, measure, widened
    from windfall.render import plots

    settings, methods = options.settings(model), parse_methods(options.methods or list(METHODS))
    model.check_drafter()
    plots.check(plot)
    check_result_file(out, "bench speed", RESULT_KEYS)
    profiles = None if options.profile is None else runner.read_profiles(options.profile)
    tasks = words(options.tasks, "--tasks")
    prompts = load_tasks(tasks, options.limit)
    target = model.load_target()
    drafter = model.drafter_spec(target)
    if options.widen is not None:
        target, drafter = widened(target, drafter, options.widen)
    about = provenance.describe({}, target, prompts, command_line())
    about["drafters"] = {drafter.label: None}
    given = measuring.chosen(options, methods, tasks, drafter, settings)
    result = Result(shorten(target.name), about, given)

    def attach_costs(measured: Any) -> dict[str, Any]:
        engines = {each.drafter.label: each.engine for each in measured if each.drafter is not None}
        result.provenance["drafters"] = provenance.describe(engines, target, (), ())["drafters"]
        result.provenance["target"]["exact"] = all(each.engine.exact_passes for each in measured)
        return runner.attach_costs(measured, profiles)

    def save(found: Result) -> None:
        write_json(out, found.as_dict(), indent=1)

    def work() -> None:
        with _bars() as progress:
            parts = result, target, methods, drafter, prompts, settings
            measure(*parts, attach_costs, save, progress, model.trust_remote_code)

    def draw(report: dict[str, Any]) -> None:
        if plot is not None and result.methods:
            speed_plot.plot(report, plot)

    interrupted = measuring.run(result, work, save, draw, show, json)
    if interrupted:
        raise typer.Exit(ON_INTERRUPT)


@contextlib.contextmanager
def _bars() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for each part of the work, one after the other."""
    bars: dict[str, Callable[..., None]] = {}
    with contextlib.ExitStack() as stack:

        def progress(part: str, done: int, total: int) -> None:
            if part not in bars:
                stack.close()
                bars[part] = stack.enter_context(console.progress(part, counts=True))
            bars[part](done, total)

        yield progress


# ---- what is printed


def show(report: dict[str, Any]) -> None:
    """Print all tables of a result."""
    out, passes = console.stdout(), report["passes"]
    regimes = dict.fromkeys((row["temperature"], row["coupled"]) for row in report["methods"])
    for regime in regimes:
        rows = [row for row in report["methods"] if (row["temperature"], row["coupled"]) == regime]
        out.print(_method_table(rows, f"{report['target']}, {_regime(*regime)}"))
    for name, by in (("rows", "rows"), ("lengths", "context")):
        if passes.get(name):
            out.print(_pass_table(passes[name], f"{report['target']}, verify pass by {by}"))
    if "skipped" in passes:
        out.print(Text(f"No passes were timed: {passes['skipped']}", style="yellow"))
    if launches := passes.get("launches"):
        out.print(Text("Launches: " + ", ".join(f"{name} {count:g}" for name, count in launches.items())))
    if report["memory"]:
        bandwidth = report["memory"]["bandwidth"] / 1e9
        out.print(Text(f"Memory bandwidth: {bandwidth:.0f} GB/s, measured with a copy", style="dim"))


def _regime(temperature: float, coupled: bool | None) -> str:
    return f"temperature {temperature:g}" + ("" if coupled is None else ", coupled" if coupled else ", uncoupled")


def _method_table(rows: list[dict[str, Any]], title: str) -> Figures:
    columns = ("method", "tokens/s", "tau", "cycle", "draft", "verify", "rest", "x none", "x HF", "memory", "same")
    table = Figures(columns, title, least=("rest", "draft", "verify", "cycle", "memory", "same", "x HF", "tau"))
    for row in rows:
        split, inside = row["split"] or {}, row["inside"] or {}
        table.add(
            row["method"],
            figure(row["tokens_per_second"], "{:.0f}" if (row["tokens_per_second"] or 0) >= 100 else "{:.1f}"),
            figure(row["tau"], "{:.2f}"),
            figure(row["cycle_seconds"], "{:.2f}", 1000),
            figure(split.get("draft_ms"), "{:.2f}"),
            figure(split.get("verify_ms"), "{:.2f}"),
            figure(inside.get("rest_share", split.get("rest_share")), "{:.0f}%", 100),
            figure(row["over_none"], "{:.2f}"),
            figure(row["over_hf"], "{:.1f}"),
            figure(row["memory_overhead"], "{:+.1f}%", 100),
            "" if row["texts"] is None else f"{row['same_texts']}/{row['texts']}",
        )
    return table


def _pass_table(rows: list[dict[str, Any]], title: str) -> Figures:
    columns = ("context", "rows", "ms", "with the walk", "x first", "MB read", "floor ms", "x floor")
    table = Figures(columns, title, least=("MB read", "x first", "floor ms", "with the walk", "x floor"))
    for row in rows:
        table.add(
            f"{row['length']}" + (" (beyond)" if row.get("beyond_context") else ""),
            str(row["rows"]),
            figure(row["seconds"], "{:.3f}", 1000),
            figure(row["verify_seconds"], "{:.3f}", 1000),
            figure(row["over_first"], "{:.2f}"),
            figure(row["bytes"], "{:.0f}", 1e-6),
            figure(row["floor_seconds"], "{:.3f}", 1000),
            figure(row["over_floor"], "{:.2f}"),
        )
    return table
