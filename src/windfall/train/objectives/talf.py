"""TALF (the SALF & TALF paper): the head drafts along the trees that the target would draft for itself, and every node
is held against the target's distribution there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windfall.core.errors import InputError
from windfall.core.options import option
from windfall.heads.base import FeatureHead, Guess
from windfall.heads.layers import masked_attention, within
from windfall.train.losses import distil
from windfall.train.objectives.base import Objective, Report
from windfall.train.shapes import new_eagle, new_eagle3
from windfall.train.sparse import Judged, Sparse, judge_sparse
from windfall.train.teacher import Lesson, Teacher
from windfall.train.trees import ROOTS, Grower, Shape, StoredTrees, Trees, choose_roots, lineages, sight


@dataclass
class TreeAware(Objective):
    """Cross-entropy at every node of the target's beam trees, mean over nodes; no feature loss."""

    kind: str = option("eagle", "kind of a new head", choices=("eagle", "eagle3"))
    passes: int = option(3, "draft passes, so many that a path has one token less", low=2, high=16)
    k: int = option(4, "nodes of each level", low=1)
    share: float = option(0.25, "share of the columns that get a tree in each batch; in the paper 1", low=0.01, high=1)
    forced: bool = option(False, "whether the text's own tokens are always in the tree")
    detach: bool = option(True, "whether features count as given when they are read again")
    stored: str | None = option(None, "folder of trees that were grown beforehand; none: the target grows them now")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._source: Grower | StoredTrees | None = None

    def new_head(self, target: Any, shape: dict[str, Any]) -> FeatureHead:
        return new_eagle(target, shape) if self.kind == "eagle" else new_eagle3(target, shape)

    def report(self, head: Any, lesson: Lesson, teacher: Teacher, progress: float) -> Report:
        trees = self.trees(lesson, teacher, head.training)
        guesses = follow(head, lesson, trees, self.detach)
        nodes = max(1, int(trees.valid.sum()) * (1 + self.k * len(trees.levels)))
        told = [judge(*level, head, teacher, 1 / nodes) for level in labelled(guesses, lesson, trees)]
        loss = torch.stack([own.loss for own in told]).sum()
        return Report(loss, torch.stack([own.entropy for own in told]), torch.stack([own.hits for own in told]))

    def trees(self, lesson: Lesson, teacher: Teacher, training: bool) -> Trees:
        source = self._find_source(teacher)
        if isinstance(source, StoredTrees):
            return source.find(lesson.batch)
        roots = choose_roots(lesson.batch.answer, self.share, training)
        return source.grow(lesson.batch.tokens, lesson.final, roots, self._shape)

    @property
    def _shape(self) -> Shape:
        return Shape(self.k, self.passes - 1, self.forced)

    def _find_source(self, teacher: Teacher) -> Grower | StoredTrees:
        """What was used before, or what the options ask for."""
        if self._source is None and self.stored is None:
            self._source = Grower(teacher.model)
        elif self._source is None:
            found = StoredTrees(Path(str(self.stored)))
            k, passes = found.shape.k, found.shape.depth + 1
            if (k, passes) != (self.k, self.passes):
                raise InputError(f"the trees in '{self.stored}' need k={k} and passes={passes}")
            self._source = found
        assert self._source is not None
        return self._source


class Branches:
    """The head's memory of whole texts and, level by level, of the trees on them; some roots at a time.

    Levels have the same number of nodes under every root, so that the same slice of each belongs to the same roots.
    """

    def __init__(self, text: Tensor, windows: tuple[int | None, ...] = ()):
        self.masks = [text]  # of the present pass: one for each slice, [B or 1, n, columns] bool
        self.ages: list[Tensor] = []  # positions between row and column, as the masks, where there are windows
        self._windows = windows  # of each layer
        self._text: dict[int, tuple[Tensor, Tensor]] = {}
        self._levels: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if layer not in self._text:
            self._text[layer] = keys, values
            return masked_attention(queries, keys, values, self._seen(layer)[0])
        levels = self._levels.setdefault(layer, [])
        levels.append((keys, values))
        parts, start = [], 0
        for mask in self._seen(layer):
            rows = slice(start, start + mask.shape[1])
            seen = [self._text[layer], *((key[:, :, rows], value[:, :, rows]) for key, value in levels)]
            own_keys, own_values = (torch.cat(x, 2) for x in zip(*seen, strict=True))
            parts.append(masked_attention(queries[:, :, rows], own_keys, own_values, mask))
            start = rows.stop
        return torch.cat(parts, 2)

    def _seen(self, layer: int) -> list[Tensor]:
        if not self._windows:
            return self.masks
        return [within(mask, age, self._windows[layer]) for mask, age in zip(self.masks, self.ages, strict=True)]


