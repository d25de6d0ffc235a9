"""The beam trees that the target itself would draft, grown from columns of a text; TALF trains on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from windfall.model.batch import Packed
from windfall.model.decoder import Decoder, tree_attention
from windfall.model.pass_lock import pass_lock
from windfall.train.batch import send
from windfall.train.losses import LogitTransform

MAX_LOGITS = 2**26  # in memory at a time
MAX_ROOTS = 64  # columns of each text whose trees are grown together


class Level(NamedTuple):
    """All nodes of one depth, k for each root."""

    tokens: Tensor  # [B, R, k]
    parents: Tensor  # [B, R, k]: the parent's index among the k nodes above; 0 below a root
    labels: Tensor  # [B, R, k, Ht]: the target's final states at the nodes


class Trees(NamedTuple):
    """A tree for each chosen column: its root has read the token of that column and predicts the next one."""

    columns: Tensor  # [B, R]
    valid: Tensor  # [B, R] bool, on the host: the others are padding
    levels: list[Level]  # from depth 1 on


@dataclass(frozen=True)
class TreeShape:
    """Beams of `k` nodes and `depth` levels below the root; `forced`: the text's own tokens are always in the tree."""

    k: int = 4
    depth: int = 2
    forced: bool = False


def choose_roots(answer: Tensor, share: float = 1.0, random: bool = True) -> tuple[Tensor, Tensor]:
    """Columns [B, R] whose next token the target generated, and which of them are not padding, all on the host.

    `share` of them are chosen, at random or evenly spaced.
    """
    wanted = answer[:, 2:].clone()  # by column
    if share < 1 and random:
        wanted &= torch.rand(wanted.shape) < share
    elif share < 1:
        wanted &= wanted.cumsum(1) % max(1, round(1 / share)) == 0
    if not wanted.shape[1]:
        wanted = answer[:, :1] & False
    most = max(1, int(wanted.sum(1).max()))
    columns = wanted.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    return columns, wanted.gather(1, columns)


def ancestors(parents: list[Tensor]) -> list[Tensor]:
    """For the nodes of the last level [.., k], the index of each one's ancestor in every level, its own last."""
    indices = [torch.arange(parents[-1].shape[-1], device=parents[-1].device).expand_as(parents[-1])]
    for above in reversed(parents[1:]):
        indices.insert(0, above.gather(-1, indices[0]))
    return indices


def tree_mask(last: Tensor, columns: int, lineage: list[Tensor]) -> Tensor:
    """The attention mask of the newest level, [B, R * k, columns + levels * R * k] bool.

    A node sees the text up to column `last` [B, R] of `columns`, and its own ancestor in each level.
    """
    batch, roots, k = lineage[0].shape
    text = torch.arange(columns, device=last.device) <= last[:, :, None]  # [B, R, columns]
    same_tree = torch.eye(roots, dtype=torch.bool, device=last.device)[:, None, :, None]
    nodes = torch.arange(k, device=last.device)
    blocks = [same_tree & (indices[..., None] == nodes)[:, :, :, None] for indices in lineage]  # [B, R, k, R, k]
    flat = [block.reshape(batch, roots * k, roots * k) for block in blocks]
    return torch.cat([text.repeat_interleave(k, 1), *flat], -1)


def take_rows(rows: Tensor, indices: Tensor) -> Tensor:
    """rows [B, n, H], indices [B, m] → [B, m, H]."""
    return rows.gather(1, indices[..., None].expand(-1, -1, rows.shape[-1]))


