"""`windfall train classifier`: recorded cycles → the small network behind `disco`, `specdecpp` or `c2t`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windfall.cli.options import Json, ModelOptions, takes_records, words
from windfall.cli.session import ON_INTERRUPT
from windfall.core.wording import counted
from windfall.render import console
from windfall.train.classifiers.options import Fitting, Recording

if TYPE_CHECKING:
    from windfall.train.classifiers.training import Cycles, Figures


@takes_records
def classifier(
    model: ModelOptions,
    recording: Recording,
    fitting: Fitting,
    kind: Annotated[str, typer.Option("--kind", help="disco, specdecpp or c2t.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="Folder for the classifier and the recorded cycles.")],
    tasks: Annotated[
        list[str] | None,
        typer.Option("--tasks", help="JSONL files, builtin, or known datasets, separated by commas; repeatable."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", help="Prompts of each task.", min=1)] = 20,
    resume: Annotated[bool, typer.Option("--resume", help="Use the cycles in --out, and record what is left.")] = False,
    json: Json = False,
) -> None:
    """Train the classifier of a policy on cycles that the real engine runs.

    The cycles stay in --out: with --resume an interrupted recording goes on, and other kinds learn from the same ones.
    """
    from windfall.bench.tasks import load_tasks
    from windfall.policies.papers import classifiers
    from windfall.train.classifiers import training

    classifiers.inputs_of(kind, fitting.entropy)  # refuses what there is not
    asked = load_tasks(words(tasks or [], "--tasks") or ["builtin"], limit)
    try:
        cycles = _record(model, recording, fitting.seed, asked, out / training.CYCLES_FILE, resume)
        with console.progress(f"Training {kind}") as progress:
            made, figures = training.fit(kind, cycles.cycles, fitting, progress)
    except KeyboardInterrupt:
        console.note("stopped; the cycles recorded so far are kept, and the same command with --resume goes on")
        raise typer.Exit(ON_INTERRUPT) from None
    classifiers.save(
        made, out, training.card(fitting, cycles, figures, _command(kind, tasks, limit, recording, fitting))
    )
    _tell(kind, out, figures, cycles, json)


def _record(model: ModelOptions, recording: Recording, seed: int, asked: list[Any], file: Path, resume: bool) -> Cycles:
    """The cycles in a file, and those of the prompts that it lacks."""
    from windfall.bench import tune
    from windfall.bench.methods import DrafterSpec
    from windfall.core.files import make_folder
    from windfall.core.options import split_settings
    from windfall.train.classifiers import training

    make_folder(file.parent)
    engine = model.load("none")
    prompts = tune.first_questions(engine, asked, recording.max_new_tokens)
    drafter = DrafterSpec(model.drafter_name, split_settings(model.drafter_settings))
    about = tune.describe(engine, drafter, prompts, recording.sampling(seed))
    del about["machine"]  # only its speed would differ
    about |= {"beam": {"depth": recording.depth, "k": recording.k, "nodes": recording.nodes}}
    about |= {"tasks": sorted({prompt.task for prompt in asked}), "count": len(prompts)}
    cycles = training.Cycles.open(file, about, resume)
    with console.progress("Recording cycles") as progress:
        training.record(engine, prompts, recording, seed, cycles, file, progress)
    return cycles


def _command(kind: str, tasks: list[str] | None, limit: int, *records: Any) -> str:
    """What was typed, without the folders of paths; target and drafter are told apart from it."""
    named = [f"--tasks {','.join(Path(name).name for name in words(tasks, '--tasks'))}"] if tasks else []
    changed = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for record in records
        for name, value in vars(record).items()
        if value != type(record).__dataclass_fields__[name].default
    ]
    return " ".join(["windfall train classifier", f"--kind {kind}", *named, f"--limit {limit}", *changed])


def _tell(kind: str, out: Path, figures: Figures, cycles: Cycles, json: bool) -> None:
    if json:
        console.print_json({"kind": kind, "out": str(out), "cycles": len(cycles.cycles), **figures}, indent=2)
        return
    learnt, judged = sum(figures["samples"].values()), sum(figures["held_out"].values())
    print(
        f"{kind}: accuracy {figures['accuracy']:.3f}, AUC {figures['auc']:.3f} on "
        f"{counted(judged, 'held-out sample')} ({learnt} learnt from, {counted(len(cycles.cycles), 'cycle')})"
    )
    console.note(f"use it: --policy {kind} --set path={out}")
