"""A training from beginning to end: texts, target, head, checkpoints, the best one kept in a public format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from windfall.checkpoints.bundled import fingerprint
from windfall.core.errors import InputError
from windfall.core.files import make_folder, replace_text
from windfall.core.options import split_settings
from windfall.heads import formats
from windfall.heads.files import BEST as BEST
from windfall.heads.fitting import with_vocabulary
from windfall.heads.loading import find_head
from windfall.model.target import Target
from windfall.train.objectives import objective
from windfall.train.objectives.base import Objective
from windfall.train.recipe import Recipe
from windfall.train.shards import TokenData, token_counts
from windfall.train.teacher import Teacher
from windfall.train.trainer import CHECKPOINT, Event, Trainer

JOB = "job.json"


@dataclass(frozen=True)
class HeadJob:
    """What to train, on what, into which folder."""

    data: Path
    out: Path
    method: str = "ttt"
    settings: list[str] = field(default_factory=list)
    init: str | None = None
    resume: bool = False
    light: bool = False  # leave out of the files what is the target's
    shape: dict[str, Any] = field(default_factory=dict)  # of a new head

    def check(self) -> None:
        """Refuse what cannot work before anything is loaded."""
        self.objective()
        given = [name for name, value in self.shape.items() if value is not None and (name, value) != ("layers", 1)]
        given = [name for name in given if name != "vocabulary"]  # a head can learn to draft other tokens
        if self.init is not None and given:
            raise InputError(f"the head that --init names has its own shape; leave out --{given[0]}")
        check_folder(self.out, self.words() if self.resume else None)
        check_texts(self.data)

    def objective(self) -> Objective:
        return objective(self.method, **split_settings(self.settings))

    def words(self) -> dict[str, Any]:
        return {"method": self.method, "settings": self.settings, "init": self.init, "shape": self.shape}


def check_folder(out: Path, resumed: dict[str, Any] | None) -> None:
    """A new training wants a folder without one, a resumed one its checkpoint, made with the same words."""
    if resumed is None:
        if (out / CHECKPOINT).exists():
            raise InputError(f"{out} holds a training already; go on with --resume, or choose another --out")
        return
    if not (out / CHECKPOINT).exists():
        raise InputError(f"{out} holds no checkpoint to resume from")
    check_words(out, resumed)


def check_words(out: Path, words: dict[str, Any]) -> None:
    """Refuse to go on with something else than what was begun."""
    try:
        before = json.loads((out / JOB).read_text("utf-8"))
        kept = {key: before[key] for key in words if key in before}
    except (OSError, ValueError, TypeError):
        raise InputError(f"{out / JOB} is missing or damaged; train again into a new folder") from None
    for key, value in json.loads(json.dumps(words)).items():
        if kept.get(key, value) != value:
            raise InputError(f"{out} was trained with {key} {kept[key]}; resume with the same settings")


def check_texts(data: Path) -> None:
    """Both kinds of texts, before anything is loaded."""
    for split in ("train", "held-out"):
        if not len(TokenData.open(data, split)):
            raise InputError(f"'{data}' has no {split} texts; make more with: windfall train data")


def open_texts(data: Path, target: Target) -> tuple[TokenData, TokenData]:
    """Texts to learn from and held-out ones; those of another vocabulary are refused."""
    train, held_out = TokenData.open(data, "train"), TokenData.open(data, "held-out")
    if train.vocab_size != target.vocab_size:
        raise InputError(
            f"'{data}' was written by {train.about['target'].get('name', 'another model')}, which has "
            f"{train.vocab_size} tokens; {target.name} has {target.vocab_size}"
        )
    return train, held_out


def begin(trainer: Trainer, out: Path, words: dict[str, Any], target: Target, resume: bool) -> None:
    """Write down what is trained, for which target; or take up again what was."""
    words = {**words, "target": fingerprint(target)}
    if resume:
        check_words(out, words)
        trainer.resume()
    replace_text(out / JOB, json.dumps({**words, "recipe": trainer.recipe.__dict__}, indent=2) + "\n")


def train_head(job: HeadJob, recipe: Recipe, target: Target) -> Iterator[Event]:
    """Yields as it learns; out/best always holds the head that does best on held-out texts."""
    train, held_out = open_texts(job.data, target)
    torch.manual_seed(recipe.seed)
    method = job.objective()
    head = starting_head(job, method, target, train)
    make_folder(job.out)
    trainer = Trainer(head, method, Teacher(target.model, head.config.taps), recipe, job.out)
    begin(trainer, job.out, job.words(), target, job.resume)

    def keep(best: Any) -> None:
        formats.write(best, job.out / BEST, light=job.light, target=target)

    yield from trainer.run(train, held_out, keep)


def starting_head(job: HeadJob, method: Any, target: Target, train: TokenData) -> Any:
    """A given head to go on with, or a new one of the asked shape."""
    wanted = job.shape.get("vocabulary")
    tokens = None if wanted is None else commonest(token_counts(train), int(wanted), target)
    if job.init is None:
        return method.new_head(target, {**job.shape, "vocabulary": tokens})
    head = find_head(job.init, target, method.drafter)
    head = head if tokens is None else with_vocabulary(head, target, tokens)
    return unborrowed(head, target).float().train()


def unborrowed(head: Any, target: Target) -> Any:
    """A head from a file, whose copies of the target's embedding and vocabulary do not learn."""
    shared = {"embed_tokens": target.model.get_input_embeddings(), "lm_head": target.model.get_output_embeddings()}
    for name, own in shared.items():
        copy = getattr(head, name)
        rows = own.weight if name == "embed_tokens" or head.draft_tokens is None else own.weight[head.draft_tokens]
        if copy is not None and torch.equal(copy.weight.bfloat16(), rows.bfloat16()):
            copy.requires_grad_(False)
    return head


def commonest(counts: torch.Tensor, size: int, target: Target) -> torch.Tensor:
    """The tokens that the target writes most, and those that end its texts; ascending."""
    if not 1 <= size <= target.vocab_size:
        raise InputError(f"--vocabulary must be between 1 and {target.vocab_size}, not {size}")
    counts = counts[: target.vocab_size].clone().float()
    counts[list(target.eos)] = float("inf")
    return counts.topk(size).indices.sort().values


def parse_taps(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        taps = tuple(int(part) for part in text.split(","))
    except ValueError:
        taps = ()
    if not taps or min(taps) < 0:
        raise InputError(f"write --taps as layer numbers, for example 2,15,27, not '{text}'")
    return taps
