"""The interface of a drafter, and how scores become children of a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from windfall.core import options
from windfall.core.levels import most_likely
from windfall.core.sampling import Dice
from windfall.core.tree import DraftTree, Floats, Integers
from windfall.core.types import Grow

if TYPE_CHECKING:
    from windfall.heads.base import FeatureHead
    from windfall.heads.block import BlockHead
    from windfall.model.decoder import Decoder
    from windfall.model.target import Target


class HeadForm(NamedTuple):
    """A drafter that runs one draft head on the target's hidden states at `Drafter.taps`."""

    head: FeatureHead
    eight_bits: bool | None = False  # whether fused kernels read its large weights in int8; None: where that is faster


class BlockForm(NamedTuple):
    """A drafter that runs one block head on the target's hidden states at `Drafter.taps`."""

    head: BlockHead
    candidates: int  # of a level
    coupled_candidates: int  # the same in coupled drafting


class ModelForm(NamedTuple):
    """A drafter that runs one causal language model over the tokens of the text."""

    decoder: Decoder
    vocab_size: int  # the first columns of the model's logits, which are those of the target's vocabulary

    @property
    def last_token(self) -> int | None:
        """The last token that the model can read, if the target's vocabulary is padded further; else None."""
        embedded = self.decoder.embedded
        return embedded - 1 if embedded < self.vocab_size else None


GpuForm = HeadForm | BlockForm | ModelForm


@dataclass
class Drafter:
    """Proposes continuations. Lists have one entry per live sequence, always in the same order.

    Subclasses are dataclasses; their fields made with `option` are what a user can set. A drafter is usable after
    `attach`. What it drafts must be a deterministic function of the tokens (and, with coupled sampling, of the noise
    of their positions): this makes verification exact.
    """

    def __post_init__(self) -> None:
        options.check(self)

    @property
    def taps(self) -> tuple[int, ...]:
        """The target states that it reads, by layer boundary (see `model.hidden_states`); known once attached."""
        return ()

    def attach(self, target: Target) -> None:
        """Prepare to draft for this target; raises an InputError if the two do not fit."""

    def expect(self, length: int) -> None:
        """A text of up to `length` tokens is about to start; warn (HeadWarning) once if that is too long."""

    def start(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Sequence[Dice | None]) -> None:
        """Start new sequences and drop all earlier ones.

        `hidden` are the target states of every prompt token but the last; `dice` is passed to `add_children`.
        """
        raise NotImplementedError

    def join(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Sequence[Dice | None]) -> None:
        """Start more sequences, after those that run; the arguments are those of `start`.

        It is optional: without it, all sequences are started again whenever one joins.
        """
        raise NotImplementedError

    @property
    def can_join(self) -> bool:
        """Whether `join` can be used: a class that overrides `start` must override `join`, too."""
        own = next(vars(each) for each in type(self).__mro__ if "start" in vars(each) or "join" in vars(each))
        return "join" in own and type(self).join is not Drafter.join

    @property
    def row_bytes(self) -> int:
        """Bytes that a token of a sequence takes in the drafter's KV cache."""
        return 0

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
        """Keep these sequences only."""
        raise NotImplementedError

    def gpu_form(self) -> GpuForm | str:
        """What the GPU runner runs in fixed buffers in place of `start` to `retain`; called after `attach`.

        It must draft what `expand` drafts. A string says why there is no such form: then `expand` runs as it is, on
        the host loop. A subclass that changes what `expand` drafts must override this method too.
        """
        return "its drafter works on the host"


def add_children(
    tree: DraftTree, grow: Grow, logq: Tensor, dice: Dice | None, tokens: Tensor | None = None
) -> DraftTree:
    """Add the k most likely children of each of grow.nodes; logq [n, M] are the drafter's log-probabilities.

    `tokens` are the candidates where they are not the whole vocabulary: [M], the same for all nodes, or [n, M]; -inf
    marks an unused candidate. With `dice` the children are ranked by what the target is going to draw. All drafters
    use this function, so that coupling, ties and precision are the same for all.
    """
    logq = logq.float()
    if grow.entropy:
        tree = tree.measure(grow.nodes, _entropies(logq).cpu())
    if dice is not None:
        logq = dice.couple(logq, tree.depth[grow.nodes], tokens)
    if tokens is None or tokens.dim() == 1:
        values, order = most_likely(logq, min(grow.k, logq.shape[-1]))
        picked = (order if tokens is None else tokens[order]).cpu()
    else:
        values, order = logq.sort(dim=-1, descending=True, stable=True)  # ties keep the order given
        values, picked = values[:, : grow.k], tokens.gather(1, order[:, : grow.k]).cpu()
    return add_child_arrays(tree, grow.nodes.numpy(), picked.numpy(), values.cpu().numpy())


def add_children_to_all(
    trees: Sequence[DraftTree],
    grows: Sequence[Grow | None],
    logits: Tensor,
    dice: Sequence[Dice | None],
    tokens: Tensor | None = None,
) -> list[DraftTree]:
    """`add_children` for several trees, whose results come from the device together; None leaves a tree as it is.

    logits [n, M] after the nodes of all grows, tree by tree; `tokens` [M] as in `add_children`.
    """
    counts = [0 if grow is None else len(grow.nodes) for grow in grows]
    logq = torch.log_softmax(logits.float(), -1)
    entropies = _entropies(logq).cpu() if any(grow and grow.entropy for grow in grows) else None
    if any(own is not None for own in dice):
        parts = zip(torch.split(logq, counts), trees, grows, dice, strict=True)
        logq = torch.cat([_coupled(part, tree, grow, own, tokens) for part, tree, grow, own in parts])
    found, order = most_likely(logq, min(max(grow.k for grow in grows if grow), logq.shape[-1]))
    picked, values = (order if tokens is None else tokens[order]).cpu().numpy(), found.cpu().numpy()
    grown, end = [], 0
    for tree, grow, count in zip(trees, grows, counts, strict=True):
        own, end = slice(end, end + count), end + count
        if grow is not None:
            if grow.entropy and entropies is not None:
                tree = tree.measure(grow.nodes, entropies[own])
            tree = add_child_arrays(tree, grow.nodes.numpy(), picked[own, : grow.k], values[own, : grow.k])
        grown.append(tree)
    return grown


def _entropies(logq: Tensor) -> Tensor:
    """Of distributions [n, M], and of the rest, which are tokens that are not candidates."""
    chances = logq.exp()
    rest = (1 - chances.sum(-1)).clamp(min=0)
    found: Tensor = torch.special.entr(chances).sum(-1) + torch.special.entr(rest)
    return found


def _coupled(logq: Tensor, tree: DraftTree, grow: Grow | None, dice: Dice | None, tokens: Tensor | None) -> Tensor:
    """Log-probabilities [n, M] that the target draws each token after the nodes of a grow."""
    return logq if grow is None or dice is None else dice.couple(logq, tree.depth[grow.nodes], tokens)


def add_child_arrays(tree: DraftTree, nodes: Integers, tokens: Integers, logq: Floats) -> DraftTree:
    """Add children [n, k] to these nodes, the most likely first; -inf marks an unused place.

    A probability that rounding has raised above 1 counts as 1, so that no child has a higher score than its parent.
    """
    rows, rank = np.isfinite(logq).nonzero()
    logq = np.minimum(logq, 0)
    return tree.append(nodes[rows], tokens[rows, rank], logq[rows, rank], rank)
