"""Block heads: every anchor of a text predicts a block of tokens in one pass, each with the target's distribution.

The rows of a block are trained as they draft: they see the text before the anchor, and no token after it. The pair
scores see the text's token before the predicted one (teacher forcing).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from windfall.core.options import option
from windfall.heads.block import BlockHead
from windfall.train.batch import send
from windfall.train.block_losses import BlockRows, Settings, block_figures, distill_blocks, label_chances
from windfall.train.block_memory import Blocks, PaddedSizes, new_memory
from windfall.train.losses import Report
from windfall.train.mixtures import KL
from windfall.train.new_block import check_shape, new_block
from windfall.train.objectives.base import Distilling
from windfall.train.step_weights import HELP, decaying, dpace
from windfall.train.teacher import Teacher, TeacherOutput
from windfall.train.unroll import text_rows


@dataclass
class BlockLoss(Distilling):
    """First the cross-entropy, then `loss`; always with a share of the cross-entropy without pair scores."""

    drafter: ClassVar[str] = "block"

    share: float = option(0.5, "share of the answers' positions at which a block begins", low=0.01, high=1)
    anchors: int = option(512, "most blocks of a text", low=1)
    step_weights: str = option("exp", HELP, choices=("exp", "dpace"))
    first: float = option(0.4, "share of the training that uses the loss kl; after it, `loss` is used", low=0, high=1)
    unary: float = option(0.3, "weight of kl without pair scores, beside the loss with them", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sizes = PaddedSizes(self.share)

    def check_shape(self, shape: dict[str, Any]) -> None:
        check_shape(shape)

    def new_head(self, target: Any, shape: dict[str, Any]) -> BlockHead:
        return new_block(target, shape)

    def report(self, head: Any, outputs: TeacherOutput, teacher: Teacher, progress: float) -> Report:
        if not head.training:
            head.prepare()  # its tables may be those of earlier weights
        anchors = choose_anchors(outputs.batch.answered, self.share, self.anchors, head.training)
        rows, text, vocabularies = self.rows(head, outputs, anchors), text_rows(outputs), teacher.vocabularies(head)
        final = outputs.final[outputs.batch.rows]
        if self.step_weights == "dpace" and head.training:
            weights = dpace(label_chances(rows, vocabularies, text.tokens), rows.valid)
        else:
            weights = decaying(rows.valid)
        goal = self.goal(head, text)
        settings = Settings(goal._replace(mixture=KL) if progress < self.first else goal, self.unary)
        report = distill_blocks(rows, final, vocabularies, weights / max(1, rows.valid.shape[1]), settings)
        if head.training:
            return report
        figures = block_figures(rows, final, vocabularies, text, head.config.candidates)
        return report._replace(figures=figures)

    def rows(self, head: BlockHead, outputs: TeacherOutput, anchors: Tensor) -> BlockRows:
        """The rows of the blocks at these anchors that predict tokens."""
        tokens, skipped = outputs.batch.tokens, head.config.first_row
        blocks, answered = Blocks.where(anchors, tokens.device), send(outputs.batch.answered, tokens.device)
        normed = head.normed(block_states(head, outputs, blocks, self._sizes))
        states, places = normed[:, skipped:].transpose(0, 1), blocks.positions(head.config.depth)  # [D, N, H], [N, D]
        inside = places.clamp(max=answered.shape[1] - 1)
        valid = (answered[blocks.texts[:, None], inside] & (places == inside)).cumprod(1).bool().T
        first = (outputs.batch.answered.flatten().cumsum(0) - 1)[anchors.flatten()]
        predicted = send(first, tokens.device) + torch.arange(head.config.depth, device=tokens.device)[:, None]
        predicted = predicted.clamp(max=len(outputs.batch.rows.texts) - 1)
        queries = keys = None
        if head.pair is not None:
            before = tokens[blocks.texts[:, None], inside]
            carry, found = head.first_carry(before[:, 0], normed), []
            for own, previous in zip(states, before.T, strict=True):
                query, carry = head.pair.query(previous, own, carry)
                found.append(query)
            queries, keys = torch.stack(found), head.pair.keys(torch.arange(len(head.vocabulary), device=tokens.device))
        return BlockRows(states, queries, keys, head.config.softcap, first, predicted, valid)


def block_states(head: BlockHead, outputs: TeacherOutput, blocks: Blocks, sizes: PaddedSizes) -> Tensor:
    """The states [N, rows, H] of these blocks, each as if the text ended at its anchor."""
    tokens, features = outputs.batch.tokens, outputs.features[:, :-1]
    memory = new_memory(head.config, blocks, sizes)
    places = torch.arange(features.shape[1], device=tokens.device).expand(len(tokens), -1)
    head.remember(head.context(features), places, memory)
    states: Tensor = head(tokens[blocks.texts, blocks.starts], blocks.positions(head.config.block), memory)
    return states


def choose_anchors(answered: Tensor, share: float, most: int, random: bool) -> Tensor:
    """The rows [B, L - 1] bool at which a block begins: of each text a `share` of its answer rows, but at most `most`.

    They are chosen at random or evenly spaced. Both masks are on the host.
    """
    places, count = answered.cumsum(1), answered.sum(1, keepdim=True)
    kept = (count * share).ceil().clamp(max=most)
    if random:
        order = torch.rand(answered.shape).masked_fill(~answered, 2).argsort(1)
        chosen = torch.arange(answered.shape[1]).expand_as(order) < kept
        return torch.zeros_like(answered).scatter(1, order, chosen)
    return answered & ((places * kept / count).floor() > ((places - 1) * kept / count).floor())
