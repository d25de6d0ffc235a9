"""TALF (the SALF & TALF paper): the head drafts along the trees that the target would draft for itself, and every node
is trained with the target's distribution there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windfall.core.options import option
from windfall.heads.base import FeatureHead, Guess
from windfall.heads.layers import masked_attention, within
from windfall.train.batch import Rows
from windfall.train.losses import Report, distill
from windfall.train.new_heads import new_eagle, new_eagle3
from windfall.train.objectives.base import Distilling
from windfall.train.objectives.target_trees import (
    MAX_ROOTS,
    TreeGrower,
    Trees,
    TreeShape,
    ancestors,
    choose_roots,
    take_rows,
    tree_mask,
)  # fmt: skip
from windfall.train.teacher import Teacher, TeacherOutput


@dataclass
class TreeAware(Distilling):
    """The distance from the target at every node of its beam trees, averaged over nodes; no feature loss."""

    kind: str = option("eagle", "kind of a new head", choices=("eagle", "eagle3"))
    passes: int = option(3, "draft passes; trees have one level less below the root", low=2, high=16)
    k: int = option(4, "nodes of each level", low=1)
    share: float = option(0.25, "share of the columns of a batch that get a tree; in the paper 1", low=0.01, high=1)
    forced: bool = option(False, "the text's own tokens are always in the tree")
    detach: bool = option(True, "stop gradients at the features of the level before")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._grower: TreeGrower | None = None

    def new_head(self, target: Any, shape: dict[str, Any]) -> FeatureHead:
        return new_eagle(target, shape) if self.kind == "eagle" else new_eagle3(target, shape)

    def report(self, head: Any, outputs: TeacherOutput, teacher: Teacher, progress: float) -> Report:
        if self._grower is None:
            self._grower = TreeGrower(teacher.model)
        roots = choose_roots(outputs.batch.answer, self.share, head.training)
        shape = TreeShape(self.k, self.passes - 1, self.forced)
        trees = self._grower.grow(outputs.batch.tokens, outputs.final, roots, shape)
        guesses, vocabularies = follow(head, outputs, trees, self.detach), teacher.vocabularies(head)
        weight = 1 / max(1, int(trees.valid.sum()) * (1 + self.k * len(trees.levels)))
        reports = []
        for states, labels in labelled(guesses, outputs, trees):
            weights = torch.full((1, len(states)), weight, device=states.device)
            reports.append(distill(head.normed(states)[None], labels, vocabularies, weights, goal=self.goal(head)))
        losses, steps, hits, _ = zip(*reports, strict=True)
        return Report(torch.stack(losses).sum(), torch.cat(steps), torch.cat(hits))


class TreeMemory:
    """The head's keys and values of whole texts and, level by level, of the trees on them; some roots at a time.

    All levels have the same number of nodes under every root, so the same slice of each level belongs to the same
    roots.
    """

    def __init__(self, text: Tensor, windows: tuple[int | None, ...] = ()):
        self.masks = [text]  # of the current pass: one for each slice of roots, [B or 1, n, columns] bool
        self.ages: list[Tensor] = []  # the distance in positions between row and column, if there are windows
        self._windows = windows  # of each layer
        self._text: dict[int, tuple[Tensor, Tensor]] = {}
        self._levels: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if layer not in self._text:
            self._text[layer] = keys, values
            return masked_attention(queries, keys, values, self._layer_masks(layer)[0])
        levels = self._levels.setdefault(layer, [])
        levels.append((keys, values))
        parts, start = [], 0
        for mask in self._layer_masks(layer):
            rows = slice(start, start + mask.shape[1])
            seen = [self._text[layer], *((key[:, :, rows], value[:, :, rows]) for key, value in levels)]
            own_keys, own_values = (torch.cat(x, 2) for x in zip(*seen, strict=True))
            parts.append(masked_attention(queries[:, :, rows], own_keys, own_values, mask))
            start = rows.stop
        return torch.cat(parts, 2)

    def _layer_masks(self, layer: int) -> list[Tensor]:
        if not self._windows:
            return self.masks
        return [within(mask, age, self._windows[layer]) for mask, age in zip(self.masks, self.ages, strict=True)]


def follow(head: FeatureHead, outputs: TeacherOutput, trees: Trees, detach: bool) -> list[Guess]:
    """The head's guesses along given trees: [B, R, H] at the roots, then [B, R * k, H] at each level."""
    tokens, columns = outputs.batch.tokens, outputs.batch.tokens.shape[1] - 1
    device, k = tokens.device, trees.levels[0].tokens.shape[-1]
    places = torch.arange(columns, device=device)
    memory = TreeMemory(torch.ones(1, columns, columns, dtype=torch.bool, device=device).tril(), head.config.windows)
    memory.ages = [(places[:, None] - places)[None]]
    text = head(tokens[:, 1:], head.fuse(outputs.features[:, :-1]), places[None], memory)
    guesses = [Guess(*(take_rows(x, trees.columns) for x in text))]
    for depth, level in enumerate(trees.levels, 1):
        memory.masks = _masks(trees, depth, columns)
        memory.ages = _ages(trees, depth, columns, k) if head.config.windows else []
        above = torch.arange(trees.columns.shape[1], device=device)[:, None] * (k if depth > 1 else 1)
        hidden = take_rows(guesses[-1].recycled, (above + level.parents).flatten(1))
        positions = (trees.columns + depth).repeat_interleave(k, 1)
        guesses.append(head(level.tokens.flatten(1), hidden.detach() if detach else hidden, positions, memory))
    return guesses


def _masks(trees: Trees, depth: int, columns: int) -> list[Tensor]:
    """The masks of a level, for each slice of roots."""
    lineage = ancestors([level.parents for level in trees.levels[:depth]])
    parts = (torch.split(x, MAX_ROOTS, 1) for x in (trees.columns, *lineage))
    return [tree_mask(last, columns, list(own)) for last, *own in zip(*parts, strict=True)]


def _ages(trees: Trees, depth: int, columns: int, k: int) -> list[Tensor]:
    """How many positions the columns of these masks lie before the level's nodes."""
    ages = []
    for last in torch.split(trees.columns, MAX_ROOTS, 1):
        text = torch.arange(columns, device=last.device).expand(len(last), -1)
        nodes = last.repeat_interleave(k, 1)  # [B, R * k]
        places = torch.cat([text, *(nodes + level for level in range(1, depth + 1))], 1)
        ages.append((nodes + depth)[:, :, None] - places[:, None])
    return ages


def labelled(guesses: list[Guess], outputs: TeacherOutput, trees: Trees) -> list[tuple[Tensor, Tensor]]:
    """For each level, without padding: the head's states [N, H] and the target's [N, Ht]."""
    valid, k = Rows.where(trees.valid, trees.columns.device), trees.levels[0].tokens.shape[-1]
    found = [(guesses[0].state[valid], take_rows(outputs.final, trees.columns + 1)[valid])]
    for guess, level in zip(guesses[1:], trees.levels, strict=True):
        states = guess.state.reshape(*trees.valid.shape, k, -1)[valid].flatten(0, 1)
        found.append((states, level.labels[valid].flatten(0, 1)))
    return found