class TreeGrower(Decoder):
    """A target whose cache holds whole texts and, after them, the trees of a few columns at a time."""

    def __init__(self, model: Any):
        super().__init__(model)
        self.output, self.logit_transform = model.get_output_embeddings(), LogitTransform.of(self.config)
        self._positions = self.context or 2**31  # available; trees that need more are marked invalid

    @torch.no_grad()
    def grow(self, tokens: Tensor, final: Tensor, roots: tuple[Tensor, Tensor], shape: TreeShape) -> Trees:
        """Grow the target's beam trees: the k likeliest next tokens, then the k likeliest paths of one more token.

        tokens [B, L], the target's final states over them, final [B, L, Ht], and what `choose_roots` returned.
        """
        columns, valid = send(roots[0], tokens.device), roots[1] & (roots[0] + 1 + shape.depth < self._positions)
        self._prefill(tokens)
        size = max(1, min(MAX_ROOTS, MAX_LOGITS // (len(tokens) * shape.k * self.vocab_size)))
        parts = [self._grow(tokens, final, part, shape) for part in torch.split(columns, size, 1)]
        self.reset(0)
        levels = [Level(*(torch.cat(x, 1) for x in zip(*same, strict=True))) for same in zip(*parts, strict=True)]
        return Trees(columns, valid, levels)

    def _prefill(self, tokens: Tensor) -> None:
        """Fill the empty cache with whole texts. Padding is included; no valid row attends to it."""
        batch, length = tokens.shape
        self.reset(batch)
        causal = torch.ones(1, length, length, dtype=torch.bool, device=tokens.device).tril()
        positions = torch.arange(length, device=tokens.device)
        self._states(Packed(tokens, positions.expand(batch, -1), causal.expand(batch, -1, -1)), causal=True)
        self.cache.lengths, self.cache.staged = [length] * batch, 0

    def _grow(self, tokens: Tensor, final: Tensor, columns: Tensor, shape: TreeShape) -> list[Level]:
        self.cache.staged = 0
        self._staged_positions = columns[:, :0]
        beam = Beam(self, tokens, columns, shape)
        states, scores = take_rows(final, columns + 1)[:, :, None], columns[..., None] * 0.0  # of the roots
        levels: list[Level] = []
        for depth in range(1, shape.depth + 1):
            beam.extend(states, scores)
            lineage = ancestors([level.parents for level in levels] + [beam.parents])
            mask = tree_mask(columns + 1, tokens.shape[1], lineage)
            positions = (columns + 1 + depth).clamp(max=self._positions - 1).repeat_interleave(shape.k, 1)
            flat = self._states(Packed(beam.tokens.flatten(1), positions, mask), causal=False)
            states, scores = flat.reshape(*beam.tokens.shape, -1), beam.scores
            levels.append(Level(beam.tokens, beam.parents, states))
        return levels

    def _states(self, packed: Packed, causal: bool) -> Tensor:
        """One forward pass whose rows are staged after those in the cache: final states [B, n, Ht]."""
        width = packed.tokens.shape[1]
        self.cache.reserve(width)
        with pass_lock(self.model), tree_attention(self.model):
            outputs = self.model.base_model(
                input_ids=packed.tokens,
                position_ids=packed.positions,
                attention_mask=self._mask(packed, causal),
                past_key_values=self.cache,
                use_cache=True,
            )
        self.cache.staged += width
        self._staged_positions = torch.cat([self._staged_positions, packed.positions], 1)
        states: Tensor = outputs.last_hidden_state
        return states

    def best(self, states: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """The k likeliest tokens after states [.., Ht], their log-probabilities, and all log-probabilities [.., V]."""
        logits = self.logit_transform(self.output(states.to(self.output.weight.dtype)).float())
        logp = logits - logits.logsumexp(-1, keepdim=True)
        top = logp.topk(k, -1)
        return top.indices, top.values, logp


class Beam:
    """The newest level of some trees: `tokens`, `parents` and path `scores`, [B, R, k] each."""

    def __init__(self, grower: TreeGrower, text: Tensor, columns: Tensor, shape: TreeShape):
        self._grower, self._text, self._columns, self._shape = grower, text, columns, shape
        self._depth = 0
        self._forced_node = torch.zeros_like(columns)  # index of the text's own token in the level, if forced

    def extend(self, states: Tensor, scores: Tensor) -> None:
        """Take the best children of nodes with states [B, R, n, Ht] and path scores [B, R, n]."""
        k = self._shape.k
        tokens, logp, every = self._grower.best(states, k)
        found = (scores[..., None] + logp).flatten(2).topk(k, -1)  # of [B, R, n * k]
        self.scores, self.parents = found.values, found.indices // k
        self.tokens = tokens.flatten(2).gather(-1, found.indices)
        self._depth += 1
        if self._shape.forced:
            self._force(scores, every)

    def _force(self, scores: Tensor, logp: Tensor) -> None:
        """Put the text's own token in the last place if the beam lacks it and the text is long enough."""
        places = self._columns + 1 + self._depth
        there = places < self._text.shape[1]
        wanted = self._text.gather(1, places.clamp(max=self._text.shape[1] - 1))  # [B, R]
        parent = self._forced_node[..., None]
        hit = (self.tokens == wanted[..., None]) & (self.parents == parent)
        missing = there & ~hit.any(-1)
        after = logp.gather(2, parent[..., None].expand(-1, -1, 1, logp.shape[-1]))[:, :, 0]  # [B, R, V]
        score = scores.gather(-1, parent) + after.gather(-1, wanted[..., None])
        last = missing[..., None] & (torch.arange(self._shape.k, device=missing.device) == self._shape.k - 1)
        self.tokens = torch.where(last, wanted[..., None], self.tokens)
        self.parents = torch.where(last, parent, self.parents)
        self.scores = torch.where(last, score, self.scores)
        self._forced_node = torch.where(missing, self._shape.k - 1, hit.int().argmax(-1))
