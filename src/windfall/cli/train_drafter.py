"""`windfall train head` and `train lm`: train a draft head or a smaller model on texts that the target wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windfall.cli.declare import argument, option, pause_option
from windfall.cli.options import TargetOptions
from windfall.cli.session import stop_on_interrupt
from windfall.render import console
from windfall.train.recipe import Recipe

if TYPE_CHECKING:
    from windfall.train.trainer import Event


FIGURES = {
    "top1": "text's token first",
    "recall": "among candidates",
    "greedy_top1": "greedy texts: first",
    "greedy_recall": "among candidates",
    "tv": "distance",
}  # of block heads, by row, and their labels in the progress line


@dataclass
class TrainingOptions:
    """The options that `train head` and `train lm` share."""

    data: Path = argument(..., "Folder that `windfall train data` wrote.")
    out: Path = option(..., "Folder for the trained weights, the checkpoints and the log.")
    settings: list[str] = option([], "Set an option of the method. Repeatable.", "--set", metavar="NAME=VALUE")
    resume: bool = option(False, "Continue from the checkpoint in --out.")
    pause_after: float | None = pause_option()


@dataclass
class HeadShape:
    """The size of a new head."""

    PANEL = "A new head"

    vocabulary: int | None = option(None, "Draft only the N most frequent tokens. Default: all, or --init's.", min=1)
    intermediate: int | None = option(None, "Width of the feed-forward layer. Default: the target's.", min=1)
    layers: int | None = option(None, "Number of decoder layers. Default: 1, block heads 3 (2 to 5).", min=1)
    taps: str | None = option(None, "Layers whose hidden states the head reads, e.g. 2,15,27.", metavar="A,B,C")
    block: int | None = option(None, "Tokens that a block head predicts in a pass. Default: 8.", metavar="N")
    pair: str | None = option(
        None,
        "Pair scores of a block head: projected (default), path, selector, markov or none.",
        metavar="KIND",
    )
    rank: int | None = option(None, "Rank of the pair scores. Default: 64.", metavar="N")
    conv: int | None = option(None, "Rows that the convolutions of a block head mix. Default: 0, none.", metavar="N")
    bidirectional: bool = option(False, "The rows of a block see later rows too.")


@dataclass
class ModelShape:
    """The size of the smaller model."""

    PANEL = "The smaller model"

    layers: str | None = option(
        None, "Number of the target's first layers to keep, or a list (0,1,29). Default: one eighth.", metavar="N|A,B"
    )
    intermediate: int | None = option(None, "Keep this many feed-forward neurons, those of largest norm. Default: all.")
    own_embeddings: bool = option(False, "Train and store embeddings. Default: use the target's.")


def head(
    training: TrainingOptions,
    recipe: Recipe,
    model: TargetOptions,
    shape: HeadShape,
    method: str = option(
        "ttt",
        "Training objective: block, eagle, griffin, hass, hydra, medusa, talf or ttt.",
        "--method",
        "--objective",
    ),
    loss: str | None = option(
        None,
        "Loss: kl, tv, lk, match, coupled, or a weighted mixture such as coupled:0.5,lk:0.5. Default: kl.",
        metavar="NAME[:WEIGHT],...",
        show_default=False,
    ),
    init: str | None = option(None, "Start from this head instead of a new one."),
    tau_texts: int = option(32, "Held-out texts on which each validation measures tokens per pass; 0: none.", min=0),
    light: bool = option(False, "Leave out the target's embeddings and output layer; only windfall reads such heads."),
) -> None:
    """Train a draft head on texts that the target wrote."""
    from windfall.heads.files import BEST
    from windfall.train import heads

    sizes = {**vars(shape), "taps": heads.parse_taps(shape.taps)}
    how: dict[str, Any] = {"method": method, "loss": loss, "init": init, "light": light, "tau_texts": tau_texts}
    job = heads.HeadJob(**vars(training), **how, shape=sizes)
    job.check()
    follow(heads.train_head(job, recipe, model.load_target()), training.out)
    console.note(f"the best head is in {training.out / BEST}")


def lm(training: TrainingOptions, recipe: Recipe, model: TargetOptions, shape: ModelShape) -> None:
    """Distil the target into a model of some of its own layers, which drafts with the same tokenizer."""
    from windfall.heads.files import BEST
    from windfall.train import lm as training_lm

    job = training_lm.StudentJob(**vars(training), shape=training_lm.Shape(**vars(shape)))
    job.check()
    follow(training_lm.train_student(job, recipe, model.load_target()), training.out)
    best = training.out / BEST
    console.note(f"the best model is in {best}; try: windfall generate --drafter {best}")


# ---- following a training


def follow(events: Iterator[Event], folder: Path) -> None:
    """Show and log every event. After Ctrl-C the training can be resumed."""
    from windfall.train.trainer import CHECKPOINT

    if int(os.environ.get("RANK", "0")):  # only the first of several processes prints and logs
        for _ in events:
            pass
        return
    log: Log | None = None  # the folder exists from the first event on
    tau, share = "", 1.0  # of the last validation, and of the training that is done

    def stopped() -> str:
        kept = (folder / CHECKPOINT).exists()
        return "stopped; " + ("the finished steps are kept, and --resume continues" if kept else "nothing is kept")

    with stop_on_interrupt(stopped), console.live_progress("Training") as progress:
        for event in events:
            log = log or Log(folder)
            log.write(event)
            tau, share = _tau(event) or tau, event.progress
            description = f"step {event.step} · loss {event.loss:.3f} · right {_shares(event.hits)}"
            description += f" · {tau}" if tau else ""
            progress(event.progress, description, _held_out(event) if event.held_out else "")
    if share < 1:
        console.note(f"paused at {100 * share:.0f}% of the training; the same command with --resume continues")


def _held_out(event: Event) -> str:
    assert event.held_out is not None
    found, mark = event.held_out, " (best)" if event.best else ""
    speed = event.tokens / max(event.seconds, 1e-9)
    more = [f"{label} {_shares(found[name])}" for name, label in FIGURES.items() if name in found]
    parts = f"held-out loss {found['loss']:.3f}", f"right {_shares(found['hits'])}{mark}", *more, _tau(event)
    return f"step {event.step}: {', '.join(filter(None, parts))}, {speed:,.0f} tokens/s"


def _tau(event: Event) -> str:
    """Tokens per pass, if they were measured: `tau 4.52 greedy 3.10 coupled`."""
    found = (event.held_out or {}).get("tau")
    return "tau " + " ".join(f"{value:.2f} {kind}" for kind, value in found.items()) if found else ""


def _shares(hits: list[float]) -> str:
    return " ".join(f".{round(100 * hit):02d}" if hit < 0.995 else "1.0" for hit in hits)


class Log:
    """Writes events as JSON lines, and for TensorBoard where it is installed."""

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
            more = {name: found for name, found in event.held_out.items() if name in FIGURES}
            figures |= {f"held-out/{name}/{i}": value for name, found in more.items() for i, value in enumerate(found)}
            figures |= {f"held-out/tau/{kind}": value for kind, value in event.held_out.get("tau", {}).items()}
        for name, value in figures.items():
            self._board.add_scalar(name, value, event.step)
