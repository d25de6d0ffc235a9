"""`windfall train classifier`: train the network of the policies `disco`, `specdecpp` or `c2t` on recorded cycles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from windfall.bench.tasks import load_tasks
from windfall.cli.declare import json_option, option, tasks_option, words
from windfall.cli.options import ModelOptions
from windfall.cli.session import stop_on_interrupt
from windfall.core.files import make_folder
from windfall.core.wording import counted
from windfall.render import console
from windfall.train.classifiers.options import Fitting, Recording

if TYPE_CHECKING:
    from windfall.train.classifiers.training import Cycles


def classifier(
    model: ModelOptions,
    recording: Recording,
    fitting: Fitting,
    kind: str = option(..., "disco, specdecpp or c2t.", show_default=False),
    out: Path = option(..., "Folder for the classifier and the recorded cycles."),
    tasks: list[str] = tasks_option([]),
    limit: int = option(20, "Prompts per task.", min=1),
    resume: bool = option(False, "Use the cycles in --out, and record the missing ones."),
    json: bool = json_option(),
) -> None:
    """Train the classifier of a policy on cycles that the engine runs.

    The cycles are kept in --out. With --resume, an interrupted recording continues, and other kinds of classifiers are
    trained on the same cycles.
    """
    from windfall.policies.papers import classifiers
    from windfall.train.classifiers import training

    classifiers.inputs_of(kind, fitting.entropy)  # refuses an unknown kind
    loaded = load_tasks(words(tasks, "--tasks") or ["builtin"], limit)
    with stop_on_interrupt("stopped; the recorded cycles are kept, and the same command with --resume continues"):
        cycles = _record(model, recording, fitting.seed, loaded, out / training.CYCLES_FILE, resume)
        with console.progress(f"Training {kind}") as progress:
            made, figures = training.fit(kind, cycles.cycles, fitting, progress)
    command = _command(kind, tasks, limit, recording, fitting)
    classifiers.save(made, out, training.card(fitting, cycles, figures, command))
    if json:
        console.print_json({"kind": kind, "out": str(out), "cycles": len(cycles.cycles), **figures}, indent=2)
        return
    samples, held_out = (sum(figures[name].values()) for name in ("samples", "held_out"))
    print(
        f"{kind}: accuracy {figures['accuracy']:.3f}, AUC {figures['auc']:.3f} on "
        f"{counted(held_out, 'held-out sample')} (trained on {samples}, from {counted(len(cycles.cycles), 'cycle')})"
    )
    console.note(f"use it: --policy {kind} --set path={out}")


def _record(
    model: ModelOptions, recording: Recording, seed: int, loaded: list[Any], file: Path, resume: bool
) -> Cycles:
    """The cycles in a file, after recording those of the prompts that are missing."""
    from windfall.bench import tune
    from windfall.bench.runner import first_questions
    from windfall.train.classifiers import training

    make_folder(file.parent)
    engine = model.load("none")
    prompts = [case.ids for case in first_questions(loaded, engine, **recording.sampling(seed))]
    about = tune.describe(engine, model.drafter_spec(engine.target), prompts, recording.sampling(seed))
    del about["machine"]  # it changes the speed only
    about |= {"beam": {"depth": recording.depth, "k": recording.k, "nodes": recording.nodes}}
    about |= {"tasks": sorted({prompt.task for prompt in loaded}), "count": len(prompts)}
    cycles = training.Cycles.open(file, about, resume)
    with console.progress("Recording cycles") as progress:
        training.record(engine, prompts, recording, seed, cycles, file, progress)
    return cycles


def _command(kind: str, tasks: list[str], limit: int, *records: Any) -> str:
    """The command line, with file names instead of paths, and without the target and the drafter."""
    named = [f"--tasks {','.join(Path(name).name for name in words(tasks, '--tasks'))}"] if tasks else []
    changed = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for record in records
        for name, value in vars(record).items()
        if value != type(record).__dataclass_fields__[name].default
    ]
    return " ".join(["windfall train classifier", f"--kind {kind}", *named, f"--limit {limit}", *changed])
