"""`windfall train head`: texts that the target wrote → a draft head."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from windfall import console
from windfall.cli.options import TargetOptions, takes_records
from windfall.cli.training import follow
from windfall.train.recipe import Recipe


def _shape(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="A new head", **more)


@takes_records
def head(
    data: Annotated[Path, typer.Argument(help="A folder that `windfall train data` made.")],
    out: Annotated[Path, typer.Option("--out", help="Where the head, its checkpoints and its log go.")],
    recipe: Recipe,
    model: TargetOptions,
    method: Annotated[str, typer.Option("--method", help="eagle, hass, talf, ttt, medusa, hydra or griffin.")] = "ttt",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="An option of the method; repeatable.", metavar="NAME=VALUE")
    ] = None,
    init: Annotated[str | None, typer.Option("--init", help="Start from this head, not from a new one.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out.")] = False,
    light: Annotated[
        bool,
        typer.Option("--light", help="Write the head without the target's embedding and vocabulary, for windfall."),
    ] = False,
    vocabulary: Annotated[
        int | None, _shape("--vocabulary", "Draft only the tokens that the answers use most; none: all of them.", min=1)
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
    from windfall.train import runs

    job = runs.HeadJob(
        data=data, out=out, method=method, settings=settings or [], init=init, resume=resume, light=light,
        shape={"vocabulary": vocabulary, "intermediate": intermediate, "layers": layers, "taps": runs.parse_taps(taps)},
    )  # fmt: skip
    job.check()
    target = model.load()
    follow(runs.train_head(job, recipe, target), out)
    console.note(f"the best head is in {out / runs.BEST}")
