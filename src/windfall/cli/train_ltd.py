"""`windfall train record` and `windfall train ltd`: recorded trees or a running engine → two policies."""

from __future__ import annotations

import json as jsons
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windfall.cli.options import Json, ModelOptions, takes_records, words
from windfall.cli.session import ON_INTERRUPT
from windfall.core.wording import counted
from windfall.render import console
from windfall.render.tables import Figures

if TYPE_CHECKING:
    from windfall.costs.curves import Costs
    from windfall.engine.engine import Engine
    from windfall.train.rl.config import Config
    from windfall.train.rl.learner import Event, Learner
    from windfall.train.rl.rollout import Source

SAVE_SECONDS = 60.0  # between saves of a recording


def _recording(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="Texts", **more)


@dataclass
class TextOptions:
    """Which texts cycles are taken from."""

    tasks: Annotated[
        list[str], _recording("--tasks", "JSONL files, builtin, or known datasets, separated by commas; repeatable.")
    ] = field(default_factory=list)
    limit: Annotated[int, _recording("--limit", "Prompts of each task.", min=3)] = 30
    max_new_tokens: Annotated[int, _recording("--max-new-tokens", "Length of a text.", min=1)] = 128
    temperature: Annotated[float, _recording("--temperature", "0 is greedy.", min=0)] = 0.0

    def prompts(self) -> list[tuple[str, str]]:
        """Id and first question of each."""
        from windfall.bench.tasks import load_tasks

        asked = load_tasks(words(self.tasks, "--tasks") or ["builtin"], self.limit)
        return [(f"{prompt.task}/{prompt.id}", prompt.turns[0]) for prompt in asked]

    def sampling(self) -> dict[str, Any]:
        return {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}


@takes_records
def record(
    model: ModelOptions,
    texts: TextOptions,
    out: Annotated[Path, typer.Option("--out", help="The file to write (.npz).", show_default=False)],
    depth: Annotated[int, typer.Option("--depth", help="Draft passes at every position.", min=1)] = 12,
    k: Annotated[int, typer.Option("--k", help="Beam width, and children of a node.", min=1)] = 10,
) -> None:
    """Record the widest beam at every position of some texts, for training policies without a model.

    Ctrl-C keeps the finished texts; the same command adds those that are missing.
    """
    write_recording(model.load("none"), _drafter(model), texts, out, depth, k)


def write_recording(engine: Engine, drafter: str, texts: TextOptions, out: Path, depth: int, k: int) -> None:
    """Record what the file does not hold yet."""
    from windfall.core.files import make_folder
    from windfall.train.rl import recording

    make_folder(out.parent)
    whole = recording.Recording.load(out) if out.exists() else None
    if whole:
        whole.check(recording.describe(engine, drafter, depth, k, texts.sampling()), out)
    done, due = set(whole.ids) if whole else set(), time.monotonic() + SAVE_SECONDS
    prompts = [(name, prompt) for name, prompt in texts.prompts() if name not in done]
    try:
        with console.progress("Recording") as progress:
            how = {"depth": depth, "k": k, "drafter": drafter, **texts.sampling()}
            for made in recording.record(engine, prompts, progress, **how):
                whole = made if whole is None else whole.joined(made)
                if time.monotonic() > due:
                    whole.save(out)
                    due = time.monotonic() + SAVE_SECONDS
    except KeyboardInterrupt:
        console.note("stopped; the same command adds the texts that are missing")
        raise typer.Exit(ON_INTERRUPT) from None
    finally:
        if whole is not None:
            whole.save(out)
            console.note(
                f"{out}: {counted(len(whole.ids), 'text')} with {counted(len(whole.arrays['sizes']), 'position')}"
            )


def _drafter(model: ModelOptions) -> str:
    """What the drafter is called in a recording."""
    from windfall.bench.methods import DrafterSpec
    from windfall.core.options import split_settings

    return DrafterSpec(model.drafter_name, split_settings(model.drafter_settings)).label


