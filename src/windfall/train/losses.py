"""Soft-label cross-entropy over a vocabulary, fused with the vocabulary heads: logits live for one chunk of rows."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 2**27  # logits of a chunk at the most


class Bend(NamedTuple):
    """What some families do to the products with their vocabulary matrix."""

    scale: float = 1.0
    cap: float | None = None  # softly

    @classmethod
    def of(cls, config: Any) -> Bend:
        """From a transformers text configuration."""
        divisor = getattr(config, "logits_scaling", None) or 1.0
        scale = getattr(config, "logit_scale", None) or 1.0
        return cls(scale / divisor, getattr(config, "final_logit_softcapping", None))

    def __call__(self, logits: Tensor) -> Tensor:
        logits = logits if self.scale == 1 else logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


class Vocabularies(NamedTuple):
    """The head's and the target's vocabulary matrices, and the target ids of the head's rows (None: all)."""

    draft: Tensor  # [Vd, H]
    target: Tensor  # [V, Ht]
    tokens: Tensor | None  # [Vd]
    target_bias: Tensor | None = None  # [V]
    draft_bias: Tensor | None = None  # [Vd], frozen
    bend: Bend = Bend()  # of the target's logits


class Distilled(NamedTuple):
    """The loss, and what it says about each unrolled step."""

    loss: Tensor  # scalar, differentiable
    steps: Tensor  # [S] the unweighted mean cross-entropy of each step
    hits: Tensor  # [S] how often the head's first choice is the target's


class Labels(NamedTuple):
    """What a step's guesses are held against: `share` of the target's distribution plus `top` of its k likeliest."""

    share: float = 1.0
    top: float = 0.0
    k: int = 10


def distil(
    states: Tensor, teacher: Tensor, vocabularies: Vocabularies, weights: Tensor, labels: Labels = Labels()
) -> Distilled:
    """Σ weights · cross-entropy(target's distribution, head's), summed over steps and rows.

    states [S, N, H]: what the head's vocabulary reads, aligned so that states[:, i] guess what teacher[i] [N, Ht]
    knows; weights [S, N]. Where the head drafts fewer tokens than the target knows, the labels are the target's
    probabilities of those tokens, which sum to less than one: rows that it can hardly guess weigh hardly anything.
    """
    loss, entropy, hits = _Distil.apply(  # type: ignore[no-untyped-call]
        states, vocabularies.draft, teacher, vocabularies, weights, labels
    )
    used = (weights > 0).sum(-1).clamp(min=1)
    return Distilled(loss, entropy / used, hits / used)


class _Distil(torch.autograd.Function):
    """The gradient is made on the way forward, while the logits are there."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        drafted: Tensor,
        teacher: Tensor,
        vocabularies: Vocabularies,
        weights: Tensor,
        labels: Labels,
    ) -> tuple[Tensor, Tensor, Tensor]:
        steps, rows = states.shape[:2]
        size = max(1, CHUNK // vocabularies.target.shape[0])
        gradient = torch.zeros_like(states)
        matrix = torch.zeros_like(drafted, dtype=torch.float32) if drafted.requires_grad else None
        loss, entropy, hits = (states.new_zeros(steps, dtype=torch.float32) for _ in range(3))
        judge = _compiled(_judge) if states.is_cuda else _judge
        for start in range(0, rows, size):
            part = slice(start, start + size)
            chances, best = _label(teacher[part], vocabularies, labels)
            draft, bias = drafted.to(chances.dtype), vocabularies.draft_bias
            bias = None if bias is None else bias.to(draft.dtype)
            for step in range(steps):
                own, weight = states[step, part].to(draft.dtype), weights[step, part]
                losses, slope, hit = judge(F.linear(own, draft, bias), chances, best, weight)
                loss[step] += (weight * losses).sum()
                entropy[step] += (losses * (weight > 0)).sum()
                hits[step] += (hit & (weight > 0)).sum()
                gradient[step, part] = (slope @ draft).to(gradient.dtype)
                if matrix is not None:
                    matrix += (slope.T @ own).float()
        ctx.save_for_backward(gradient, matrix)
        ctx.mark_non_differentiable(entropy, hits)
        return loss.sum(), entropy, hits

    @staticmethod
    def backward(ctx: Any, given: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradient, matrix = ctx.saved_tensors
        matrix = None if matrix is None else matrix * given
        return gradient * given.to(gradient.dtype), matrix, None, None, None, None


def _label(teacher: Tensor, vocabularies: Vocabularies, labels: Labels) -> tuple[Tensor, Tensor]:
    """The target's probabilities of the drafted tokens [n, Vd] and its favourite's place among them (-1: not there)."""
    logits = teacher @ vocabularies.target.T.to(teacher.dtype)
    if vocabularies.target_bias is not None:
        logits = logits + vocabularies.target_bias
    logits, tokens, places = vocabularies.bend(logits), vocabularies.tokens, None
    if tokens is not None:
        places = torch.full((logits.shape[-1],), -1, device=logits.device)
        places[tokens] = torch.arange(len(tokens), device=logits.device)
    chances, best = (_compiled(_among) if logits.is_cuda else _among)(logits, tokens, places)
    if labels.top:
        top = chances.float().topk(min(labels.k, chances.shape[-1]), -1)
        chances = (labels.share * chances.float()).scatter_add(1, top.indices, labels.top * top.values)
    elif labels.share != 1:
        chances = labels.share * chances
    return chances.to(teacher.dtype), best


def _among(logits: Tensor, tokens: Tensor | None, places: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities over all of the vocabulary, of `tokens` alone; the likeliest token's place."""
    total, best = torch.logsumexp(logits.float(), -1, keepdim=True), logits.argmax(-1)
    if tokens is not None and places is not None:
        logits, best = logits[:, tokens], places[best]
    return torch.exp(logits.float() - total).to(logits.dtype), best


def _judge(logits: Tensor, chances: Tensor, best: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of each row, its weighted slope by the logits, and whether the first choice was right."""
    wide, wanted = logits.float(), chances.float()
    total, mass = torch.logsumexp(wide, -1), wanted.sum(-1)
    losses = mass * total - (wanted * wide).sum(-1)
    slope = (mass[:, None] * torch.exp(wide - total[:, None]) - wanted) * weight[:, None]
    return losses, slope.to(logits.dtype), wide.argmax(-1) == best


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=True)
