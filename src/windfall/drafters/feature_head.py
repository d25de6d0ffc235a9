"""Draft with a feature head: EAGLE-1/2, EAGLE-3 or GRIFFIN.

Committed tokens have the target's true features, drafted ones the head's own. Therefore the KV rows of drafted tokens
are dropped after each cycle and computed again from true features in the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from windfall.core.options import option
from windfall.core.sampling import Dice
from windfall.core.tree import DraftTree
from windfall.core.types import Grow
from windfall.drafters.base import GpuForm, HeadForm, add_children_to_all
from windfall.drafters.head_drafter import FOLLOWS_LENGTH, MAX_CHUNK, PRECISIONS, HeadDrafter, HeadMemory
from windfall.heads.base import FeatureHead, Guess
from windfall.model.batch import Rows, pack

MAX_PENDING = 32  # pending columns that run with the first draft pass; more run before it


@dataclass
class FeatureHeadDrafter(HeadDrafter[FeatureHead]):
    """A draft head: a folder, a hub id or a loaded head; by default the bundled head of the embedded model."""

    model: Any = option(
        None, "folder or hub id of a head, or a loaded one; none: the bundled head of the embedded model"
    )

    kind: ClassVar[str] = "head"

    def start(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Sequence[Dice | None]) -> None:
        config = self.head.config
        self._dice: list[Dice | None] = []
        self._memory = HeadMemory(config.layer.num_hidden_layers, 0, config.windows)
        self._tokens: list[list[int]] = []  # pending columns: committed, but not in the KV cache
        self._features: list[Tensor] = []  # of the position before each pending token
        self._slots: list[dict[int, int]] = []  # expanded node → its staged row
        self._recycled: list[list[Tensor]] = []  # per staged row, [rows of a pass, H]
        self.join(prompts, hidden, dice)

    @torch.inference_mode()
    def join(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Sequence[Dice | None]) -> None:
        assert hidden is not None
        self._dice += dice
        self._memory.cache.append(len(prompts))
        self._tokens += [prompt[1:] for prompt in prompts]
        self._features += hidden
        self._slots += [{} for _ in prompts]
        self._recycled += [[] for _ in prompts]

    @torch.inference_mode()
    def expand(self, trees: list[DraftTree], grows: Sequence[Grow | None]) -> list[DraftTree]:
        grows = [self._fitting(b, tree, grow) for b, (tree, grow) in enumerate(zip(trees, grows, strict=True))]
        if not any(grows):
            return trees
        self._catch_up(grows)
        first = self._memory.cache.staged
        rows = [self._rows(b, tree, grow) for b, (tree, grow) in enumerate(zip(trees, grows, strict=True))]
        hidden = [self._hidden(b, tree, grow) for b, (tree, grow) in enumerate(zip(trees, grows, strict=True))]
        guess = self._feed(rows, hidden)
        states = []
        for b, grow in enumerate(grows):
            if grow is not None:
                size, fresh = len(rows[b].tokens), len(grow.nodes)
                slots = range(first + size - fresh, first + size)
                self._slots[b].update(zip(grow.nodes.tolist(), slots, strict=True))
                self._recycled[b].append(guess.recycled[b, size - fresh :])
                states.append(guess.state[b, size - fresh : size])
        logits = self.head.logits(torch.cat(states))  # of all sequences at once: the vocabulary is large
        return add_children_to_all(trees, grows, logits, self._dice, self.head.draft_tokens)

    def commit(
        self, trees: list[DraftTree], paths: list[Tensor], bonus: list[int], hidden: list[Tensor] | None
    ) -> None:
        assert hidden is not None
        keep = []
        for b, (tree, path) in enumerate(zip(trees, paths, strict=True)):
            seen = bool(self._slots[b])  # the root was expanded, and every pending column with it
            last = self._slots[b].get(0, 0)
            keep.append(list(range(last - len(self._tokens[b]) + 1, last + 1)) if seen else [])
            fresh = [*tree.tokens[path[1:]].tolist(), bonus[b]]
            self._tokens[b] = fresh if seen else self._tokens[b] + fresh
            self._features[b] = hidden[b] if seen else torch.cat([self._features[b], hidden[b]])
            self._slots[b], self._recycled[b] = {}, []
        self._memory.cache.commit(keep)

    def retain(self, keep: list[int]) -> None:
        self._memory.cache.retain(keep)
        self._tokens, self._features = [self._tokens[b] for b in keep], [self._features[b] for b in keep]
        self._slots, self._recycled = [self._slots[b] for b in keep], [self._recycled[b] for b in keep]
        self._dice = [self._dice[b] for b in keep]

    def gpu_form(self) -> GpuForm | str:
        return HeadForm(self.head, PRECISIONS[self.weights]) if self.longest is None else FOLLOWS_LENGTH

    def _fitting(self, b: int, tree: DraftTree, grow: Grow | None) -> Grow | None:
        """None if there is no feature to start from, or if the head has too few positions for all of these nodes."""
        used = self._memory.cache.lengths[b] + len(self._tokens[b])
        if not grow or not used:
            return None
        deepest = int(tree.arrays.depth[grow.nodes.numpy()].max())
        return grow if self.longest is None or used + deepest <= self.longest else None

    def _catch_up(self, grows: Sequence[Grow | None]) -> None:
        """Before the first pass of a cycle, run all pending columns but the root's where there are many."""
        if self._memory.cache.staged:
            return
        while many := [b for b, grow in enumerate(grows) if grow and len(self._tokens[b]) > MAX_PENDING]:
            takes = [min(len(self._tokens[b]) - 1, MAX_CHUNK) for b in many]
            with self._memory.only(many) as cache:
                starts = zip(many, takes, cache.lengths, strict=True)
                rows = [Rows.chain(self._tokens[b][:n], at) for b, n, at in starts]
                self._feed(rows, [self.head.fuse(self._features[b][:n]) for b, n in zip(many, takes, strict=True)])
                cache.commit([list(range(n)) for n in takes])
            for b, n in zip(many, takes, strict=True):
                self._tokens[b], self._features[b] = self._tokens[b][n:], self._features[b][n:]

    def _rows(self, b: int, tree: DraftTree, grow: Grow | None) -> Rows:
        """The pending columns if the root is expanded, else the nodes."""
        staged, length, pending = self._memory.cache.staged, self._memory.cache.lengths[b], len(self._tokens[b])
        if grow is None:
            return Rows.chain([], 0, staged)
        slots = self._slots[b]
        if not slots:
            assert grow.nodes.tolist() == [0], "the root comes first"
            return Rows.chain(self._tokens[b], length, staged)
        return Rows.branch(
            tree, grow.nodes, slots, range(slots[0] - pending + 1, slots[0]), length + pending - 1, staged
        )

    def _hidden(self, b: int, tree: DraftTree, grow: Grow | None) -> Tensor:
        """[n, H]: the target's features of the pending columns, or the head's own features of the nodes' parents."""
        if grow is None:
            return self._features[b].new_zeros(0, self.head.config.layer.hidden_size)
        slots = self._slots[b]
        if not slots:
            return self.head.fuse(self._features[b])
        places = [slots[parent] - slots[0] for parent in tree.parents[grow.nodes].tolist()]
        return torch.cat(self._recycled[b])[torch.tensor(places, device=self.head.device)]

    def _feed(self, rows: list[Rows], hidden: list[Tensor]) -> Guess:
        """One pass over these rows, which are staged after the existing ones."""
        cache, device = self._memory.cache, self.head.device
        packed = pack(rows, cache.lengths, cache.staged, device)
        width = packed.tokens.shape[1]
        padded = torch.stack([torch.cat([own, own.new_zeros(width - len(own), own.shape[1])]) for own in hidden])
        cache.reserve(width)
        self._memory.prepare(packed)
        guess: Guess = self.head(packed.tokens, padded, packed.positions, self._memory)
        cache.staged += width
        return guess
