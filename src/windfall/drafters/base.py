"""The contract of a drafter: it serves all live sequences in one pass, and never judges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from windfall.core import options
from windfall.core.sampling import Dice
from windfall.core.tree import DraftTree, Floats, Integers
from windfall.core.types import Grow

if TYPE_CHECKING:
    from windfall.model.target import Target

BLOCK = 64  # of candidates


@dataclass
class Drafter:
    """Proposes continuations. Lists have one entry per live sequence, always in the same order.

    Subclasses are dataclasses whose fields (made with `option`) are what a user can set; they become usable with
    `attach`. What is drafted must be a deterministic function of the tokens (and, at temperature above 0, of the
    noise that belongs to their positions): that is what makes the engine's walk exact.
    """

    def __post_init__(self) -> None:
        options.check(self)

    @property
    def taps(self) -> tuple[int, ...]:
        """The target states that it reads, by layer boundary (see `model.hidden_states`); known once attached."""
        return ()

    def attach(self, target: Target) -> None:
        """Meet the target; refuse it (InputError) if the two do not fit."""

    def expect(self, length: int) -> None:
        """A text of up to `length` tokens is about to start; warn (HeadWarning), once, if that is too long."""

    def start(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Sequence[Dice | None]) -> None:
        """Take new sequences, dropping all earlier ones.

        `hidden` covers every prompt token but the last; `dice` is what `sprout` wants, one for each sequence.
        """
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


def sprout(tree: DraftTree, grow: Grow, logq: Tensor, dice: Dice | None, tokens: Tensor | None = None) -> DraftTree:
    """Hang the k likeliest children under each of grow.nodes; logq [n, M] are the drafter's log-probabilities.

    `tokens` names the candidates where they are not the whole vocabulary: [M] the same for all nodes, or [n, M]; -inf
    marks an empty place, and ties keep the order given. With `dice` the children are ranked by what the target is going
    to draw. Every drafter turns scores into children here and nowhere else, so that coupling, ties and precision are
    the same for all.
    """
    logq = logq.float()
    if grow.entropy:
        chances = logq.exp()
        rest = (1 - chances.sum(-1)).clamp(min=0)  # of candidates that were not named
        tree = tree.measure(grow.nodes, (torch.special.entr(chances).sum(-1) + torch.special.entr(rest)).cpu())
    if dice is not None:
        logq = dice.couple(logq, tree.depth[grow.nodes], tokens)
    if tokens is None or tokens.dim() == 1:
        values, order = likeliest(logq, min(grow.k, logq.shape[-1]))
        picked = (order if tokens is None else tokens[order]).cpu()
    else:
        values, order = logq.sort(dim=-1, descending=True, stable=True)
        values, picked = values[:, : grow.k], tokens.gather(1, order[:, : grow.k]).cpu()
    return hang(tree, grow.nodes, picked, values.cpu())


def likeliest(logq: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row [n, M] and their places; on a CPU first the best blocks, then the best within them."""
    rows, size = logq.shape
    if logq.device.type != "cpu" or size % BLOCK or size < 2 * k * BLOCK:
        found = logq.topk(k, dim=-1)
        return found.values, found.indices
    blocks = logq.view(rows, -1, BLOCK)
    best = blocks.amax(-1).topk(k, dim=-1, sorted=False).indices  # [n, k]: nothing elsewhere is among the k largest
    values, place = blocks.gather(1, best[..., None].expand(-1, -1, BLOCK)).flatten(1).topk(k, dim=-1)
    return values, best.gather(1, place // BLOCK) * BLOCK + place % BLOCK


def hang(tree: DraftTree, nodes: Tensor, tokens: Tensor, logq: Tensor) -> DraftTree:
    """Hang children [n, k] under these nodes, the likeliest first; -inf marks an empty place."""
    return hang_arrays(tree, nodes.numpy(), tokens.numpy(), logq.float().numpy())


def hang_arrays(tree: DraftTree, nodes: Integers, tokens: Integers, logq: Floats) -> DraftTree:
    """`hang` in numpy."""
    rows, rank = np.isfinite(logq).nonzero()
    return tree.append(nodes[rows], tokens[rows, rank], logq[rows, rank], rank)
