"""The contract of a drafter: it serves all live sequences in one pass, and never judges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from windfall import options
from windfall.records import Grow
from windfall.tree import DraftTree

if TYPE_CHECKING:
    from windfall.target import Target


@dataclass
class Drafter:
    """Proposes continuations. Lists have one entry per live sequence, always in the same order.

    Subclasses are dataclasses whose fields (made with `option`) are what a user can set; they become usable with
    `attach`. What is drafted must be a deterministic function of the tokens (and, at temperature above 0, of the
    noise that belongs to their positions): that is what makes the engine's walk exact.
    """

    def __post_init__(self) -> None:
        options.check(self)

    def attach(self, target: Target) -> None:
        """Meet the target; refuse it (InputError) if the two do not fit."""

    def start(self, prompts: list[list[int]], hidden: list[Tensor] | None) -> None:
        """Take new sequences, dropping all earlier ones; `hidden` covers every prompt token but the last."""
        raise NotImplementedError

    def begin(self, tokens: list[int]) -> list[DraftTree]:
        """A tree of one node for each sequence's last committed token."""
        return [DraftTree.root(token) for token in tokens]

    def expand(self, trees: list[DraftTree], grows: Sequence[Grow | None]) -> list[DraftTree]:
        """One pass for all sequences: children for the nodes of each grow; None leaves a tree as it is."""
        raise NotImplementedError

    def commit(
        self, trees: list[DraftTree], paths: list[Tensor], bonus: list[int], hidden: list[Tensor] | None
    ) -> None:
        """The accepted nodes of the drafted trees (root first) and the token that follows each path."""
        raise NotImplementedError

    def retain(self, keep: list[int]) -> None:
        """Go on with these sequences only."""
        raise NotImplementedError


def children(logq: Tensor, k: int, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Draft log-probabilities [n, M] → the k likeliest tokens and their log-probabilities, each [n, k], on the host.

    `tokens` [n, M] names the candidates where they are not the whole vocabulary, -inf marks an empty place, and ties
    keep the order given. Every drafter turns scores into children here and nowhere else, so that ties and precision
    are the same for all.
    """
    logq = logq.float()
    if tokens is None:
        top = torch.topk(logq, min(k, logq.shape[-1]), dim=-1)
        return top.indices.cpu(), top.values.cpu()
    values, order = logq.sort(dim=-1, descending=True, stable=True)
    return tokens.gather(1, order[:, :k]).cpu(), values[:, :k].cpu()


def attach_children(tree: DraftTree, grow: Grow, tokens: Tensor, logq: Tensor) -> DraftTree:
    """Hang the rows of `children` [n, k] under grow.nodes, likeliest first, leaving out what has no probability."""
    rows, rank = torch.isfinite(logq).nonzero(as_tuple=True)
    return tree.extend(grow.nodes[rows], tokens[rows, rank], logq[rows, rank], rank)
