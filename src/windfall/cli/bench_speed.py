"""`windfall bench speed`: how close passes come to the memory's limit, and how fast methods are beside their peers."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from windfall.cli.options import Json, ModelOptions, loading_model, takes_records, words
from windfall.cli.session import ON_INTERRUPT
from windfall.core.errors import InputError
from windfall.render import console
from windfall.render.tables import Figures

if TYPE_CHECKING:
    from windfall.bench.methods import DrafterSpec, Method
    from windfall.bench.speed.race import Settings
    from windfall.bench.speed.speed import Result
    from windfall.bench.tasks import Prompt
    from windfall.model.target import Target


def _speed(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="Speed", **more)


@dataclass
class SpeedOptions:
    """What is measured, on which prompts."""

    methods: Annotated[
        list[str], _speed("--methods", "As in `windfall bench run`; none: a few of each kind.", metavar="A,B,C")
    ] = field(default_factory=list)
    tasks: Annotated[
        list[str],
        _speed("--tasks", "JSONL files, builtin, or known datasets, separated by commas; repeatable.", metavar="A,B,C"),
    ] = field(default_factory=lambda: ["builtin"])
    limit: Annotated[int, _speed("--limit", "Prompts of each task, spread over its categories.", min=1)] = 12
    max_new_tokens: Annotated[int, _speed("--max-new-tokens", "Length of an answer at the most.", min=2)] = 128
    ignore_eos: Annotated[bool, _speed("--ignore-eos", "Go on after the model's end of text.")] = False
    temperature: Annotated[
        str, _speed("--temperature", "0 is greedy; several are separated by commas.", metavar="A,B,C")
    ] = "0,1"
    coupled: Annotated[
        bool, _speed("--coupled", "Drafters see the sampling noise; without this and --uncoupled: both ways.")
    ] = False
    rounds: Annotated[int, _speed("--rounds", "Turns of every method; medians count.", min=1)] = 3
    widen: Annotated[
        str | None, _speed("--widen", "At the cost of a larger model, for example llama-3.1-8b; the text stays.")
    ] = None
    lengths: Annotated[
        str | None, _speed("--lengths", "Context lengths behind which passes are timed.", metavar="A,B,C")
    ] = None
    hf: Annotated[bool, _speed("--hf/--no-hf", "Whether transformers' own loops are timed, too.")] = True
    hf_limit: Annotated[int, _speed("--hf-limit", "Prompts of each task for transformers' loops.", min=1)] = 2
    hf_tokens: Annotated[int, _speed("--hf-tokens", "Length of their answers at the most.", min=2)] = 64
    profile: Annotated[
        Path | None, _speed("--profile", "Costs of passes, as in `windfall bench run`; none: measured.")
    ] = None
    seed: Annotated[int, _speed("--seed", "Same seed, same texts.")] = 0

    def settings(self, model: ModelOptions) -> Settings:
        from windfall.bench.speed.race import LENGTHS, Settings

        if self.coupled and model.uncoupled:
            raise InputError("choose one of --coupled and --uncoupled; neither measures both")
        return Settings(
            temperatures=_numbers(self.temperature, float, "--temperature", "0,1"),
            couplings=(True, False) if self.coupled == model.uncoupled else (self.coupled,),
            rounds=self.rounds,
            max_new_tokens=self.max_new_tokens,
            lengths=LENGTHS if self.lengths is None else _numbers(self.lengths, int, "--lengths", "512,2048"),
            hf=self.hf,
            hf_limit=self.hf_limit,
            hf_tokens=self.hf_tokens,
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            launch=model.launch,
        )


def _numbers(text: str, kind: Callable[[str], Any], option: str, example: str) -> tuple[Any, ...]:
    try:
        return tuple(map(kind, text.split(",")))
    except ValueError:
        raise InputError(
            f"write {option} as numbers separated by commas, for example {example}, not '{text}'"
        ) from None


@takes_records
def speed(
    options: SpeedOptions,
    model: ModelOptions,
    out: Annotated[Path | None, typer.Option("--out", help="Write the JSON to this file, after every step.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw it into this PNG, SVG or PDF file.")] = None,
    json: Json = False,
) -> None:
    """Time passes against the memory's limit, and methods against plain decoding and transformers."""
    from windfall.bench.methods import DrafterSpec, parse_methods
    from windfall.bench.runner import read_profiles
    from windfall.bench.speed import plot as speed_plot
    from windfall.bench.speed.speed import METHODS
    from windfall.bench.tasks import load_tasks
    from windfall.core.files import make_folder
    from windfall.core.options import split_settings
    from windfall.render import plots

    settings, methods = options.settings(model), parse_methods(options.methods or list(METHODS))
    drafter = DrafterSpec(model.drafter_name, split_settings(model.drafter_settings))
    drafter.check()
    if plot is not None:
        plots.check(plot)
    if out is not None:
        if out.is_dir():
            raise InputError(f"--out is the file to write, and '{out}' is a folder")
        make_folder(out.parent)
    labels = [(method.drafter or drafter).label for method in methods]
    profiles = None if options.profile is None else read_profiles(options.profile, labels)
    prompts = load_tasks(words(options.tasks, "--tasks"), options.limit)
    target, drafter = _load(model, drafter, options.widen)
    result = _begin(target, methods, drafter, prompts, settings, options)
    interrupted = False
    try:
        _measure(result, target, methods, drafter, prompts, settings, profiles, out, model.trust_remote_code)
    except KeyboardInterrupt:
        interrupted = True
        console.note("stopped; what is finished is kept")
    told = result.as_dict()
    _write(result, out)
    if plot is not None and result.methods:
        speed_plot.plot(told, plot)
    if json:
        console.print_json(told, indent=2)
    else:
        show(told)
    if interrupted:
        raise typer.Exit(ON_INTERRUPT)


