"""Block heads computed without a cache, and what they draft by the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.tiny import features_of
from windfall.core.sampling import Dice, gumbel
from windfall.core.tree import DraftTree
from windfall.heads.block import BlockHead, block_mask
from windfall.heads.layers import Unrolled


def run(head: BlockHead, features: Tensor, anchors: Tensor, starts: Tensor, rows: int) -> Tensor:
    """The states [B, blocks * rows, H] of blocks at these positions [B, blocks], in one pass as in training."""
    batch, blocks = starts.shape
    memory = Blocks(head, torch.arange(features.shape[1]).expand(batch, -1), starts, rows)
    head.remember(head.context(features), memory.context, memory)
    positions = (starts[:, :, None] + torch.arange(rows)).flatten(0, 1)
    states = head(anchors.flatten(), positions, memory)
    return states.unflatten(0, (batch, blocks)).flatten(1, 2)


class Blocks(Unrolled):
    """Several blocks of each text at once."""

    def __init__(self, head: BlockHead, context: Tensor, starts: Tensor, rows: int):
        super().__init__()
        self.config, self.context, self.starts, self.size = head.config, context, starts, rows

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        config, blocks = self.config, self.starts.shape[1]
        self.mask = block_mask(self.context, self.starts, self.size, config.visibility(layer))
        together = (x.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3) for x in (queries, keys, values))
        out = super().attend(layer, *together)
        return out.unflatten(2, (blocks, -1)).transpose(1, 2).flatten(0, 1)


@torch.no_grad()
def wanted(head: BlockHead, model: Any, committed: list[int], path: list[int], count: int, dice: Dice | None) -> Tensor:
    """Log-probabilities after the root and these drafted tokens, by the definition, and which are candidates: [2, Vd].

    Candidates have their pair scores, all other tokens their logits alone.
    """
    config, start = head.config, len(committed) - 1
    features = features_of(model, committed[:-1], config.taps)
    states = run(head, features, torch.tensor([committed[-1:]]), torch.tensor([[start]]), config.block)[0]
    normed, logits = head.normed(states), head.logits(states)
    carry = head.first_carry(torch.tensor(committed[-1:]), normed[None])
    tokens = [committed[-1], *path]
    for place, token in enumerate(tokens):
        row = normed[config.first_row + place][None]
        if head.pair is not None:
            query, carry = head.pair.query(torch.tensor([token]), row, carry)
    scores, factor = logits[config.first_row + len(path)].clone(), 1.0
    if dice is not None:
        names = torch.arange(len(scores)) if head.draft_tokens is None else head.draft_tokens
        noise = gumbel(dice.params.noise_seed, torch.tensor([len(committed) + len(path)]), names)[0]
        factor = 1 / (dice.params.temperature * dice.kappa)
        scores = scores * factor + noise / dice.kappa
    best = scores.topk(min(count, len(scores))).indices
    if head.pair is not None:
        for token in best.tolist():
            scores[token] += factor * float((query[0] * head.pair.keys(torch.tensor(token))).sum())
    logq = torch.log_softmax(scores, -1)
    return torch.stack([logq, torch.isin(torch.arange(len(logq)), best)])


def check_children(
    head: BlockHead,
    model: Any,
    committed: list[int],
    tree: DraftTree,
    count: int | None = None,
    dice: Dice | None = None,
) -> None:
    """Every drafted node has the log-probability and the rank that the definition gives it."""
    tree.check()
    for node in range(1, len(tree)):
        path = tree.tokens[tree.path(node)[1:-1]].tolist()
        logq, candidate = wanted(head, model, committed, path, count or head.config.candidates, dice)
        names = torch.arange(len(logq)) if head.draft_tokens is None else head.draft_tokens
        place = int((names == tree.tokens[node]).nonzero())
        assert float(tree.logq[node]) == pytest.approx(float(logq[place]), rel=1e-4, abs=1e-4)
        assert int(tree.rank[node]) == int(((logq > logq[place]) & candidate.bool()).sum())
