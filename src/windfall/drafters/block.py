"""Draft with a block head: the first pass of a cycle predicts all levels, later passes only score pairs of tokens.

The head's KV cache holds committed positions only, with keys and values made of the target's hidden states. Nothing of
a block is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from windfall.core.levels import entropies, find_level
from windfall.core.options import option
from windfall.core.sampling import Dice
from windfall.core.tree import DraftTree
from windfall.core.types import Grow
from windfall.drafters.base import BlockForm, GpuForm, add_children
from windfall.drafters.head_drafter import FOLLOWS_LENGTH, MAX_CHUNK, HeadDrafter, HeadMemory
from windfall.drafters.medusa import find_heads

if TYPE_CHECKING:
    from windfall.heads.block import BlockConfig, BlockHead, Visibility
    from windfall.model.target import Target

COUPLED_FACTOR = 2  # more candidates in coupled drafting: noise and pair scores together lift more tokens


@dataclass
class BlockDrafter(HeadDrafter["BlockHead"]):
    """A block head: one pass predicts all levels; the tree is at most as deep as the head's block.

    DFlash, DFlash 2, DSpark and JetSpec heads are block heads.
    """

    model: Any = option(None, "folder or hub id of a block head, or a loaded one; there is no default")

    candidates: int | None = option(
        None, "children that a node can have; none: as many as the head says, twice as many in coupled drafting", low=1
    )

    kind: ClassVar[str] = "block"

    def attach(self, target: Target) -> None:
        super().attach(target)
        self.head.prepare()

    def find_head(self, target: Target) -> BlockHead:
        from windfall.heads.block import BlockHead

        return find_heads(self.model, BlockHead, target, self.kind)

    def start(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Sequence[Dice | None]) -> None:
        self._dice: list[Dice | None] = []
        self._memory = BlockMemory(self.head.config)
        self._unseen: list[Tensor] = []  # [n, taps * H] features of committed positions that are not in the KV cache
        self._blocks: list[Block | None] = []  # of this cycle
        self.join(prompts, hidden, dice)

    def join(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Sequence[Dice | None]) -> None:
        assert hidden is not None
        self._dice += dice
        self._memory.cache.append(len(prompts))
        self._unseen += hidden
        self._blocks += [None] * len(prompts)

    @torch.inference_mode()
    def expand(self, trees: list[DraftTree], grows: Sequence[Grow | None]) -> list[DraftTree]:
        ready = [b for b, grow in enumerate(grows) if grow is not None and self._fits(b)]
        self._run([b for b in ready if self._blocks[b] is None], trees)
        grown = list(trees)
        for b in ready:
            block, grow = self._blocks[b], grows[b]
            assert block is not None and grow is not None
            grown[b] = block.expand(trees[b], grow)
        return grown

    def commit(
        self, trees: list[DraftTree], paths: list[Tensor], bonus: list[int], hidden: list[Tensor] | None
    ) -> None:
        assert hidden is not None
        self._unseen = [torch.cat([own, fresh]) for own, fresh in zip(self._unseen, hidden, strict=True)]
        self._blocks = [None] * len(trees)

    def retain(self, keep: list[int]) -> None:
        self._memory.cache.retain(keep)
        self._unseen, self._dice = [self._unseen[b] for b in keep], [self._dice[b] for b in keep]
        self._blocks = [self._blocks[b] for b in keep]

    def _fits(self, b: int) -> bool:
        """Whether the head has positions for a block."""
        longest = self.longest
        used = self._memory.cache.lengths[b] + len(self._unseen[b])
        return longest is None or used + self.head.config.block <= longest

    def _run(self, places: list[int], trees: list[DraftTree]) -> None:
        """One pass over the blocks of these sequences, after what was committed since the last one."""
        if not places:
            return
        head, memory = self.head, self._memory
        with memory.only(places):
            while any(len(self._unseen[b]) for b in places):
                self._remember(places)
            anchors = torch.tensor([int(trees[b].tokens[0]) for b in places], device=head.device)
            normed = head.normed(head(anchors, memory.prepare_block(head.device), memory))
            carry = head.first_carry(anchors, normed)
        normed = normed[:, head.config.first_row :]
        logits = head.vocabulary_logits(normed)
        for row, b in enumerate(places):
            start = None if carry is None else carry[row]
            self._blocks[b] = Block(head, normed[row], logits[row], start, self._dice[b], self._count(b))

    def _remember(self, places: list[int]) -> None:
        """Take up to a chunk of each sequence's unseen features into the KV cache."""
        cache, head = self._memory.cache, self.head
        taken = [self._unseen[b][:MAX_CHUNK] for b in places]
        starts = torch.tensor(cache.lengths, device=head.device)
        features = pad_sequence(taken, batch_first=True)  # what is padded is not committed
        size = features.shape[1]
        cache.reserve(size)
        head.remember(head.context(features), starts[:, None] + torch.arange(size, device=head.device), self._memory)
        cache.staged += size
        cache.commit([list(range(len(own))) for own in taken])
        for b, own in zip(places, taken, strict=True):
            self._unseen[b] = self._unseen[b][len(own) :]

    def _count(self, b: int) -> int:
        return self._counts[self._dice[b] is not None]

    @property
    def _counts(self) -> tuple[int, int]:
        """Candidates of a level, and those in coupled drafting."""
        config, tokens = self.head.config, self.head.draft_tokens
        drafted, own = config.vocab_size if tokens is None else len(tokens), self.candidates or config.candidates
        return min(own, drafted), min(own if self.candidates else COUPLED_FACTOR * own, drafted)

    def gpu_form(self) -> GpuForm | str:
        return BlockForm(self.head, *self._counts) if self.longest is None else FOLLOWS_LENGTH


