"""A draft tree as flat arrays: inert data that drafters extend, policies shape and the target judges."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Node 0 is the last committed token; parents come before their children. Lives on the host."""

    tokens: Tensor  # [N] long
    parents: Tensor  # [N] long, parents[0] == -1
    logq: Tensor  # [N] fp32, draft log-probability given the parent
    score: Tensor  # [N] fp32, the sum of logq from the root
    depth: Tensor  # [N] long, root 0
    rank: Tensor  # [N] long, place among its siblings, 0 the likeliest
    entropy: Tensor  # [N] fp32, nats, of the drafter's distribution after this node; NaN where nobody asked for it

    @classmethod
    def root(cls, token: int) -> DraftTree:
        zero = torch.zeros(1, dtype=torch.long)
        unknown = torch.full((1,), torch.nan)
        return cls(torch.tensor([token]), zero - 1, torch.zeros(1), torch.zeros(1), zero, zero, unknown)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, parents: Tensor, tokens: Tensor, logq: Tensor, rank: Tensor) -> DraftTree:
        """Append children of nodes already here; `rank` is each child's place among its siblings."""
        logq = logq.float()
        return DraftTree(
            torch.cat([self.tokens, tokens]),
            torch.cat([self.parents, parents]),
            torch.cat([self.logq, logq]),
            torch.cat([self.score, self.score[parents] + logq]),
            torch.cat([self.depth, self.depth[parents] + 1]),
            torch.cat([self.rank, rank]),
            torch.cat([self.entropy, torch.full((len(tokens),), torch.nan)]),
        )

    def measure(self, nodes: Tensor, entropy: Tensor) -> DraftTree:
        """The same tree with the drafter's uncertainty after these nodes noted."""
        return replace(self, entropy=self.entropy.index_copy(0, nodes, entropy.float()))

    def select(self, keep: Tensor) -> DraftTree:
        """The sub-tree of these nodes (ascending indices, root kept, closed under parents), order preserved."""
        kept = keep.tolist()
        assert kept == sorted(set(kept)), "nodes are kept in their order"
        if len(kept) == len(self):
            return self
        place, above = {node: i for i, node in enumerate(kept)} | {-1: -1}, self.parents.tolist()
        parents = [place.get(above[node], -2) for node in kept]
        assert kept[0] == 0 and min(parents[1:], default=0) >= 0, "a kept node's parent must be kept"
        arrays = (self.logq, self.score, self.depth, self.rank, self.entropy)
        return DraftTree(self.tokens[keep], torch.tensor(parents), *(array[keep] for array in arrays))

    def mask(self) -> Tensor:
        """[N, N] bool: row i is True at i and at i's ancestors."""
        mask = torch.eye(len(self), dtype=torch.bool)
        ancestors, rows = self.parents[1:], torch.arange(1, len(self))
        while len(rows):
            mask[rows, ancestors] = True
            ancestors = self.parents[ancestors]
            rows, ancestors = rows[ancestors >= 0], ancestors[ancestors >= 0]
        return mask

    def path(self, node: int) -> list[int]:
        """The nodes from the root to this one."""
        path = [node]
        while (node := int(self.parents[node])) >= 0:
            path.append(node)
        return path[::-1]

    def check(self) -> None:
        """Assert every invariant of the arrays."""
        size = len(self)
        assert self.parents[0] == -1 and self.depth[0] == 0 and self.score[0] == 0
        assert bool((self.parents[1:] >= 0).all()) and bool((self.parents[1:] < torch.arange(1, size)).all())
        assert torch.equal(self.mask().sum(1), self.depth + 1)
        siblings = {(int(p), int(t)) for p, t in zip(self.parents[1:], self.tokens[1:], strict=True)}
        assert len(siblings) == size - 1, "siblings must carry different tokens"
