"""What the trainings of heads and of small models share: the job, its folder and its texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from windfall.checkpoints.bundled import fingerprint
from windfall.core.errors import InputError
from windfall.core.files import make_folder, replace_text
from windfall.model.target import Target
from windfall.train.objectives.base import Objective
from windfall.train.recipe import Recipe
from windfall.train.shards import HELD_OUT, TRAIN, TokenData
from windfall.train.trainer import CHECKPOINT, Event, Trainer

JOB_FILE = "job.json"


@dataclass(frozen=True)
class Job:
    """What to train, on which texts, into which folder."""

    data: Path
    out: Path
    settings: list[str] = field(default_factory=list)  # of the objective, NAME=VALUE
    resume: bool = False
    pause_after: float | None = None  # minutes

    def objective(self) -> Objective:
        raise NotImplementedError

    def description(self) -> dict[str, Any]:
        """What a resumed training must have in common with the first one; written to job.json."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse settings, folders and texts that cannot work, before a model is loaded."""
        self.objective()
        if not self.resume:
            if (self.out / CHECKPOINT).exists():
                raise InputError(
                    f"'{self.out}' holds a training already; continue it with --resume, or choose another --out"
                )
        elif not (self.out / CHECKPOINT).exists():
            raise InputError(f"'{self.out}' holds no checkpoint to resume from")
        else:
            _check_description(self.out, self.description())
        for split in (TRAIN, HELD_OUT):
            if not len(TokenData.open(self.data, split)):
                raise InputError(f"'{self.data}' has no {split} texts; make more with: windfall train data")

    def open_texts(self, target: Target) -> tuple[TokenData, TokenData]:
        """Training texts and held-out texts; those of another vocabulary are refused."""
        train, held_out = TokenData.open(self.data, TRAIN), TokenData.open(self.data, HELD_OUT)
        if train.vocab_size != target.vocab_size:
            raise InputError(
                f"'{self.data}' was written by {train.metadata['target'].get('name', 'another model')}, which has "
                f"{train.vocab_size} tokens; {target.name} has {target.vocab_size}"
            )
        return train, held_out


def run_job(
    job: Job,
    recipe: Recipe,
    target: Target,
    make_trainer: Callable[[TokenData, TokenData], Trainer],
    write: Callable[[Any], None],
) -> Iterator[Event]:
    """Train, or resume a training.

    `make_trainer` gets the training texts and the held-out texts, and `write` the best module so far.
    """
    train, held_out = job.open_texts(target)
    torch.manual_seed(recipe.seed)
    trainer = make_trainer(train, held_out)
    make_folder(job.out)
    description = {**job.description(), "target": fingerprint(target)}
    if job.resume:
        _check_description(job.out, description)
        trainer.resume()
    replace_text(job.out / JOB_FILE, json.dumps({**description, "recipe": recipe.__dict__}, indent=2) + "\n")
    yield from trainer.run(train, held_out, write, job.pause_after)


def _check_description(out: Path, description: dict[str, Any]) -> None:
    """Refuse to resume a training with other settings than it began with."""
    try:
        before = json.loads((out / JOB_FILE).read_text("utf-8"))
        kept = {key: before[key] for key in description if key in before}
    except (OSError, ValueError, TypeError):
        raise InputError(f"'{out / JOB_FILE}' is missing or damaged; train again into a new folder") from None
    for key, value in json.loads(json.dumps(description)).items():
        if kept.get(key, value) != value:
            raise InputError(f"'{out}' was trained with {key} {kept[key]}; resume with the same settings")
