"""`windfall train head`: texts that the target wrote → a draft head."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from windfall.cli.options import TargetOptions, takes_records
from windfall.cli.training import TrainingOptions, follow
from windfall.render import console
from windfall.train.recipe import Recipe


def _shape(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="A new head", **more)


@takes_records
def head(
    training: TrainingOptions,
    recipe: Recipe,
    model: TargetOptions,
    method: Annotated[str, typer.Option("--method", help="eagle, hass, talf, ttt, medusa, hydra or griffin.")] = "ttt",
    init: Annotated[str | None, typer.Option("--init", help="Start from this head, not from a new one.")] = None,
    light: Annotated[
        bool,
        typer.Option("--light", help="Write the head without the target's embedding and vocabulary, for windfall."),
    ] = False,
    vocabulary: Annotated[
        int | None,
        _shape("--vocabulary", "Draft only the tokens that the answers use most; none: all, or as --init.", min=1),
    ] = None,
    intermediate: Annotated[
        int | None, _shape("--intermediate", "Width of its feed-forward; none: the target's.", min=1)
    ] = None,
    layers: Annotated[int, _shape("--layers", "Its decoder layers.", min=1)] = 1,
    taps: Annotated[
        str | None, _shape("--taps", "Which of the target's hidden states it reads, e.g. 2,15,27.", metavar="A,B,C")
    ] = None,
) -> None:
    """Train a draft head on what the target itself wrote."""
    from windfall.train import heads

    shape = {"vocabulary": vocabulary, "intermediate": intermediate, "layers": layers, "taps": heads.parse_taps(taps)}
    job = heads.HeadJob(**vars(training), method=method, init=init, light=light, shape=shape)
    job.check()
    follow(heads.train_head(job, recipe, model.load()), training.out)
    console.note(f"the best head is in {training.out / heads.BEST}")
