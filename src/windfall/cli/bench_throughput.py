"""`windfall bench throughput`: tokens per second of many requests at once, by method and number of requests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from windfall.bench.methods import parse_methods
from windfall.bench.paths import shorten
from windfall.bench.tasks import in_turns, load_tasks
from windfall.cli import measuring
from windfall.cli.declare import ignore_eos_option, json_option, numbers, option, plot_option, tasks_option, words
from windfall.cli.options import ModelOptions
from windfall.cli.session import DIFFERENT, ON_INTERRUPT, check_result_file, command_line, freeze_objects, write_json
from windfall.core.errors import InputError
from windfall.core.files import parse_json, read_text
from windfall.core.wording import listed
from windfall.render import console
from windfall.render.tables import Figures, Wrapped, figure

if TYPE_CHECKING:
    from windfall.bench.throughput.workload import Settings

RESULT_KEYS = ("target", "provenance", "rows", "skipped")  # of the JSON


@dataclass
class ThroughputOptions:
    """What is measured, on which prompts."""

    PANEL = "Throughput"

    concurrency: str = option("1,2,4,8", "Numbers of requests at once, separated by commas.", metavar="A,B,C")
    methods: list[str] = option([], "Methods, as in `windfall bench run`. Default: none, beam, auto.", metavar="A,B,C")
    tasks: list[str] = tasks_option(["builtin"])
    limit: int = option(12, "Prompts per task, spread over its categories.", min=1)
    max_new_tokens: int = option(128, "Maximum length of an answer.", min=2)
    ignore_eos: bool = ignore_eos_option()
    temperature: str = option("0,1", "Sampling temperatures, separated by commas; 0 is greedy.", metavar="A,B,C")
    arrivals: list[str] = option(
        ["batch,stream"],
        "How requests arrive. batch: all together; stream: a new one whenever one ends.",
        metavar="A,B",
    )
    stream_factor: int = option(
        3, "Requests of a stream, as a multiple of those at once; more give steadier figures.", min=2
    )
    rounds: int = option(3, "Runs of every method; medians are reported.", min=1)
    widen: str | None = option(None, "Zero-pad the model to a larger one's size, e.g. llama-3.1-8b; for timing only.")
    hf: bool = option(True, "Also time transformers' own loops.", "--hf/--no-hf")
    seed: int = option(0, "Random seed; the same seed gives the same texts.")

    def settings(self, model: ModelOptions) -> Settings:
        from windfall.bench.throughput.workload import Settings

        return Settings(
            concurrency=numbers(self.concurrency, "--concurrency", int, "1,8,32"),
            temperatures=numbers(self.temperature, "--temperature"),
            arrivals=tuple(words(self.arrivals, "--arrivals")),
            stream_factor=self.stream_factor,
            rounds=self.rounds,
            max_new_tokens=self.max_new_tokens,
            ignore_eos=self.ignore_eos,
            coupled=not model.uncoupled,
            hf=self.hf,
            seed=self.seed,
            gpu_options=model.gpu_options,
        )


def throughput(
    options: ThroughputOptions,
    model: ModelOptions,
    out: Path | None = option(None, "Write the JSON to this file after every run."),
    plot: Path | None = plot_option("tokens per second by the number of requests"),
    draw: bool = option(False, "Measure nothing; show the results in --out again, and draw them to --plot."),
    json: bool = json_option(),
) -> None:
    """Measure the throughput of many requests at once, by method, next to plain decoding and transformers."""
    from windfall.bench import provenance
    from windfall.bench.speed.speed import widened
    from windfall.bench.throughput import plot as throughput_plot
    from windfall.bench.throughput.throughput import METHODS, Result, measure
    from windfall.render import plots

    def draw_plot(report: dict[str, Any]) -> None:
        if plot is not None and report["rows"]:
            throughput_plot.plot(report, plot)

    if draw:
        plots.check(plot)
        measuring.present(read_results(out), draw_plot, show, json)
        return
    settings, methods = options.settings(model), parse_methods(options.methods or list(METHODS))
    model.check_drafter()
    plots.check(plot)
    check_result_file(out, "bench throughput", RESULT_KEYS)
    tasks = words(options.tasks, "--tasks")
    prompts = in_turns(load_tasks(tasks, options.limit))
    target = model.load_target()
    drafter = model.drafter_spec(target)
    if options.widen is not None:
        target, drafter = widened(target, drafter, options.widen)
    about = provenance.describe({}, target, prompts, command_line())
    given = measuring.chosen(options, methods, tasks, drafter, settings)
    result = Result(shorten(target.name), about, given)

    def save(found: Result) -> None:
        write_json(out, found.as_dict(), indent=1)

    def work() -> None:
        freeze_objects()
        with console.progress("Throughput", counts=True) as progress:
            measure(result, target, methods, drafter, prompts, settings, save, progress, model.trust_remote_code)

    interrupted = measuring.run(result, work, save, draw_plot, show, json)
    if interrupted:
        raise typer.Exit(ON_INTERRUPT)
    if result.different:
        raise typer.Exit(DIFFERENT)


def read_results(file: Path | None) -> dict[str, Any]:
    """What an earlier run has written."""
    if file is None:
        raise InputError("--draw shows earlier results; name their file with --out")
    text = read_text(file)
    try:
        found = parse_json(text)
    except ValueError as error:
        raise InputError(f"'{file}' is not JSON: {error}") from error
    if not isinstance(found, dict) or not {*RESULT_KEYS} <= found.keys():
        raise InputError(f"'{file}' has no results of windfall bench throughput")
    return found


# ---- what is printed


def show(report: dict[str, Any]) -> None:
    """Print a table for each temperature and kind of arrivals, and what is to be said about them."""
    out, rows = console.stdout(), report["rows"]
    for temperature, arrivals in dict.fromkeys((row["temperature"], row["arrivals"]) for row in rows):
        own = [row for row in rows if (row["temperature"], row["arrivals"]) == (temperature, arrivals)]
        out.print(table(own, f"{report['target']}, {arrivals}, temperature {temperature:g}"))
    for reason, methods in _methods_by(rows, "fallback").items():
        out.print(Wrapped(Text(f"{listed(methods)} ran on the host loop: {reason}", style="dim")))
    for reason, methods in _methods_by(rows, "undrafted").items():
        text = f"{listed(methods)} decoded requests that ran together without drafts: {reason}"
        out.print(Wrapped(Text(text, style="dim")))
    for method, reason in dict.fromkeys((each["method"], each["reason"]) for each in report["skipped"]):
        out.print(Wrapped(Text(f"{method} was left out: {reason}", style="yellow")))
    ours = [row for row in rows if row["runner"] != "transformers"]
    different = sum(row["texts"] - row["same_texts"] for row in ours)
    console.print_equality(different, sum(row["texts"] for row in ours), any(row["exact"] for row in ours))


def _methods_by(rows: list[dict[str, Any]], reason: str) -> dict[str, list[str]]:
    """The methods that have each value of the key `reason`, which may be missing."""
    found: dict[str, list[str]] = {}
    for method, text in dict.fromkeys((row["method"], row.get(reason)) for row in rows):
        if text:
            found.setdefault(text, []).append(method)
    return found


def table(rows: list[dict[str, Any]], title: str) -> Figures:
    """The results of one kind of arrivals, with a section for each number of requests."""
    columns = (
        *("method", "at once", "tokens/s", "x none", "TTFT ms", "95%", "TPOT ms", "95% ", "tau", "rows"),
        *("drafts", "rest", "runs on", "same"),
    )
    least = ("runs on", "drafts", "rows", "rest", "same", "95%", "95% ", "tau", "TTFT ms", "TPOT ms")
    made, count = Figures(columns, title, least), None
    for row in sorted(rows, key=lambda row: row["concurrency"]):
        if count != row["concurrency"]:
            made.end_section()
        count = row["concurrency"]
        ttft, tpot = row["ttft"] or {}, row["tpot"] or {}
        made.add(
            row["method"],
            str(count),
            figure(row["tokens_per_second"], "{:.0f}" if (row["tokens_per_second"] or 0) >= 100 else "{:.1f}"),
            figure(row["over_none"], "{:.2f}"),
            *(figure(ttft.get(name), "{:.1f}", 1000) for name in ("median", "p95")),
            *(figure(tpot.get(name), "{:.2f}", 1000) for name in ("median", "p95")),
            figure(row["tau"], "{:.2f}"),
            figure(row["rows_per_pass"], "{:.1f}"),
            figure(row["draft_passes"], "{:.1f}"),
            figure(row["rest_share"], "{:.0f}%", 100),
            row["runner"],
            "" if row["texts"] is None else f"{row['same_texts']}/{row['texts']}",
        )
    return made