def _load(model: ModelOptions, drafter: DrafterSpec, widen: str | None) -> tuple[Target, DrafterSpec]:
    from windfall.bench.speed.speed import widened
    from windfall.engine import loading

    how: dict[str, Any] = {"device": model.device, "dtype": model.dtype, "trust_remote_code": model.trust_remote_code}
    with loading_model():
        target = loading.as_target(model.target, **how)
        return (target, drafter) if widen is None else widened(target, drafter, widen)


def _begin(
    target: Target,
    methods: list[Method],
    drafter: DrafterSpec,
    prompts: list[Prompt],
    settings: Settings,
    options: SpeedOptions,
) -> Result:
    """A result that says where it comes from, and nothing yet."""
    from windfall.bench.paths import shorten
    from windfall.bench.provenance import describe
    from windfall.bench.speed.speed import Result

    about = describe({}, target, prompts, ["windfall", *sys.argv[1:]])
    about["drafters"] = {drafter.label: None}
    chosen = {
        "methods": [method.label for method in methods],
        "tasks": [shorten(name) for name in words(options.tasks, "--tasks")],
        "limit": options.limit,
        "drafter": drafter.label,
        "widen": options.widen,
        **dataclasses.asdict(settings),
    }
    return Result(shorten(target.name), about, chosen)


def _measure(
    result: Result,
    target: Target,
    methods: list[Method],
    drafter: DrafterSpec,
    prompts: list[Prompt],
    settings: Settings,
    profiles: dict[str, Any] | None,
    out: Path | None,
    trust_remote_code: bool,
) -> None:
    from windfall.bench.provenance import describe
    from windfall.bench.runner import attach_costs
    from windfall.bench.speed.speed import measure

    def attach(contenders: Any) -> dict[str, Any]:
        engines = {each.drafter.label: each.engine for each in contenders if each.drafter is not None}
        result.provenance["drafters"] = describe(engines, target, (), ())["drafters"]
        return attach_costs(contenders, profiles)

    with _bars() as tell:
        measure(
            result, target, methods, drafter, prompts, settings, attach, lambda found: _write(found, out), tell,
            trust_remote_code,
        )  # fmt: skip