@takes_records
def ltd(
    model: ModelOptions,
    texts: TextOptions,
    out: Annotated[Path, typer.Option("--out", help="Folder for the policies, checkpoints, log and figures.")],
    backend: Annotated[
        str, typer.Option("--backend", help="replay: recorded trees under a cost profile; engine: everything for real.")
    ] = "replay",
    recorded: Annotated[
        Path | None,
        typer.Option("--recorded", help="What `train record` wrote; none: recorded first, into --out."),
    ] = None,
    costs: Annotated[
        str, typer.Option("--costs", help="JSON file of a cost profile (`profile --json`), or measured.")
    ] = "measured",
    recipe: Annotated[str, typer.Option("--recipe", help="lean, quick, paper or release; see docs/ltd.md.")] = "lean",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the training; repeatable.", metavar="NAME=VALUE")
    ] = None,
    show_settings: Annotated[bool, typer.Option("--settings", help="List the settings and end.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the training in --out.")] = False,
    json: Json = False,
) -> None:
    """Train the two policies of Learning to Draft: when to stop drafting, and how much to verify.

    What does best on validation texts is in --out from the first look on: `--policy ltd --set path=OUT`.
    """
    from windfall.core.errors import InputError
    from windfall.core.options import split_settings
    from windfall.train.rl.config import check_extra, make_config

    config = make_config(recipe, split_settings(settings or []))
    if show_settings:
        _list(config)
        return
    if backend not in ("replay", "engine"):
        raise InputError(f"--backend is replay or engine, not '{backend}'")
    check_extra()
    from windfall.train.rl.learner import CHECKPOINT, Learner  # needs the extra

    if resume and not out.exists():
        raise InputError(f"there is no folder '{out}' to resume; leave --resume out to begin a training in it")
    if backend == "engine":
        source = _engine(model, texts, config)
    else:
        source = _replays(model, texts, config, recorded, costs, out)
    learner = Learner(source, config, out)
    try:
        _follow(learner, resume)
    except KeyboardInterrupt:
        kept = f"the best so far is in {out}, and --resume goes on"
        console.note(f"stopped; {kept if (out / CHECKPOINT).exists() else 'nothing was learnt yet'}")
        raise typer.Exit(ON_INTERRUPT) from None
    _tell(learner, searched=backend == "replay", json=json)


def _engine(model: ModelOptions, texts: TextOptions, config: Config) -> Source:
    from windfall.train.rl.live import LiveSource

    prompts = [prompt for _, prompt in texts.prompts()]
    return LiveSource(model.load("none"), prompts, config, **texts.sampling())


def _replays(
    model: ModelOptions, texts: TextOptions, config: Config, recorded: Path | None, costs: str, out: Path
) -> Source:
    from windfall.train.rl.recording import Recording
    from windfall.train.rl.replay import ReplaySource, read_costs

    given: Costs | None = None if costs == "measured" else read_costs(Path(costs))
    file = out / "recording.npz" if recorded is None else recorded
    if given is None or recorded is None:
        engine = model.load("none")
        if recorded is None:
            write_recording(engine, _drafter(model), texts, file, config.max_depth, config.k)
        else:
            Recording.load(file).check({"target": engine.target.name, "drafter": _drafter(model)}, file)
        given = given or _measured(engine)
    return ReplaySource(Recording.load(file), given, config, f"'{file}'")


def _measured(engine: Engine) -> Costs:
    from windfall.engine import profiling

    with console.progress("Measuring") as progress:
        return profiling.load_or_measure(engine, quick=False, progress=progress).costs


def _list(config: Config) -> None:
    from windfall.core import options

    rows = options.describe(type(config))
    for row in rows:
        row["default"] = getattr(config, row["name"])
    told = {"name": "ltd", "summary": "as the recipe sets them", "default": False, "options": rows}
    console.catalogue("Settings", [told])


def _follow(learner: Learner, resume: bool) -> None:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console.stderr(), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("Training", total=1.0)

        def tell(event: Event) -> None:
            bar.update(task, completed=event.progress, description=f"{event.stage}, step {event.step}")
            if event.throughput is not None:
                mark = " (best of its stage)" if event.best else ""
                words = f"{event.throughput:,.0f} tokens/s, tau {event.tau:.2f}"
                bar.console.print(f"{event.stage}, step {event.step}: {words}{mark}")

        learner.run(resume, tell)


def _tell(learner: Learner, searched: bool, json: bool) -> None:
    """The figures, the table, and the same as JSON in the folder."""
    from windfall.core.files import replace_text
    from windfall.train.rl import evaluation
    from windfall.train.rl.learner import read_log

    found = evaluation.evaluate(learner, searched=searched)
    rows = evaluation.table(found)
    replace_text(learner.folder / "report.json", jsons.dumps(rows, indent=2) + "\n")
    shown: dict[str, Any] = {name: found[name] for name in ("iter0", "ltd") if name in found}
    events = list(read_log(learner.folder))
    try:
        evaluation.plot_curves(events, learner.folder / "curves.png", learner.default_throughput("validation"))
        evaluation.plot_decisions(shown, learner.folder / "decisions.png")
    except ValueError as error:
        console.note(str(error))
    if json:
        console.print_json(rows, indent=2)
        return
    table = Figures(("on test texts", "tokens/s", "against default", "tau", "passes", "nodes"))
    base = rows[0]["throughput"]
    for row in rows:
        speed = row["throughput"]
        figures_of = (
            f"{speed:,.0f}",
            f"{speed / base:.3f}",
            *(f"{row[key]:.2f}" for key in ("tau", "passes", "nodes")),
        )
        table.add(row["name"], *figures_of)
    console.stdout().print(table)
    console.note(f"use it: --policy ltd --set path={learner.folder}")
