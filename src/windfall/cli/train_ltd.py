"""`windfall train record` and `train ltd`: train the policies of Learning to Draft (LTD) by reinforcement learning."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windfall.bench.tasks import load_tasks
from windfall.cli.declare import json_option, option, tasks_option, words
from windfall.cli.options import ModelOptions
from windfall.cli.session import stop_on_interrupt, write_json
from windfall.core.errors import InputError
from windfall.core.files import make_folder
from windfall.core.options import describe, split_settings
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


@dataclass
class TextOptions:
    """The texts whose cycles are used."""

    PANEL = "Texts"

    tasks: list[str] = tasks_option([])
    limit: int = option(30, "Prompts per task.", min=3)
    max_new_tokens: int = option(128, "Maximum length of a text.", min=1)
    temperature: float = option(0.0, "Sampling temperature; 0 is greedy.", min=0)

    def prompts(self) -> list[tuple[str, str]]:
        """Id and first question of each prompt."""
        loaded = load_tasks(words(self.tasks, "--tasks") or ["builtin"], self.limit)
        return [(f"{prompt.task}/{prompt.id}", prompt.turns[0]) for prompt in loaded]

    def sampling(self) -> dict[str, Any]:
        return {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}


def record(
    model: ModelOptions,
    texts: TextOptions,
    out: Path = option(..., "The .npz file to write.", show_default=False),
    depth: int = option(12, "Draft passes at every position.", min=1),
    k: int = option(10, "Beam width, and number of children of a node.", min=1),
) -> None:
    """Record the widest beam at every position of some texts, to train policies without a model.

    Ctrl-C keeps the finished texts; the same command adds the missing ones.
    """
    engine = model.load("none")
    write_recording(engine, model.drafter_spec(engine.target).label, texts, out, depth, k)


def write_recording(engine: Engine, drafter: str, texts: TextOptions, out: Path, depth: int, k: int) -> None:
    """Record the texts that are missing in the file."""
    from windfall.train.rl import recording

    make_folder(out.parent)
    whole = recording.Recording.load(out) if out.exists() else None
    if whole:
        whole.check(recording.describe(engine, drafter, depth, k, texts.sampling()), out)
    done, due = set(whole.ids) if whole else set(), time.monotonic() + SAVE_SECONDS
    prompts = [(name, prompt) for name, prompt in texts.prompts() if name not in done]
    try:
        with (
            stop_on_interrupt("stopped; the same command adds the texts that are missing"),
            console.progress("Recording") as progress,
        ):
            how = {"depth": depth, "k": k, "drafter": drafter, **texts.sampling()}
            for made in recording.record(engine, prompts, progress, **how):
                whole = made if whole is None else whole.joined(made)
                if time.monotonic() > due:
                    whole.save(out)
                    due = time.monotonic() + SAVE_SECONDS
    finally:
        if whole is not None:
            whole.save(out)
            positions = counted(len(whole.arrays["sizes"]), "position")
            console.note(f"{out}: {counted(len(whole.ids), 'text')} with {positions}")


def ltd(
    model: ModelOptions,
    texts: TextOptions,
    out: Path = option(..., "Folder for the policies, checkpoints, log and figures."),
    backend: str = option("replay", "replay: recorded trees with a cost profile; engine: the running engine."),
    recorded: Path | None = option(None, "File that `train record` wrote. Default: record first, into --out."),
    costs: str = option("measured", "JSON file of a cost profile (`windfall profile --json`), or the word measured."),
    recipe: str = option("lean", "lean, quick, paper or release; see docs/ltd.md."),
    settings: list[str] = option([], "Set an option of the training. Repeatable.", "--set", metavar="NAME=VALUE"),
    show_settings: bool = option(False, "List the options of the training and exit.", "--settings"),
    resume: bool = option(False, "Continue the training in --out."),
    json: bool = json_option(),
) -> None:
    """Train the two policies of Learning to Draft: when to stop drafting, and how many nodes to verify.

    From the first validation on, --out holds the best policies so far: `--policy ltd --set path=OUT`.
    """
    from windfall.train.rl.config import check_extra, make_config

    config = make_config(recipe, split_settings(settings))
    if show_settings:
        _list(config)
        return
    if backend not in ("replay", "engine"):
        raise InputError(f"--backend is replay or engine, not '{backend}'")
    check_extra()
    from windfall.train.rl.learner import CHECKPOINT  # needs the extra

    if resume and not out.exists():
        raise InputError(f"there is no folder '{out}' to resume; leave --resume out to begin a training in it")
    if backend == "engine":
        source = _engine_source(model, texts, config)
    else:
        source = _replay_source(model, texts, config, recorded, costs, out)
    kept = f"the best policies so far are in {out}, and --resume continues"
    with stop_on_interrupt(lambda: f"stopped; {kept if (out / CHECKPOINT).exists() else 'nothing is kept'}"):
        learner = _train(source, config, out, resume)
    _report(learner, searched=backend == "replay", json=json)


def _engine_source(model: ModelOptions, texts: TextOptions, config: Config) -> Source:
    from windfall.train.rl.live import LiveSource

    prompts = [prompt for _, prompt in texts.prompts()]
    return LiveSource(model.load("none"), prompts, config, **texts.sampling())


def _replay_source(
    model: ModelOptions, texts: TextOptions, config: Config, recorded: Path | None, costs: str, out: Path
) -> Source:
    from windfall.engine import profiling
    from windfall.train.rl.recording import Recording
    from windfall.train.rl.replay import ReplaySource, read_costs

    given: Costs | None = None if costs == "measured" else read_costs(Path(costs))
    file = out / "recording.npz" if recorded is None else recorded
    if given is None or recorded is None:
        engine = model.load("none")
        drafter = model.drafter_spec(engine.target).label
        if recorded is None:
            write_recording(engine, drafter, texts, file, config.max_depth, config.k)
        else:
            Recording.load(file).check({"target": engine.target.name, "drafter": drafter}, file)
        if given is None:
            with console.progress("Measuring") as progress:
                given = profiling.load_or_measure(engine, quick=False, progress=progress).costs
    return ReplaySource(Recording.load(file), given, config, f"'{file}'")


def _list(config: Config) -> None:
    rows = describe(type(config))
    for row in rows:
        row["default"] = getattr(config, row["name"])
    entry = {"name": "ltd", "summary": "with the defaults of the recipe", "default": False, "options": rows}
    console.print_catalogue("Settings", [entry])


def _train(source: Source, config: Config, out: Path, resume: bool) -> Learner:
    """Train with a progress bar."""
    from windfall.train.rl.learner import Learner

    with console.live_progress("Training") as progress:

        def show(event: Event) -> None:
            step, line = f"{event.stage}, step {event.step}", ""
            if event.throughput is not None:
                mark = " (best of its stage)" if event.best else ""
                line = f"{step}: {event.throughput:,.0f} tokens/s, tau {event.tau:.2f}{mark}"
            progress(event.progress, step, line)

        learner = Learner(source, config, out)
        learner.run(resume, show)
    return learner


def _report(learner: Learner, searched: bool, json: bool) -> None:
    """Draw the figures, write report.json, and print the table."""
    from windfall.train.rl import evaluation
    from windfall.train.rl.learner import read_log

    found = evaluation.evaluate(learner, searched=searched)
    rows = evaluation.table(found)
    write_json(learner.folder / "report.json", rows)
    drawn: dict[str, Any] = {name: found[name] for name in ("iter0", "ltd") if name in found}
    events = list(read_log(learner.folder))
    try:
        evaluation.plot_curves(events, learner.folder / "curves.png", learner.default_throughput("validation"))
        evaluation.plot_decisions(drawn, learner.folder / "decisions.png")
    except ValueError as error:
        console.note(str(error))
    if json:
        console.print_json(rows, indent=2)
        return
    table = Figures(("on test texts", "tokens/s", "against default", "tau", "passes", "nodes"))
    base = rows[0]["throughput"]
    for row in rows:
        means = [f"{row[key]:.2f}" for key in ("tau", "passes", "nodes")]
        table.add(row["name"], f"{row['throughput']:,.0f}", f"{row['throughput'] / base:.3f}", *means)
    console.stdout().print(table)
    console.note(f"use it: --policy ltd --set path={learner.folder}")