def _write(result: Result, out: Path | None) -> None:
    if out is not None:
        import json

        from windfall.core.files import replace_text

        replace_text(out, json.dumps(result.as_dict(), indent=1) + "\n")


@contextlib.contextmanager
def _bars() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each part of the work, one after the other."""

    shown: dict[str, Callable[[int, int], None]] = {}
    with contextlib.ExitStack() as bars:

        def tell(part: str, done: int, total: int) -> None:
            if part not in shown:
                bars.close()
                shown[part] = bars.enter_context(console.counted(part))
            shown[part](done, total)

        yield tell


# ---- what is printed


def show(told: dict[str, Any]) -> None:
    """All tables of a result."""
    out, passes = console.stdout(), told["passes"]
    regimes = dict.fromkeys((row["temperature"], row["coupled"]) for row in told["methods"])
    for regime in regimes:
        rows = [row for row in told["methods"] if (row["temperature"], row["coupled"]) == regime]
        out.print(_methods(rows, f"{told['target']}, {_regime(*regime)}"))
    for name, by in (("rows", "rows"), ("lengths", "context")):
        if passes.get(name):
            out.print(_passes(passes[name], f"{told['target']}, verify pass by {by}"))
    if "skipped" in passes:
        out.print(Text(f"No passes were timed: {passes['skipped']}", style="yellow"))
    if launches := passes.get("launches"):
        out.print(Text("Launches: " + ", ".join(f"{name} {count:g}" for name, count in launches.items())))
    if told["memory"]:
        out.print(Text(f"Memory: {told['memory']['bandwidth'] / 1e9:.0f} GB/s, measured by a copy", style="dim"))


def _regime(temperature: float, coupled: bool | None) -> str:
    return f"temperature {temperature:g}" + ("" if coupled is None else ", coupled" if coupled else ", uncoupled")


def _methods(rows: list[dict[str, Any]], title: str) -> Figures:
    columns = ("method", "tokens/s", "tau", "cycle", "draft", "verify", "rest", "x none", "x HF", "memory", "same")
    made = Figures(columns, title, least=("rest", "draft", "verify", "cycle", "memory", "same", "x HF", "tau"))
    for row in rows:
        split, seen = row["split"] or {}, row["inside"] or {}
        rest = seen.get("rest_share", split.get("rest_share"))
        same = "" if row["texts"] is None else f"{row['same_texts']}/{row['texts']}"
        made.add(
            row["method"],
            _number(row["tokens_per_second"], "{:.0f}" if (row["tokens_per_second"] or 0) >= 100 else "{:.1f}"),
            _number(row["tau"], "{:.2f}"),
            _number(row["cycle_seconds"], "{:.2f}", 1000),
            _number(split.get("draft_ms"), "{:.2f}"),
            _number(split.get("verify_ms"), "{:.2f}"),
            _number(rest, "{:.0f}%", 100),
            _number(row["over_none"], "{:.2f}"),
            _number(row["over_hf"], "{:.1f}"),
            _number(row["memory_overhead"], "{:+.1f}%", 100),
            same,
        )
    return made


def _passes(rows: list[dict[str, Any]], title: str) -> Figures:
    columns = ("context", "rows", "ms", "with the walk", "x first", "MB read", "floor ms", "x floor")
    made = Figures(columns, title, least=("MB read", "x first", "floor ms", "with the walk", "x floor"))
    for row in rows:
        made.add(
            f"{row['length']}" + (" (beyond)" if row.get("beyond_context") else ""),
            str(row["rows"]),
            _number(row["seconds"], "{:.3f}", 1000),
            _number(row["verify_seconds"], "{:.3f}", 1000),
            _number(row["over_first"], "{:.2f}"),
            _number(row["bytes"], "{:.0f}", 1e-6),
            _number(row["floor_seconds"], "{:.3f}", 1000),
            _number(row["over_floor"], "{:.2f}"),
        )
    return made


def _number(value: float | None, shape: str, factor: float = 1) -> str:
    return "" if value is None else shape.format(factor * value)
