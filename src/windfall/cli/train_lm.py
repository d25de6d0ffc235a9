"""`windfall train lm`: texts that the target wrote → a smaller language model that drafts for it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from windfall.cli.options import TargetOptions, takes_records
from windfall.cli.training import TrainingOptions, follow
from windfall.render import console
from windfall.train.recipe import Recipe


def _shape(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="The smaller model", **more)


@takes_records
def lm(
    training: TrainingOptions,
    recipe: Recipe,
    model: TargetOptions,
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
    from windfall.heads.files import BEST
    from windfall.train import lm as students

    shape = students.Shape(layers, intermediate, own_embeddings)
    job = students.StudentJob(**vars(training), shape=shape)
    job.check()
    follow(students.train_student(job, recipe, model.load()), training.out)
    best = training.out / BEST
    console.note(f"the best model is in {best}; try: windfall generate --drafter {best}")
