"""Draft with Hydra heads (Ankner et al. 2024), which read the target's last state and the tokens on a node's path.

With a prefix layer (Hydra++) they read the layer's output instead. The layer has a KV cache of all committed tokens;
only true features enter it, so no row is ever dropped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from windfall.core.options import option
from windfall.core.sampling import Dice
from windfall.core.tree import DraftTree
from windfall.core.types import Grow
from windfall.drafters.base import Drafter, add_children
from windfall.drafters.head_drafter import MAX_CHUNK, HeadMemory, Reach, head_row_bytes
from windfall.drafters.medusa import find_heads
from windfall.model.batch import Rows, pack

if TYPE_CHECKING:
    from windfall.heads.hydra import Hydra
    from windfall.model.target import Target


@dataclass
class HydraDrafter(Drafter):
    """Hydra or Hydra++ heads: one small pass per level; the tree is at most as deep as there are heads."""

    model: Any = option(None, "folder or hub id of Hydra heads, or loaded ones; there is no default")

    def attach(self, target: Target) -> None:
        from windfall.heads.hydra import Hydra

        found = find_heads(self.model, Hydra, target, "hydra")
        self._reach = None if found.prefix is None else Reach(found, None, target.context)
        self._heads: Hydra = found if self._reach is None else self._reach.head

    def expect(self, length: int) -> None:
        if self._reach is not None:
            self._reach.expect(length)

    @property
    def taps(self) -> tuple[int, ...]:
        return self._heads.config.taps

    def start(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Sequence[Dice | None]) -> None:
        self._dice: list[Dice | None] = []
        self._memory = HeadMemory(1, 0, self._heads.config.windows)
        self._unseen: list[Tensor] = []  # [n, H] features that the prefix layer has not seen
        self._contexts: list[Tensor | None] = []  # [H] the input of the heads in this cycle
        self.join(prompts, hidden, dice)

    @torch.inference_mode()
    def join(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Sequence[Dice | None]) -> None:
        assert hidden is not None
        self._dice += dice
        self._memory.cache.append(len(prompts))
        self._unseen += [self._needed(own) for own in hidden]
        self._contexts += [None] * len(prompts)

    @property
    def row_bytes(self) -> int:
        return 0 if self._heads.prefix is None else head_row_bytes(self._heads)

    @torch.inference_mode()
    def expand(self, trees: list[DraftTree], grows: Sequence[Grow | None]) -> list[DraftTree]:
        nodes = [self._possible(b, tree, grow) for b, (tree, grow) in enumerate(zip(trees, grows, strict=True))]
        self._read([b for b, own in enumerate(nodes) if len(own) and self._contexts[b] is None])
        logq = self._guess(trees, nodes)
        grown = list(trees)
        for b, grow in enumerate(grows):
            if grow is not None and len(nodes[b]):
                rows = torch.stack([logq[b, node] for node in nodes[b].tolist()])  # [n, Vd]
                fitting, names = grow._replace(nodes=nodes[b]), self._heads.draft_tokens
                grown[b] = add_children(trees[b], fitting, rows, self._dice[b], names)
        return grown

    def commit(
        self, trees: list[DraftTree], paths: list[Tensor], bonus: list[int], hidden: list[Tensor] | None
    ) -> None:
        assert hidden is not None
        for b, fresh in enumerate(hidden):
            self._unseen[b] = self._needed(torch.cat([self._unseen[b], fresh]))
            self._contexts[b] = None

    def retain(self, keep: list[int]) -> None:
        self._memory.cache.retain(keep)
        self._unseen, self._contexts = [self._unseen[b] for b in keep], [self._contexts[b] for b in keep]
        self._dice = [self._dice[b] for b in keep]

    def _needed(self, features: Tensor) -> Tensor:
        """The features to keep: all for a prefix layer, else the last."""
        return features if self._heads.prefix is not None else features[-1:].clone()

    def _possible(self, b: int, tree: DraftTree, grow: Grow | None) -> Tensor:
        """The nodes that have a head, if there is a feature to start from and the prefix layer has positions left."""
        limit = None if self._reach is None else self._reach.longest
        seen = self._memory.cache.lengths[b] + len(self._unseen[b])
        if grow is None or not seen or (limit is not None and seen > limit):
            return torch.zeros(0, dtype=torch.long)
        return grow.nodes[tree.depth[grow.nodes] < self._heads.config.heads]

    def _read(self, places: list[int]) -> None:
        """Compute the input of the heads of these sequences from all features since the last time."""
        if self._heads.prefix is None:
            for b in places:
                self._contexts[b] = self._unseen[b][-1]
            return
        while any(len(self._unseen[b]) for b in places):
            longer = [b for b in places if len(self._unseen[b])]
            taken = [self._unseen[b][:MAX_CHUNK] for b in longer]
            with self._memory.only(longer):
                seen = self._run_prefix(taken)
            for row, b in enumerate(longer):
                size = len(taken[row])
                self._contexts[b], self._unseen[b] = seen[row, size - 1], self._unseen[b][size:]

    def _run_prefix(self, features: list[Tensor]) -> Tensor:
        """Commit features to the prefix layer's KV cache; returns its outputs for them, [B, n, H]."""
        cache = self._memory.cache
        rows = [Rows.chain([0] * len(own), at) for own, at in zip(features, cache.lengths, strict=True)]
        packed = pack(rows, cache.lengths, 0, self._heads.device)
        cache.reserve(packed.positions.shape[1])
        self._memory.prepare(packed)
        padded = torch.nn.utils.rnn.pad_sequence(features, batch_first=True)
        seen = self._heads.contexts(padded, packed.positions, self._memory)
        cache.staged += packed.positions.shape[1]
        cache.commit([list(range(len(own))) for own in features])
        return seen

    def _guess(self, trees: list[DraftTree], nodes: list[Tensor]) -> dict[tuple[int, int], Tensor]:
        """Log-probabilities [Vd] after each node of each sequence; nodes of one depth run together."""
        depths: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for b, own in enumerate(nodes):
            for node, depth in zip(own.tolist(), trees[b].depth[own].tolist(), strict=True):
                depths[depth].append((b, node))
        logq: dict[tuple[int, int], Tensor] = {}
        for depth, members in depths.items():
            tokens = torch.stack([trees[b].tokens[trees[b].path(node)] for b, node in members])  # [n, depth + 1]
            context = torch.stack([self._context(b) for b, _ in members])  # [n, H]
            state = self._heads.states(depth, context, tokens.to(context.device))
            logits = self._heads.head_logits(depth, state).float()
            logq.update(zip(members, torch.log_softmax(logits, -1), strict=True))
        return logq

    def _context(self, b: int) -> Tensor:
        context = self._contexts[b]
        assert context is not None
        return context
