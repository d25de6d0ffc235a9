"""Cross-entropy losses fused with the vocabulary heads: logits exist for a bounded number of rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

MAX_LOGITS = 2**27  # in memory at a time


class Report(NamedTuple):
    """A loss, and figures for each draft step."""

    loss: Tensor  # scalar, differentiable
    steps: Tensor  # [S] mean cross-entropy of each step
    hits: Tensor  # [S] top-1 agreement with the target of each step


class LogitTransform(NamedTuple):
    """Scaling and soft-capping that some model families apply to their logits."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitTransform:
        """From a transformers text configuration."""
        divisor = getattr(config, "logits_scaling", None) or 1.0
        scale = getattr(config, "logit_scale", None) or 1.0
        return cls(scale / divisor, getattr(config, "final_logit_softcapping", None))

    def __call__(self, logits: Tensor) -> Tensor:
        logits = logits if self.scale == 1 else logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


class Vocabularies(NamedTuple):
    """The vocabulary matrices of head and target, and the target ids of the head's rows (None: all)."""

    draft: Tensor  # [Vd, H]
    target: Tensor  # [V, Ht]
    tokens: Tensor | None  # [Vd]
    target_bias: Tensor | None = None  # [V]
    draft_bias: Tensor | None = None  # [Vd], frozen
    transform: LogitTransform = LogitTransform()  # of the target's logits


class Labels(NamedTuple):
    """The label distribution: `share` of the target's distribution plus `top` of its `k` likeliest tokens."""

    share: float = 1.0
    top: float = 0.0
    k: int = 10


def distill(
    states: Tensor, teacher: Tensor, vocabularies: Vocabularies, weights: Tensor, labels: Labels = Labels()
) -> Report:
    """Σ weights · cross-entropy(target's distribution, head's), summed over steps and rows.

    states [S, N, H] are the inputs of the head's vocabulary; states[:, i] predict the distribution of teacher[i]
    [N, Ht]. weights [S, N]. If the head drafts fewer tokens than the target has, the labels are the target's
    probabilities of those tokens. They sum to less than one, so rows that the head cannot predict weigh little.
    """
    loss, entropy, hits = _Distill.apply(  # type: ignore[no-untyped-call]
        states, vocabularies.draft, teacher, vocabularies, weights, labels
    )
    used = (weights > 0).sum(-1).clamp(min=1)
    return Report(loss, entropy / used, hits / used)


def token_cross_entropy(logits: Callable[[Tensor], Tensor], states: Tensor, tokens: Tensor, weights: Tensor) -> Report:
    """Weighted cross-entropy of `logits(states)` [N, Vd] with given tokens, of one draft step.

    states [N, H]; tokens [N] are indices into the head's vocabulary, or -1 for tokens that it lacks; weights [N].
    Logits are computed again in the backward pass.
    """
    size = max(1, MAX_LOGITS // logits(states[:1].detach()).shape[-1])
    losses, hits = [states.new_zeros(0, dtype=torch.float32)], [states.new_zeros(0, dtype=torch.bool)]
    for own, labels in zip(torch.split(states, size), torch.split(tokens, size), strict=True):
        loss, hit = checkpoint(_token_losses, logits, own, labels, use_reentrant=False)
        losses.append(loss)
        hits.append(hit)
    found, counted = torch.cat(losses), weights > 0
    count = counted.sum().clamp(min=1)
    entropy = (found.detach() * counted).sum() / count
    return Report((found * weights).sum(), entropy[None], ((torch.cat(hits) & counted).sum() / count)[None])


def _token_losses(logits: Callable[[Tensor], Tensor], states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    given = logits(states).float()
    return F.cross_entropy(given, tokens, reduction="none", ignore_index=-1), given.argmax(-1) == tokens


def draft_indices(draft_tokens: Tensor, vocab_size: int) -> Tensor:
    """[V]: the index of each token in the head's vocabulary [Vd], or -1."""
    indices = torch.full((vocab_size,), -1, device=draft_tokens.device)
    indices[draft_tokens] = torch.arange(len(draft_tokens), device=draft_tokens.device)
    return indices


class _Distill(torch.autograd.Function):
    """Computes the gradient in the forward pass, while the logits exist."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        vocabulary: Tensor,
        teacher: Tensor,
        vocabularies: Vocabularies,
        weights: Tensor,
        labels: Labels,
    ) -> tuple[Tensor, Tensor, Tensor]:
        steps, rows = states.shape[:2]
        size = max(1, MAX_LOGITS // vocabularies.target.shape[0])
        gradient = torch.zeros_like(states)
        matrix = torch.zeros_like(vocabulary, dtype=torch.float32) if vocabulary.requires_grad else None
        loss, entropy, hits = (states.new_zeros(steps, dtype=torch.float32) for _ in range(3))
        row_losses = _compiled(_row_losses) if states.is_cuda else _row_losses
        for start in range(0, rows, size):
            part = slice(start, start + size)
            probabilities, best = _label(teacher[part], vocabularies, labels)
            draft, bias = vocabulary.to(probabilities.dtype), vocabularies.draft_bias
            bias = None if bias is None else bias.to(draft.dtype)
            for step in range(steps):
                own, weight = states[step, part].to(draft.dtype), weights[step, part]
                losses, slope, hit = row_losses(F.linear(own, draft, bias), probabilities, best, weight)
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
    """The target's probabilities of the draft tokens [n, Vd], and the index of its likeliest token (-1: absent)."""
    logits = teacher @ vocabularies.target.T.to(teacher.dtype)
    if vocabularies.target_bias is not None:
        logits = logits + vocabularies.target_bias
    logits, tokens = vocabularies.transform(logits), vocabularies.tokens
    indices = None if tokens is None else draft_indices(tokens, logits.shape[-1])
    probabilities, best = (_compiled(_among) if logits.is_cuda else _among)(logits, tokens, indices)
    if labels.top:
        top = probabilities.float().topk(min(labels.k, probabilities.shape[-1]), -1)
        probabilities = (labels.share * probabilities.float()).scatter_add(1, top.indices, labels.top * top.values)
    elif labels.share != 1:
        probabilities = labels.share * probabilities
    return probabilities.to(teacher.dtype), best


def _among(logits: Tensor, tokens: Tensor | None, indices: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities of `tokens` (normalised over the whole vocabulary), and the index of the likeliest token."""
    total, best = torch.logsumexp(logits.float(), -1, keepdim=True), logits.argmax(-1)
    if tokens is not None and indices is not None:
        logits, best = logits[:, tokens], indices[best]
    return torch.exp(logits.float() - total).to(logits.dtype), best


def _row_losses(logits: Tensor, labels: Tensor, best: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: the cross-entropy, its weighted gradient by the logits, and whether the top token is right."""
    wide, wanted = logits.float(), labels.float()
    total, mass = torch.logsumexp(wide, -1), wanted.sum(-1)
    losses = mass * total - (wanted * wide).sum(-1)
    slope = (mass[:, None] * torch.exp(wide - total[:, None]) - wanted) * weight[:, None]
    return losses, slope.to(logits.dtype), wide.argmax(-1) == best


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=True)
