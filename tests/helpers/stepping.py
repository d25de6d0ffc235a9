"""Single steps of trainings of tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from windfall.heads.layers import Rotary
from windfall.model.target import Target
from windfall.train.batch import Batch
from windfall.train.heads import HeadJob, initial_head
from windfall.train.lm import Shape, StudentJob, new_student
from windfall.train.recipe import Recipe
from windfall.train.shards import TokenData
from windfall.train.teacher import Teacher
from windfall.train.trainer import Means, Trainer


class Stepper:
    """A training that has made its first step, in which buffers are made and kernels are compiled."""

    def __init__(self, trainer: Trainer, data: TokenData):
        self.trainer = trainer
        trainer.step = 60  # some losses change in the first part of a training
        self.batch: Batch = next(trainer._batches(data))
        self.step()

    def step(self) -> Means:
        """One more step, on the same texts; its figures."""
        figures = Means()
        self.trainer._train_step(iter([self.batch]), 1e-3, figures)
        return figures

    def tensors(self) -> list[Tensor]:
        """Those that stay on the device from step to step."""
        modules = [*self.trainer.head.modules(), *self.trainer.teacher.model.modules()]
        modules += [made for part in modules if isinstance(part, Rotary) for made in part._made.values()]
        states = [dict(part.state) for part in self.trainer.optimizers.parts]
        found = tree_leaves([*map(vars, modules), *states])
        return [own for own in found if isinstance(own, Tensor)]


def head_training(texts: Path, out: Path, target: Target, method: str, recipe: Any = None, **changes: Any) -> Stepper:
    """`changes` are those of the job."""
    job, data = HeadJob(texts, out, method=method, **changes), TokenData.open(texts)
    torch.manual_seed(0)
    head = initial_head(job, job.objective(), target, data)
    given = Recipe(**{"steps": 100, "batch_tokens": 400, **(recipe or {})})
    return Stepper(Trainer(head, job.objective(), Teacher(target.model, head.config.taps), given, out), data)


def student_training(texts: Path, out: Path, target: Target, **changes: Any) -> Stepper:
    job = StudentJob(texts, out, shape=Shape("1"), **changes)
    given = Recipe(steps=100, batch_tokens=400)
    trainer = Trainer(new_student(target, job.shape), job.objective(), Teacher(target.model, ()), given, out)
    return Stepper(trainer, TokenData.open(texts))
