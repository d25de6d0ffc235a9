"""Distil the target into a smaller language model, made of some of its own layers; OUT/best holds the best one."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from windfall.checkpoints import borrowed_embeddings
from windfall.checkpoints.bundled import BORROWS, TARGET, description
from windfall.core import options
from windfall.core.errors import InputError
from windfall.heads.files import BEST, write_folder
from windfall.model.single_sequences import single_sequences
from windfall.model.target import Target
from windfall.train.jobs import Job, run_job
from windfall.train.objectives.distillation import Distillation
from windfall.train.recipe import Recipe
from windfall.train.target_layers import EMBEDDING, check_intermediate, cut_tensors
from windfall.train.teacher import Teacher
from windfall.train.trainer import Event, Trainer

VOCABULARY = "lm_head.weight"  # name in these model families


@dataclass(frozen=True)
class Shape:
    """Which part of the target the student keeps."""

    layers: str | None = None  # the number of first layers, or which layers (0,1,29); None: the first eighth
    intermediate: int | None = None  # feed-forward neurons of a layer; None: all
    own_embeddings: bool = False  # train and store embeddings instead of borrowing the target's


@dataclass(frozen=True)
class StudentJob(Job):
    """The training of a student."""

    shape: Shape = Shape()

    def objective(self) -> Distillation:
        return options.build(Distillation, options.split_settings(self.settings), "distillation")

    def description(self) -> dict[str, Any]:
        return {"method": "distillation", "settings": self.settings, "student": asdict(self.shape)}


def train_student(job: StudentJob, recipe: Recipe, target: Target) -> Iterator[Event]:
    """Train and yield events."""

    def make_trainer(*_: Any) -> Trainer:
        student = new_student(target, job.shape)
        return Trainer(student, job.objective(), Teacher(target.model, ()), recipe, job.out)

    def write(student: Any) -> None:
        write_student(student, job.out / BEST, target)

    yield from run_job(job, recipe, target, make_trainer, write)


class Student(nn.Module):
    """A transformers model in training. Borrowed matrices are frozen and are not part of the module."""

    def __init__(self, body: Any, embedding: Tensor, vocabulary: Tensor, own: bool, tied: bool):
        """embedding and vocabulary [V, H] are the target's; they are copied if the student has its `own`."""
        super().__init__()
        self.body: Any = body
        self.config: Any = body.config
        self.own = own
        self.own_embedding = nn.Parameter(embedding.detach().float().clone()) if own else None
        self.own_vocabulary = nn.Parameter(vocabulary.detach().float().clone()) if own and not tied else None
        self._borrowed = {"embedding": embedding.detach(), "vocabulary": vocabulary.detach()}

    @property
    def vocabulary(self) -> Tensor:
        """[V, H]"""
        if self.own_vocabulary is not None:
            return self.own_vocabulary
        return self._borrowed["vocabulary"] if self.own_embedding is None else self.own_embedding

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, n] → [B, n, H], the input of the vocabulary head."""
        table = self._borrowed["embedding"] if self.own_embedding is None else self.own_embedding
        with single_sequences():
            outputs = self.body(inputs_embeds=F.embedding(tokens, table).float(), use_cache=False)
        states: Tensor = outputs.last_hidden_state
        return states


def new_student(target: Target, shape: Shape) -> Student:
    """Some layers of the target in fp32, ready for training."""
    model, config = target.model, target.model.config
    if config.model_type not in borrowed_embeddings.FAMILIES:
        raise InputError(
            f"{target.name} is a {config.model_type}; students are made of the families "
            f"{', '.join(borrowed_embeddings.FAMILIES)}"
        )
    layers = choose_layers(shape.layers, config.num_hidden_layers)
    empty = borrowed_embeddings.without_embeddings(_cut_config(config, layers, shape.intermediate)).base_model
    tensors = cut_tensors(model.base_model.state_dict(), layers, shape.intermediate)
    body = borrowed_embeddings.fill(empty, tensors).to(target.device).requires_grad_(True)
    embedding, vocabulary = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return Student(body, embedding, vocabulary, shape.own_embeddings, embedding is vocabulary).train()


def choose_layers(text: str | None, count: int) -> list[int]:
    """'4' (the first four) or '0,1,27-29' → layer numbers below `count`."""
    if text is None:
        return list(range(max(1, count // 8)))
    try:
        layers = set(range(int(text))) if text.strip().isdecimal() else options.parse_ranges(text)
    except ValueError:
        raise InputError(f"--layers takes a number, or layers such as 0,1,27-29, not '{text}'") from None
    if not layers or not layers <= set(range(count)):
        raise InputError(f"--layers must choose from the target's {count} layers, 0 to {count - 1}, not '{text}'")
    return sorted(layers)


def _cut_config(config: Any, layers: list[int], intermediate: int | None) -> Any:
    check_intermediate(intermediate, config)
    cut = copy.deepcopy(config)
    kinds = getattr(config, "layer_types", None)
    cut.num_hidden_layers = len(layers)
    if kinds is not None:
        cut.layer_types = [kinds[layer] for layer in layers]
    cut.intermediate_size = intermediate or config.intermediate_size
    return cut


def write_student(student: Student, folder: Path, target: Target) -> None:
    """Write a folder for transformers or, with borrowed embeddings, for windfall's `--drafter` only."""
    prefix = target.model.base_model_prefix
    tensors = {f"{prefix}.{name}": tensor for name, tensor in student.body.state_dict().items()}
    if student.own_embedding is not None:
        tensors[f"{prefix}.{EMBEDDING}"] = student.own_embedding
    if student.own_vocabulary is not None:
        tensors[VOCABULARY] = student.own_vocabulary
    borrowing = {BORROWS: borrowed_embeddings.EMBEDDINGS, TARGET: description(target)}
    config = {
        **json.loads(student.config.to_json_string()),
        "architectures": [type(target.model).__name__],
        "dtype": "bfloat16",
        "tie_word_embeddings": student.own and student.own_vocabulary is None,
        **({} if student.own else borrowing),
    }
    config.pop("_model_name_or_path", None)  # a path on this machine
    write_folder(folder, config, {name: t.detach().to("cpu", torch.bfloat16) for name, t in tensors.items()})
    if student.own and target.tokenizer is not None:
        target.tokenizer.save_pretrained(folder)
