"""The draft tree, as flat arrays: drafters extend it, policies prune it, the target verifies it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

MAX_TREE_NODES = 2**18  # nodes
MAX_VERIFY_ROWS = 8192  # the attention mask of a verify pass has rows x rows entries
Integers = NDArray[np.int64]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


class Arrays(NamedTuple):
    """The arrays of a tree."""

    tokens: Integers  # [N]
    parents: Integers  # [N], parents[0] == -1
    logq: Floats  # [N], draft log-probability given the parent
    score: Floats  # [N], the sum of logq from the root
    depth: Integers  # [N], root 0
    rank: Integers  # [N], place among its siblings, 0 is the most likely
    entropy: Floats  # [N], nats, of the drafter's distribution after this node; NaN where it was not requested


class View:
    """One of a tree's arrays as a tensor, made on first access."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._place = Arrays._fields.index(name)

    def __get__(self, tree: DraftTree, owner: type) -> Tensor:
        found = tree.views[self._place]
        if found is None:
            import torch  # on first use: a process without a model can do without it

            found = tree.views[self._place] = torch.from_numpy(tree.arrays[self._place])
        return found


class DraftTree:
    """An immutable tree on the host. Node 0 is the last committed token; parents come before their children.

    The data is in numpy (`arrays`), which is several times faster than torch on a few nodes. The attributes are
    tensors over the same memory.
    """

    __slots__ = ("arrays", "views")

    tokens, parents, logq, score, depth, rank, entropy = View(), View(), View(), View(), View(), View(), View()

    def __init__(
        self, tokens: Tensor, parents: Tensor, logq: Tensor, score: Tensor, depth: Tensor, rank: Tensor, entropy: Tensor
    ):
        given = (tokens, parents, logq, score, depth, rank, entropy)
        self.arrays = Arrays(*(each.numpy() for each in given))
        self.views: list[Tensor | None] = list(given)

    @classmethod
    def of(cls, arrays: Arrays) -> DraftTree:
        made = cls.__new__(cls)
        made.arrays, made.views = arrays, [None] * len(arrays)
        return made

    @classmethod
    def root(cls, token: int) -> DraftTree:
        zero, nothing = np.zeros(1, np.int64), np.zeros(1, np.float32)
        return cls.of(Arrays(zero + token, zero - 1, nothing, nothing, zero, zero, nothing + np.float32(np.nan)))

    def __len__(self) -> int:
        return len(self.arrays[0])

    def extend(self, parents: Tensor, tokens: Tensor, logq: Tensor, rank: Tensor) -> DraftTree:
        """Append children of existing nodes; `rank` is each child's place among its siblings."""
        return self.append(parents.numpy(), tokens.numpy(), logq.float().numpy(), rank.numpy())

    def append(self, parents: Integers, tokens: Integers, logq: Floats, rank: Integers) -> DraftTree:
        """`extend` in numpy."""
        known, unknown = self.arrays, np.full(len(tokens), np.nan, np.float32)
        return DraftTree.of(
            Arrays(
                np.concatenate((known.tokens, tokens)),
                np.concatenate((known.parents, parents)),
                np.concatenate((known.logq, logq)),
                np.concatenate((known.score, known.score[parents] + logq)),
                np.concatenate((known.depth, known.depth[parents] + 1)),
                np.concatenate((known.rank, rank)),
                np.concatenate((known.entropy, unknown)),
            )
        )

    def measure(self, nodes: Tensor, entropy: Tensor) -> DraftTree:
        """The same tree with the drafter's entropy after these nodes."""
        noted = self.arrays.entropy.copy()
        noted[nodes.numpy()] = entropy.numpy()
        return DraftTree.of(self.arrays._replace(entropy=noted))

    def select(self, keep: Tensor) -> DraftTree:
        """The sub-tree of these nodes (ascending indices, root kept, closed under parents), order preserved."""
        kept, known = keep.numpy(), self.arrays
        assert bool((kept[1:] > kept[:-1]).all()), "nodes are kept in their order"
        if len(kept) == len(self):
            return self
        place = np.full(len(self), -1)
        place[kept] = np.arange(len(kept))
        parents = place[known.parents[kept]]
        parents[:1] = -1
        assert kept[0] == 0 and bool((parents[1:] >= 0).all()), "a kept node's parent must be kept"
        return DraftTree.of(Arrays(*(array[kept] for array in known))._replace(parents=parents))

    def mask(self) -> Tensor:
        """[N, N] bool: row i is True at i and at i's ancestors."""
        import torch

        return torch.from_numpy(self.ancestry())

    def ancestry(self) -> Flags:
        """`mask` in numpy."""
        size, parents = len(self), self.arrays.parents.clip(0)
        mask = np.eye(size, dtype=bool)
        cells, rows, above = mask.reshape(-1), np.arange(0, size * size, size), parents  # the root is its own parent
        for _ in range(int(self.arrays.depth.max())):
            cells[rows + above] = True
            above = parents[above]
        return mask

    def path(self, node: int) -> list[int]:
        """The nodes from the root to this one."""
        parents, path = self.arrays.parents, [node]
        while (node := int(parents[node])) >= 0:
            path.append(node)
        return path[::-1]

    def check(self) -> None:
        """Assert every invariant of the arrays."""
        import torch

        size = len(self)
        assert self.parents[0] == -1 and self.depth[0] == 0 and self.score[0] == 0
        assert bool((self.parents[1:] >= 0).all()) and bool((self.parents[1:] < torch.arange(1, size)).all())
        assert torch.equal(self.mask().sum(1), self.depth + 1)
        siblings = {(int(p), int(t)) for p, t in zip(self.parents[1:], self.tokens[1:], strict=True)}
        assert len(siblings) == size - 1, "siblings must carry different tokens"
