"""The losses of blocks, fused with the vocabularies: logits and pair scores exist for a bounded number of rows.

U are the logits of the head's vocabulary, and U + e those with the pair scores e of the text's tokens before. The rows
of a block overlap with those of its neighbours, so the target's distributions of a stretch of text are computed once
for all blocks that begin there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.train.coupling import TextRows
from windfall.train.losses import Goal, Judge, Labels, Report, Vocabularies, target_logits
from windfall.train.mixtures import KL
from windfall.train.row_losses import draft_indices


class BlockRows(NamedTuple):
    """The rows of N blocks that predict tokens, by depth, and the target's answer rows that they predict."""

    states: Tensor  # [D, N, H], the inputs of the head's vocabulary
    queries: Tensor | None  # [D, N, R], of the pair scores; None: the head has none
    keys: Tensor | None  # [Vd, R]
    softcap: float | None  # limit of U, see `BlockConfig`
    first: Tensor  # [N] long, ascending, on the host: the target's answer row that each block's row 0 predicts
    places: Tensor  # [D, N] long: the answer row that each row predicts, for row d the one d after `first`
    valid: Tensor  # [D, N] bool: whether there is such an answer row in the same answer; else `places` is any row


class Settings(NamedTuple):
    """What to minimise."""

    goal: Goal  # of U + e
    unary: float  # weight of the cross-entropy of U alone, where there are pair scores


def distill_blocks(
    rows: BlockRows, teacher: Tensor, vocabularies: Vocabularies, weights: Tensor, settings: Settings
) -> Report:
    """Σ weights · (loss(U + e) + unary · cross-entropy(U)), over the rows of all blocks; weights [D, N].

    teacher [M, Ht] are the target's states at all answer rows. The figures of the report are those of U + e.
    """
    loss, sums, right = _DistillBlocks.apply(  # type: ignore[no-untyped-call]
        rows.states, rows.queries, rows.keys, vocabularies.draft, rows, teacher, vocabularies, weights, settings
    )
    used = (weights > 0).sum(-1).clamp(min=1)
    return Report(loss, sums / used, right / used)


class _DistillBlocks(torch.autograd.Function):
    """Computes the gradients in the forward pass, while the logits exist."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        queries: Tensor | None,
        keys: Tensor | None,
        vocabulary: Tensor,
        rows: BlockRows,
        teacher: Tensor,
        vocabularies: Vocabularies,
        weights: Tensor,
        settings: Settings,
    ) -> tuple[Tensor, Tensor, Tensor]:
        by_state, by_query, by_key = (None if x is None else torch.zeros_like(x) for x in (states, queries, keys))
        by_key = None if by_key is None else by_key.float()
        by_vocabulary = torch.zeros_like(vocabulary, dtype=torch.float32) if vocabulary.requires_grad else None
        assert by_state is not None
        losses, plain_losses, hits = (torch.zeros_like(weights) for _ in range(3))  # [D, N]
        judge = Judge(vocabularies, Labels(), settings.goal, states.device)
        same = queries is None or not settings.unary or settings.goal.mixture == KL
        plain = judge if same else Judge(vocabularies, Labels(), Goal(), states.device)  # of U alone
        scorer = _Scorer(rows, vocabularies, teacher.dtype)
        for blocks, known in _stretches(rows, len(teacher), judge.rows):
            logits = target_logits(teacher[known], vocabularies)
            for each in {id(own): own for own in (judge, plain)}.values():
                each.take(logits, known)
            del logits
            for part in _parts(rows, blocks, judge.rows):
                weight, place = weights[part].flatten().clone(), rows.places[part].flatten() - known.start
                unary, both, own, query = scorer.logits(part)
                found, slope, hit = judge.losses(both, weight, place)
                losses[part], hits[part] = found.view_as(losses[part]), hit.view_as(hits[part])
                if query is not None:
                    assert scorer.keys is not None and by_query is not None and by_key is not None
                    by_query[part] = (slope @ scorer.keys).view_as(by_query[part])
                    by_key += slope.T @ query
                    if settings.unary:
                        found, more, _ = plain.losses(unary, settings.unary * weight, place)
                        plain_losses[part] = found.view_as(losses[part])
                        slope = slope + more
                if rows.softcap is not None:
                    slope = slope * (1 - (unary / rows.softcap) ** 2)
                by_state[part] = (slope @ scorer.draft).view_as(by_state[part])
                if by_vocabulary is not None:
                    by_vocabulary += slope.T @ own
        by_key = None if by_key is None or keys is None else by_key.to(keys.dtype)
        ctx.save_for_backward(by_state, by_query, by_key, by_vocabulary)
        loss, counted = (weights * (losses + settings.unary * plain_losses)).sum(), weights > 0
        sums, right = (losses * counted).sum(1), (hits * counted).sum(1)
        ctx.mark_non_differentiable(sums, right)
        return loss, sums, right

    @staticmethod
    def backward(ctx: Any, given: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        found = (None if x is None else x * given.to(x.dtype) for x in ctx.saved_tensors)
        return *found, *[None] * 5


Part = tuple[slice, slice]  # depths and blocks: rows whose logits exist together, in the order of [depths, blocks]


class _Scorer:
    """Logits of some rows."""

    def __init__(self, rows: BlockRows, vocabularies: Vocabularies, dtype: torch.dtype):
        self._rows, bias = rows, vocabularies.draft_bias
        self.draft = vocabularies.draft.detach().to(dtype)
        self.keys = None if rows.keys is None else rows.keys.detach().to(dtype)
        self._bias = None if bias is None else bias.to(dtype)

    def logits(self, part: Part) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """U and U + e [n, Vd], and what they are made of: states [n, H] and queries [n, R]."""
        own = self._rows.states[part].detach().to(self.draft.dtype).flatten(0, 1)
        unary, cap = F.linear(own, self.draft, self._bias), self._rows.softcap
        unary = unary if cap is None else torch.tanh(unary / cap) * cap
        if self._rows.queries is None or self.keys is None:
            return unary, unary, own, None
        query = self._rows.queries[part].detach().to(self.draft.dtype).flatten(0, 1)
        return unary, torch.addmm(unary, query, self.keys.T), own, query


def _stretches(rows: BlockRows, count: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Blocks, and the answer rows out of `count` that they predict: about `most` rows at a time."""
    depth, blocks = rows.valid.shape
    size = max(depth, most - depth + 1)
    starts = torch.arange(0, count, size)
    cuts = [*torch.searchsorted(rows.first, starts).tolist(), blocks]
    for i, start in enumerate(range(0, count, size)):
        if cuts[i] < cuts[i + 1]:
            yield slice(cuts[i], cuts[i + 1]), slice(start, min(start + size + depth - 1, count))


