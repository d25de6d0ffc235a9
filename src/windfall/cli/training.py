"""A training as a person follows it: a live line, a log that stays, TensorBoard files where it is installed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windfall.render import console

if TYPE_CHECKING:
    from windfall.train.trainer import Event


@dataclass
class TrainingOptions:
    """What every training is told."""

    data: Annotated[Path, typer.Argument(help="A folder that `windfall train data` made.")]
    out: Annotated[Path, typer.Option("--out", help="Where what is trained, its checkpoints and its log go.")]
    settings: Annotated[
        list[str], typer.Option("--set", help="An option of the method; repeatable.", metavar="NAME=VALUE")
    ] = field(default_factory=list)
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out.")] = False


def follow(events: Iterator[Event], folder: Path) -> None:
    """Show and log every event. Ctrl-C stops; the last checkpoint stays, to be resumed from."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from windfall.train.trainer import CHECKPOINT

    if int(os.environ.get("RANK", "0")):  # of several processes the first one speaks
        for _ in events:
            pass
        return
    log: Log | None = None  # the folder is there with the first event
    live = sys.stderr.isatty()
    columns = (TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console.stderr(), transient=True, disable=not live) as bar:
        task = bar.add_task("Training", total=1.0)
        try:
            for event in events:
                log = log or Log(folder)
                log.write(event)
                bar.update(task, completed=event.progress, description=_words(event))
                if event.held_out:
                    bar.console.print(_held_out(event))
        except KeyboardInterrupt:
            kept = (folder / CHECKPOINT).exists()
            console.note("stopped; " + ("--resume goes on from the last checkpoint" if kept else "nothing is kept yet"))
            raise


def _words(event: Event) -> str:
    return f"step {event.step} · loss {event.loss:.3f} · right {_shares(event.hits)}"


def _held_out(event: Event) -> str:
    assert event.held_out is not None
    found, mark = event.held_out, " (best)" if event.best else ""
    speed = event.tokens / max(event.seconds, 1e-9)
    return (
        f"step {event.step}: held-out loss {found['loss']:.3f}, right {_shares(found['hits'])}{mark}, "
        f"{speed:,.0f} tokens/s"
    )


def _shares(hits: list[float]) -> str:
    return " ".join(f".{round(100 * hit):02d}" if hit < 0.995 else "1.0" for hit in hits)


class Log:
    """Events as JSON lines, and for TensorBoard where it is installed."""

    def __init__(self, folder: Path):
        self._path = folder / "log.jsonl"
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._board = None
        else:
            self._board = SummaryWriter(str(folder / "tensorboard"))

    def write(self, event: Event) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(event.__dict__) + "\n")
        if self._board is None:
            return
        figures = {"loss": event.loss, "rate": event.rate}
        figures |= {f"hits/{i}": hit for i, hit in enumerate(event.hits)}
        if event.held_out:
            figures |= {"held-out/loss": event.held_out["loss"]}
            figures |= {f"held-out/hits/{i}": hit for i, hit in enumerate(event.held_out["hits"])}
        for name, value in figures.items():
            self._board.add_scalar(name, value, event.step)
