"""`windfall train lm`: texts that the target wrote → a smaller language model that drafts for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from windfall import console
from windfall.cli.options import TargetOptions, takes_records
from windfall.cli.training import follow
from windfall.train.recipe import Recipe


def _shape(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="The smaller model", **more)


@takes_records
def lm(
    data: Annotated[Path, typer.Argument(help="A folder that `windfall train data` made.")],
    out: Annotated[Path, typer.Option("--out", help="Where the model, its checkpoints and its log go.")],
    recipe: Recipe,
    model: TargetOptions,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="An option of the distillation; repeatable.", metavar="NAME=VALUE")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out.")] = False,
    layers: Annotated[
        str | None,
        _shape(
            "--layers", "How many of the target's first layers, or which (0,1,29); none: an eighth.", metavar="N|A,B"
        ),
    ] = None,
    intermediate: Annotated[
        int | None, _shape("--intermediate", "Keep so many feed-forward neurons, those of largest norm; none: all.")
    ] = None,
    own_embeddings: Annotated[
        bool, _shape("--own-embeddings", "Train and store embeddings; otherwise it borrows the target's.")
    ] = False,
) -> None:
    """Distil the target into some of its own layers: an independent drafter with the same tokenizer."""
    from windfall.train import students
    from windfall.train.runs import BEST

    shape = students.Shape(layers, intermediate, own_embeddings)
    job = students.StudentJob(data, out, shape, settings or [], resume)
    job.check()
    target = model.load()
    follow(students.train_student(job, recipe, target), out)
    console.note(f"the best model is in {out / BEST}; try: windfall generate --drafter {out / BEST}")
