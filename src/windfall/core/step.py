"""A cycle of one sequence, as callers see it. This module does not import torch, which a process without a model can
do without."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from windfall.core.logprobs import TokenLogprob
from windfall.core.tree import Arrays, DraftTree, Integers

if TYPE_CHECKING:
    from torch import Tensor


class Split(NamedTuple):
    """Seconds of the parts of a cycle."""

    draft: float = 0.0
    verify: float = 0.0
    policy: float = 0.0
    other: float = 0.0
    prompts: float = 0.0  # passes over prompts, of any request, since the round before

    @property
    def total(self) -> float:
        """Of the cycle itself, without passes over prompts."""
        return self.draft + self.verify + self.policy + self.other

    @property
    def passes(self) -> float:
        """Of all passes of models."""
        return self.draft + self.verify + self.prompts


Counts = tuple[int, int, int, int, int]  # of a cycle: new tokens, verified nodes, accepted ones, drafted ones, passes


class NodeArrays(NamedTuple):
    """The nodes of a cycle."""

    drafted: Arrays
    verified: Integers  # places among the drafted nodes
    accepted: Integers  # likewise; the root first

    @classmethod
    def root(cls, token: int) -> NodeArrays:
        """A tree of one node."""
        node = np.zeros(1, np.int64)
        return cls(DraftTree.root(token).arrays, node, node)


@dataclass(frozen=True)
class Step:
    """One cycle of one sequence: the verified tree and the result."""

    whole_tree: ClassVar[bool] = True  # whether `drafted` has all drafted nodes, and not only the verified ones
    tokens: tuple[int, ...]  # emitted by this cycle, cut at the first stop
    text: str  # what these tokens add to the text, as far as it can no longer change
    tree: DraftTree  # the verified nodes
    path: Tensor  # accepted nodes of `tree`, root first
    drafted: DraftTree  # the draft tree that `tree` was selected from
    kept: Tensor  # the nodes of `drafted` that were verified
    draft_passes: int
    seconds: Split
    finish: str | None = None  # None: not finished; else "stop" or "length"
    recorded: bool = False  # CUDA graphs were captured in this cycle, so its seconds are not typical
    prefill_seconds: float = 0.0  # of the first Step of a text, and of the first one after a preemption
    logprobs: tuple[TokenLogprob, ...] | None = None  # of `tokens`, if they are wanted
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # of the first Step, if wanted; the first is None

    @cached_property
    def accepted(self) -> int:
        """Drafted tokens that the target agreed with."""
        return len(self.path) - 1

    @property
    def counts(self) -> Counts:
        """`len(tokens)`, `rows`, `accepted`, `drafted_tokens` and `draft_passes`, which are counted for every Step."""
        return len(self.tokens), self.rows, self.accepted, self.drafted_tokens, self.draft_passes

    def of_policy(self, size: int) -> Step:
        """The same cycle with the first `size` drafted nodes only, those that the policy knows; others may follow."""
        if size == len(self.drafted):
            return self
        import torch

        kept = self.kept[self.kept < size]
        tree, drafted = self.tree.select(torch.arange(len(kept))), self.drafted.select(torch.arange(size))
        return replace(self, tree=tree, drafted=drafted, kept=kept, path=self.path[self.path < len(kept)])

    @property
    def node_arrays(self) -> NodeArrays:
        """The drafted nodes, and which were verified and accepted, in numpy."""
        kept = self.kept.numpy()
        return NodeArrays(self.drafted.arrays, kept, kept[self.path.numpy()])

    @property
    def drafted_tokens(self) -> int:
        """Drafted nodes."""
        return len(self.drafted) - 1

    @cached_property
    def rows(self) -> int:
        """Verified nodes, the root included."""
        return len(self.tree)


class PlainStep(Step):
    """A Step of known values without tensors. `text` is a subclass's, or empty."""

    _counts: Counts
    _nodes: NodeArrays

    def __init__(
        self,
        tokens: tuple[int, ...],
        counts: Counts,
        finish: str | None = None,
        logprobs: tuple[TokenLogprob, ...] | None = None,
        prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None,
    ):
        known = self.__dict__  # a Step is frozen, and this is made for every request in every round
        known["tokens"], known["_counts"] = tokens, counts
        if finish is not None:
            known["finish"] = finish
        if logprobs is not None or prompt_logprobs is not None:
            known["logprobs"], known["prompt_logprobs"] = logprobs, prompt_logprobs

    def add_tree(self, nodes: NodeArrays, seconds: Split, whole_tree: bool) -> None:
        """Add what is needed to describe the cycle."""
        self.__dict__.update(_nodes=nodes, seconds=seconds, whole_tree=whole_tree)

    @property
    def counts(self) -> Counts:
        return self._counts

    @property
    def rows(self) -> int:
        return self._counts[1]

    @property
    def accepted(self) -> int:
        return self._counts[2]

    @property
    def drafted_tokens(self) -> int:
        return self._counts[3]

    @property
    def draft_passes(self) -> int:
        return self._counts[4]

    @property
    def node_arrays(self) -> NodeArrays:
        return self._nodes

    @cached_property
    def seconds(self) -> Split:
        return Split()

    @cached_property
    def text(self) -> str:
        return ""
