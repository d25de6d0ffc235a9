"""Draft with Medusa heads (Cai et al. 2024), which all run in the first pass of a cycle, on the target's last state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from windfall.core.options import option
from windfall.core.sampling import Dice
from windfall.core.tree import DraftTree
from windfall.core.types import Grow, InputError
from windfall.drafters.base import Drafter, add_children

if TYPE_CHECKING:
    from windfall.heads.base import DraftHead
    from windfall.heads.medusa import Medusa
    from windfall.model.target import Target

H = TypeVar("H", bound="DraftHead")


@dataclass
class MedusaDrafter(Drafter):
    """Medusa heads: nodes of one depth have the same children; the tree is at most as deep as there are heads.

    A fixed tree should not be deeper: give `static` and `gt-static` a row of accuracies for each head.
    """

    model: Any = option(None, "folder or hub id of Medusa heads, or loaded ones; there is no default")

    def attach(self, target: Target) -> None:
        from windfall.heads.medusa import Medusa

        self._heads: Medusa = find_heads(self.model, Medusa, target, "medusa")

    @property
    def taps(self) -> tuple[int, ...]:
        return self._heads.config.taps

    def start(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Sequence[Dice | None]) -> None:
        self._dice: list[Dice | None] = []
        self._features: list[Tensor] = []  # [1, H] of the token before the root; [0, H]: none yet
        self._levels: list[Levels | None] = []
        self.join(prompts, hidden, dice)

    def join(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Sequence[Dice | None]) -> None:
        assert hidden is not None
        self._dice += dice
        self._features += [own[-1:].clone() for own in hidden]
        self._levels += [None] * len(prompts)

    @torch.inference_mode()
    def expand(self, trees: list[DraftTree], grows: Sequence[Grow | None]) -> list[DraftTree]:
        ready = [b for b, grow in enumerate(grows) if grow is not None and len(self._features[b])]
        self._guess([b for b in ready if self._levels[b] is None])
        grown = list(trees)
        for b in ready:
            levels, grow = self._levels[b], grows[b]
            assert levels is not None and grow is not None
            grown[b] = levels.expand(trees[b], grow)
        return grown

    def _guess(self, places: list[int]) -> None:
        """Run all heads for these sequences at once."""
        if not places:
            return
        features = torch.cat([self._features[b] for b in places])  # [n, H]
        logq = torch.log_softmax(self._heads.logits(self._heads.states(features)).float(), -1)  # [heads, n, Vd]
        for row, b in enumerate(places):
            self._levels[b] = Levels(logq[:, row], self._dice[b], self._heads.draft_tokens)

    def commit(
        self, trees: list[DraftTree], paths: list[Tensor], bonus: list[int], hidden: list[Tensor] | None
    ) -> None:
        assert hidden is not None
        self._features = [own[-1:].clone() for own in hidden]
        self._levels = [None] * len(trees)

    def retain(self, keep: list[int]) -> None:
        self._features, self._dice = [self._features[b] for b in keep], [self._dice[b] for b in keep]
        self._levels = [self._levels[b] for b in keep]


class Levels:
    """The drafts of one sequence in a cycle: the children of every node of a depth."""

    def __init__(self, logq: Tensor, dice: Dice | None, names: Tensor | None):
        self.logq, self.dice, self.names = logq, dice, names  # [heads, Vd]; target ids of the Vd tokens
        self._asked = (0, False)  # the largest k so far, and whether with entropies

    def expand(self, tree: DraftTree, grow: Grow) -> DraftTree:
        """Add the requested number of children to each node."""
        stem, depth = self._stem(grow), len(self.logq)
        nodes = grow.nodes[tree.depth[grow.nodes] < depth]
        if grow.entropy:
            tree = tree.measure(nodes, stem.entropy[tree.depth[nodes]])
        own = (stem.parents[depth:] == tree.depth[nodes][:, None]) & (stem.rank[depth:] < grow.k)  # [n, children]
        row, child = own.nonzero(as_tuple=True)
        child = child + depth
        return tree.extend(nodes[row], stem.tokens[child], stem.logq[child], stem.rank[child])

    def _stem(self, grow: Grow) -> DraftTree:
        """A chain with a node for each depth, followed by every node's children; made once for all nodes."""
        k, measured = self._asked
        if grow.k > k or (grow.entropy and not measured):
            self._asked = (max(k, grow.k), measured or grow.entropy)
            chain = DraftTree.root(0)
            for place in range(len(self.logq) - 1):
                chain = chain.extend(
                    torch.tensor([place]), torch.zeros(1).long(), torch.zeros(1), torch.zeros(1).long()
                )
            request = grow._replace(nodes=torch.arange(len(chain)), k=self._asked[0], entropy=self._asked[1])
            self._made = add_children(chain, request, self.logq, self.dice, self.names)
        return self._made


def find_heads(model: Any, wanted: type[H], target: Target, kind: str) -> H:
    """Heads of the wanted class and kind that fit the target; an InputError if there are none."""
    from windfall.heads.loading import find_head

    if model is None:
        raise InputError(
            f"the {kind} drafter needs heads trained for {target.name}: give their folder or hub id as the drafter"
        )
    head = find_head(model, target, kind)
    assert isinstance(head, wanted)
    return head
