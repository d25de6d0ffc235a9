"""Train a draft head, from training texts to files; OUT/best holds the head with the lowest held-out loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from windfall.core.errors import InputError
from windfall.core.options import split_settings
from windfall.heads import formats
from windfall.heads.files import BEST as BEST
from windfall.heads.fitting import with_vocabulary
from windfall.heads.loading import find_head
from windfall.model.target import Target
from windfall.train.jobs import Job, run_job
from windfall.train.objectives import objective
from windfall.train.objectives.base import Objective
from windfall.train.recipe import Recipe
from windfall.train.shards import TokenData, token_counts
from windfall.train.teacher import Teacher
from windfall.train.trainer import Event, Trainer, drafted_tokens
from windfall.train.tree_tau import TreeTau, choose_excerpts


@dataclass(frozen=True)
class HeadJob(Job):
    """The training of a new head, or of the head `init`."""

    method: str = "ttt"
    loss: str | None = None  # of the method; None: its own
    init: str | None = None
    light: bool = False  # write the head without the target's embedding and vocabulary
    shape: dict[str, Any] = field(default_factory=dict)  # of a new head
    tau_texts: int = 32  # held-out texts on which a validation measures tokens per pass; 0: none

    def check(self) -> None:
        given = [name for name, value in self.shape.items() if value not in (None, False) and name != "vocabulary"]
        if self.init is not None and given:  # only its vocabulary may be changed
            raise InputError(f"the head that --init names has its own shape; leave out --{given[0]}")
        self.objective().check_shape(self.shape)
        super().check()

    def objective(self) -> Objective:
        settings = split_settings(self.settings)
        if self.loss is not None and "loss" in settings:
            raise InputError("the loss is given twice; use --loss or --set loss=..., not both")
        return objective(self.method, **settings, **({} if self.loss is None else {"loss": self.loss}))

    def description(self) -> dict[str, Any]:
        told = {"method": self.method, "settings": self.settings, "init": self.init, "shape": self.shape}
        return {**told, "loss": self.loss}


def train_head(job: HeadJob, recipe: Recipe, target: Target) -> Iterator[Event]:
    """Train and yield events."""
    method = job.objective()

    def make_trainer(texts: TokenData, held_out: TokenData) -> Trainer:
        head = initial_head(job, method, target, texts)
        excerpts = choose_excerpts(held_out, job.tau_texts, recipe.max_length) if job.tau_texts else []
        measure = TreeTau(target, method.drafter, excerpts).measure if excerpts else None
        return Trainer(head, method, Teacher(target.model, head.config.taps), recipe, job.out, measure)

    def write(head: Any) -> None:
        formats.write(head, job.out / BEST, light=job.light, target=target)

    yield from run_job(job, recipe, target, make_trainer, write)


def initial_head(job: HeadJob, method: Any, target: Target, texts: TokenData) -> Any:
    """The head that `--init` names, or a new one. A resumed one keeps its vocabulary, even if there are more texts."""
    size = job.shape.get("vocabulary")
    tokens = None
    if size is not None:
        kept = drafted_tokens(job.out) if job.resume else None
        tokens = most_frequent(token_counts(texts), int(size), target) if kept is None else kept
    if job.init is None:
        return method.new_head(target, {**job.shape, "vocabulary": tokens})
    head = find_head(job.init, target, method.drafter)
    head = head if tokens is None else with_vocabulary(head, target, tokens)
    _freeze_copies(head, target)
    return head.float().train()


def _freeze_copies(head: Any, target: Target) -> None:
    """Freeze the head's embedding and vocabulary where they are copies of the target's."""
    shared = {"embed_tokens": target.model.get_input_embeddings(), "lm_head": target.model.get_output_embeddings()}
    for name, own in shared.items():
        copy = getattr(head, name)
        rows = own.weight if name == "embed_tokens" or head.draft_tokens is None else own.weight[head.draft_tokens]
        if copy is not None and torch.equal(copy.weight.bfloat16(), rows.bfloat16()):
            copy.requires_grad_(False)


def most_frequent(counts: torch.Tensor, size: int, target: Target) -> torch.Tensor:
    """The tokens that the target generates most often, its stop tokens included; ascending."""
    if not 1 <= size <= target.vocab_size:
        raise InputError(f"--vocabulary must be between 1 and {target.vocab_size}, not {size}")
    counts = counts[: target.vocab_size].clone().float()
    counts[list(target.eos)] = float("inf")
    return counts.topk(size).indices.sort().values


def parse_taps(text: str | None) -> tuple[int, ...] | None:
    """'2,15,27' → (2, 15, 27)."""
    if text is None:
        return None
    try:
        taps = tuple(int(part) for part in text.split(","))
    except ValueError:
        taps = ()
    if not taps or min(taps) < 0:
        raise InputError(f"write --taps as layer numbers, for example 2,15,27, not '{text}'")
    return taps