def follow(head: FeatureHead, lesson: Lesson, trees: Trees, detach: bool) -> list[Guess]:
    """The head's guesses along given trees: [B, R, H] at the roots, then [B, R * k, H] at each level."""
    tokens, columns = lesson.batch.tokens, lesson.batch.tokens.shape[1] - 1
    device, k = tokens.device, trees.levels[0].tokens.shape[-1]
    places = torch.arange(columns, device=device)
    memory = Branches(torch.ones(1, columns, columns, dtype=torch.bool, device=device).tril(), head.config.windows)
    memory.ages = [(places[:, None] - places)[None]]
    text = head(tokens[:, 1:], head.fuse(lesson.features[:, :-1]), torch.arange(columns, device=device)[None], memory)
    guesses = [Guess(*(_take(x, trees.columns) for x in text))]
    for depth, level in enumerate(trees.levels, 1):
        memory.masks = _masks(trees, depth, columns)
        memory.ages = _ages(trees, depth, columns, k) if head.config.windows else []
        above = torch.arange(trees.columns.shape[1], device=device)[:, None] * (k if depth > 1 else 1)
        hidden = _take(guesses[-1].recycled, (above + level.parents).flatten(1))
        positions = (trees.columns + depth).repeat_interleave(k, 1)
        guesses.append(head(level.tokens.flatten(1), hidden.detach() if detach else hidden, positions, memory))
    return guesses


def _masks(trees: Trees, depth: int, columns: int) -> list[Tensor]:
    """What the nodes of a level see, for each slice of roots."""
    lineage = lineages([level.parents for level in trees.levels[:depth]])
    parts = (torch.split(x, ROOTS, 1) for x in (trees.columns, *lineage))
    return [sight(last, columns, list(own)) for last, *own in zip(*parts, strict=True)]


def _ages(trees: Trees, depth: int, columns: int, k: int) -> list[Tensor]:
    """How many positions the columns of these masks lie before the level's nodes."""
    ages = []
    for last in torch.split(trees.columns, ROOTS, 1):
        text = torch.arange(columns, device=last.device).expand(len(last), -1)
        nodes = last.repeat_interleave(k, 1)  # [B, R * k]
        places = torch.cat([text, *(nodes + level for level in range(1, depth + 1))], 1)
        ages.append((nodes + depth)[:, :, None] - places[:, None])
    return ages


def _take(rows: Tensor, places: Tensor) -> Tensor:
    """rows [B, n, H], places [B, m] → [B, m, H]."""
    return rows.gather(1, places[..., None].expand(-1, -1, rows.shape[-1]))


def labelled(guesses: list[Guess], lesson: Lesson, trees: Trees) -> list[tuple[Tensor, Tensor | Sparse]]:
    """Of each level, without padding, what the vocabulary is to read [N, H] and what it is held against."""
    valid, k = trees.valid, trees.levels[0].tokens.shape[-1]
    found: list[tuple[Tensor, Tensor | Sparse]] = [
        (guesses[0].state[valid], _take(lesson.final, trees.columns + 1)[valid])
    ]
    for guess, level in zip(guesses[1:], trees.levels, strict=True):
        states = guess.state.reshape(*valid.shape, k, -1)[valid].flatten(0, 1)
        labels = level.labels
        if isinstance(labels, Sparse):
            found.append((states, Sparse(*(x[valid].flatten(0, 1) for x in labels))))
        else:
            found.append((states, labels[valid].flatten(0, 1)))
    return found


def judge(states: Tensor, labels: Tensor | Sparse, head: FeatureHead, teacher: Teacher, weight: float) -> Judged:
    weights = torch.full((len(states),), weight, device=states.device)
    if isinstance(labels, Sparse):
        return judge_sparse(head.logits, states, labels.among(head.draft_tokens), weights)
    loss, entropy, hits = distil(head.normed(states)[None], labels, teacher.vocabularies(head), weights[None])
    return Judged(loss, entropy[0], hits[0])