def _parts(rows: BlockRows, blocks: slice, most: int) -> Iterator[Part]:
    """These blocks at all depths: about `most` rows at a time, at least those of one depth."""
    depths, together = len(rows.valid), max(1, most // (blocks.stop - blocks.start))
    for start in range(0, depths, together):
        yield slice(start, min(start + together, depths)), blocks


# ---- what to watch


@torch.no_grad()
def label_chances(rows: BlockRows, vocabularies: Vocabularies, tokens: Tensor) -> Tensor:
    """The probabilities [D, N] that U + e gives to the text's tokens [M, by answer row]; 0 where it drafts them not."""
    wanted, scorer = _wanted(rows, vocabularies, tokens), _Scorer(rows, vocabularies, rows.states.dtype)
    found = torch.zeros_like(wanted, dtype=torch.float32)
    most = Judge(vocabularies, Labels(), Goal(), tokens.device).rows
    for blocks, _ in _stretches(rows, len(tokens), most):
        for part in _parts(rows, blocks, most):
            wide, place = scorer.logits(part)[1].float(), wanted[part].flatten().clamp(min=0)[:, None]
            chances = (wide.gather(1, place)[:, 0] - wide.logsumexp(-1)).exp()
            found[part] = chances.view_as(found[part])
    return found * (wanted >= 0)


@torch.no_grad()
def block_figures(
    rows: BlockRows, teacher: Tensor, vocabularies: Vocabularies, text: TextRows, candidates: int
) -> dict[str, Tensor]:
    """Figures by depth, [2, D]: sums over the valid rows, and their number; `text` is by answer row [M].

    top1: the text's token is the best of U + e; recall: it is among the `candidates` best of U, which alone get pair
    scores in drafting; tv: total variation between the target's distribution and that of U + e. greedy_top1 and
    greedy_recall are those of greedy texts.
    """
    wanted, scorer = _wanted(rows, vocabularies, text.tokens), _Scorer(rows, vocabularies, teacher.dtype)
    found = {name: rows.states.new_zeros(wanted.shape, dtype=torch.float32) for name in ("top1", "recall", "tv")}
    judge = Judge(vocabularies, Labels(), Goal((("tv", 1.0),)), teacher.device)
    for blocks, known in _stretches(rows, len(teacher), judge.rows):
        judge.take(target_logits(teacher[known], vocabularies), known)
        for part in _parts(rows, blocks, judge.rows):
            token = wanted[part].flatten()
            unary, both, *_ = scorer.logits(part)
            best = unary.topk(min(candidates, unary.shape[-1]), -1).indices
            own = {"top1": both.argmax(-1) == token, "recall": (best == token[:, None]).any(-1)}
            own["tv"] = judge.losses(both, token.float(), rows.places[part].flatten() - known.start)[0]
            for name, values in own.items():
                found[name][part] = values.float().view_as(wanted[part])
    greedy = rows.valid & (text.temperatures[rows.places[0]] == 0)
    figures = {name: _totals(own, rows.valid) for name, own in found.items()}
    return {**figures, **{f"greedy_{name}": _totals(found[name], greedy) for name in ("top1", "recall")}}


def _totals(values: Tensor, counted: Tensor) -> Tensor:
    """Values [D, N] → their sums, and how many were counted: [2, D]."""
    return torch.stack([(values * counted).sum(1), counted.sum(1).to(values.dtype)])


def _wanted(rows: BlockRows, vocabularies: Vocabularies, tokens: Tensor) -> Tensor:
    """The text's tokens that the rows predict [D, N], as indices of the head's vocabulary; -1: it lacks them."""
    found = tokens[rows.places]
    return found if vocabularies.tokens is None else draft_indices(vocabularies.tokens, len(vocabularies.target))[found]