class Block:
    """The levels of one sequence in a cycle, and the children of its nodes."""

    def __init__(
        self, head: BlockHead, normed: Tensor, logits: Tensor, carry: Tensor | None, dice: Dice | None, count: int
    ):
        self._pair, self._names = head.pair, head.draft_tokens
        self._normed, self._logits, self._count = normed, logits.float(), count  # [levels, H] and [levels, Vd]
        scores, weight = self._logits, 1.0
        if dice is not None:
            scores, weight = dice.race(scores, torch.arange(len(scores)), self._names), dice.weight
        self._level = find_level(scores, count, weight)
        self._plain = self._level if dice is None else None  # the level without noise, for entropies
        self._carries: dict[int, Tensor | None] = {-1: carry}  # by expanded node; -1: before the root

    def expand(self, tree: DraftTree, grow: Grow) -> DraftTree:
        """Add children to the nodes that are above the last level."""
        nodes = grow.nodes[tree.depth[grow.nodes] < len(self._normed)]
        if not len(nodes):
            return tree
        depths = tree.depth[nodes].to(self._normed.device)
        query = self._query(tree, nodes, depths)
        if grow.entropy:
            if self._plain is None:
                self._plain = find_level(self._logits, self._count)
            found = entropies(self._logits, self._plain, self._scores(query, self._plain.tokens[depths]), depths)
            tree = tree.measure(nodes, found.cpu())
        level = self._level.at(depths)
        logq = level.log_probabilities(self._scores(query, level.tokens))
        names = level.tokens if self._names is None else self._names[level.tokens]
        return add_children(tree, grow._replace(nodes=nodes, entropy=False), logq, None, names)

    def _query(self, tree: DraftTree, nodes: Tensor, depths: Tensor) -> Tensor | None:
        """[n, R], from each node's token, its level's state and what its path carries."""
        if self._pair is None:
            return None
        before = [self._carries.get(parent) for parent in tree.parents[nodes].tolist()]
        known = [own for own in before if own is not None]  # all or none: a node's parent was expanded before it
        states, tokens = self._normed[depths], tree.tokens[nodes].to(depths.device)
        query, after = self._pair.query(tokens, states, torch.stack(known) if known else None)
        if after is not None:
            self._carries.update(zip(nodes.tolist(), after, strict=True))
        return query

    def _scores(self, query: Tensor | None, candidates: Tensor) -> Tensor | None:
        """Pair scores [n, K]."""
        if self._pair is None or query is None:
            return None
        return (query[:, None].float() * self._pair.keys(candidates).float()).sum(-1)


class BlockMemory(HeadMemory):
    """The KV cache of committed positions, and the masks of a block."""

    def __init__(self, config: BlockConfig):
        super().__init__(config.layer.num_hidden_layers, 0, config.windows)
        self._config = config
        self._masks: dict[Visibility, Tensor] = {}

    def prepare_block(self, device: torch.device) -> Tensor:
        """Set the masks for a block after the last committed position of each sequence; returns its positions."""
        from windfall.heads.block import block_mask

        cache, size = self.cache, self._config.block
        starts = torch.tensor(cache.lengths, device=device)[:, None]
        columns = torch.arange(cache.top, device=device).expand(len(starts), -1)
        kinds = {self._config.visibility(layer) for layer in range(len(cache.layers))}
        self._masks = {visible: block_mask(columns, starts, size, visible) for visible in kinds}
        cache.reserve(size)
        return starts + torch.arange(size, device=device)

    def mask_of(self, layer: int) -> Tensor | None:
        return self._masks[self._config.visibility(layer)]
