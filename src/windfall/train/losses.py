"""Losses fused with the vocabulary heads: logits exist for a bounded number of rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from windfall.train.coupling import TextRows
from windfall.train.mixtures import KL, Mixture, without_kl
from windfall.train.row_losses import RowTargets, draft_indices, mixed, new_generator, row_targets

MAX_LOGITS = 2**27  # in memory at a time
MIXTURE_TENSORS = 4  # memory for a row of losses other than the cross-entropy, as a multiple of its memory


class Report(NamedTuple):
    """A loss, and figures for each draft step."""

    loss: Tensor  # scalar, differentiable
    steps: Tensor  # [S] mean loss of each step
    hits: Tensor  # [S] top-1 agreement with the target of each step
    figures: dict[str, Tensor] | None = None  # more to watch in validations, [2, S]: sums over rows, numbers of rows


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


class Goal(NamedTuple):
    """Which losses to use, and what they need to know besides the distributions."""

    mixture: Mixture = KL
    text: TextRows | None = None  # of all rows [N], for `coupled`
    seed: int | None = None  # of the noise of `coupled`; None: from torch's global generator


def distill(
    states: Tensor,
    teacher: Tensor,
    vocabularies: Vocabularies,
    weights: Tensor,
    labels: Labels = Labels(),
    goal: Goal = Goal(),
) -> Report:
    """Σ weights · loss(target's distribution, head's), summed over steps and rows; the losses are in `row_losses`.

    states [S, N, H] are the inputs of the head's vocabulary; states[:, i] predict the distribution of teacher[i]
    [N, Ht]. weights [S, N]. If the head drafts fewer tokens than the target has, the labels are the target's
    probabilities of those tokens. They sum to less than one, so rows that the head cannot predict weigh little.
    `labels.share` is the weight of the losses, and `labels.top` is always a cross-entropy. All steps of a row have the
    same noise, as in decoding.
    """
    loss, sums, right = _Distill.apply(  # type: ignore[no-untyped-call]
        states, vocabularies.draft, teacher, vocabularies, weights, labels, goal
    )
    used = (weights > 0).sum(-1).clamp(min=1)
    return Report(loss, sums / used, right / used)


@torch.no_grad()
def label_chances(states: Tensor, vocabularies: Vocabularies, tokens: Tensor) -> Tensor:
    """The head's probabilities [S, N] of the tokens that follow its rows [N]; 0 for tokens that it does not draft."""
    size, vocabulary = max(1, MAX_LOGITS // len(vocabularies.draft)), vocabularies.draft
    bias = None if vocabularies.draft_bias is None else vocabularies.draft_bias.to(vocabulary.dtype)
    if vocabularies.tokens is not None:
        tokens = draft_indices(vocabularies.tokens, len(vocabularies.target))[tokens]
    found = states.new_zeros(states.shape[:2], dtype=torch.float32)
    for start in range(0, states.shape[1], size):
        part, place = slice(start, start + size), tokens[start : start + size].clamp(min=0)[:, None]
        for step in range(len(states)):
            logits = F.linear(states[step, part].to(vocabulary.dtype), vocabulary, bias).float()
            found[step, part] = (logits.gather(1, place)[:, 0] - logits.logsumexp(-1)).exp()
    return found * (tokens >= 0)


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
        goal: Goal,
    ) -> tuple[Tensor, Tensor, Tensor]:
        steps, rows = states.shape[:2]
        gradient = torch.zeros_like(states)
        matrix = torch.zeros_like(vocabulary, dtype=torch.float32) if vocabulary.requires_grad else None
        losses, hits = torch.zeros_like(weights), torch.zeros_like(weights)  # [S, N]
        judge = Judge(vocabularies, labels, goal, states.device)
        draft, bias = vocabulary.to(teacher.dtype), vocabularies.draft_bias
        bias = None if bias is None else bias.to(draft.dtype)
        for start in range(0, rows, judge.rows):
            part = slice(start, start + judge.rows)
            judge.take(target_logits(teacher[part], vocabularies), part)
            for step in range(steps):
                own, weight = states[step, part].to(draft.dtype), weights[step, part]
                losses[step, part], slope, hits[step, part] = judge.losses(F.linear(own, draft, bias), weight)
                gradient[step, part] = slope @ draft
                if matrix is not None:
                    matrix += slope.T @ own
        ctx.save_for_backward(gradient, matrix)
        loss, counted = (weights * losses).sum(), weights > 0
        sums, right = (losses * counted).sum(1), (hits * counted).sum(1)
        ctx.mark_non_differentiable(sums, right)
        return loss, sums, right

    @staticmethod
    def backward(ctx: Any, given: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradient, matrix = ctx.saved_tensors
        matrix = None if matrix is None else matrix * given
        return gradient * given.to(gradient.dtype), matrix, *[None] * 5


class Judge:
    """Compares the logits of a head with the target's distributions of some rows at a time."""

    def __init__(self, vocabularies: Vocabularies, labels: Labels, goal: Goal, device: torch.device):
        weight, self._others = without_kl(goal.mixture, labels.share)
        self._labels = labels._replace(share=weight)  # of the cross-entropy
        self._has_labels = not self._others or bool(weight or labels.top)
        self._tokens, self._text = vocabularies.tokens, goal.text
        self._indices = None if self._tokens is None else draft_indices(self._tokens, len(vocabularies.target))
        self.rows = max(1, MAX_LOGITS // (MIXTURE_TENSORS if self._others else 1) // vocabularies.target.shape[0])
        noisy = any(name == "coupled" for name, _ in self._others)
        self._generator = new_generator(device, goal.seed) if noisy else None
        self._cross_entropies = _fused(_cross_entropies, device)
        sorts = any(name == "match" for name, _ in self._others)  # which a compiler cannot fuse
        self._mixed = _mixed if sorts else _fused(_mixed, device)

    def take(self, logits: Tensor, part: slice) -> None:
        """Take the target's logits [n, V] of these rows."""
        if self._has_labels:
            self._wanted, self._best = _label(logits, self._tokens, self._indices, self._labels)
        else:
            self._best = _best(logits, self._indices)
        if self._others:
            text = None if self._text is None else self._text.part(part)
            self._targets = row_targets(logits, self._tokens, self._others, text, self._generator)

    def losses(self, logits: Tensor, weight: Tensor, places: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Of each row: the loss, its weighted gradient by the head's logits, and whether the top token is right.

        The logits [m, Vd] are those of the target's rows `places` [m]; None: of all of them. `weight` and `places`
        should not be views: torch.compile compiles again if the tensors that they are views of have other shapes.
        """
        found: tuple[Tensor, Tensor, Tensor] | None = None
        if self._has_labels:
            found = self._cross_entropies(logits, self._wanted, self._best, places, weight)
        if not self._others:
            assert found is not None
            return found
        losses, slope, hit = self._mixed(logits, self._targets, self._best, places, weight, self._others)
        return (losses, slope, hit) if found is None else (losses + found[0], slope + found[1], hit)


def target_logits(teacher: Tensor, vocabularies: Vocabularies) -> Tensor:
    """The target's final states [n, Ht] → its logits [n, V]."""
    logits = teacher @ vocabularies.target.T.to(teacher.dtype)
    if vocabularies.target_bias is not None:
        logits = logits + vocabularies.target_bias
    return vocabularies.transform(logits)


def _label(logits: Tensor, tokens: Tensor | None, indices: Tensor | None, labels: Labels) -> tuple[Tensor, Tensor]:
    """The target's probabilities of the draft tokens [n, Vd], and the index of its likeliest token (-1: absent)."""
    probabilities, best = _fused(_among, logits.device)(logits, tokens, indices)
    if labels.top:
        top = probabilities.float().topk(min(labels.k, probabilities.shape[-1]), -1)
        probabilities = (labels.share * probabilities.float()).scatter_add(1, top.indices, labels.top * top.values)
    elif labels.share != 1:
        probabilities = labels.share * probabilities
    return probabilities.to(logits.dtype), best


def _among(logits: Tensor, tokens: Tensor | None, indices: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities of `tokens` (normalised over the whole vocabulary), and the index of the likeliest token."""
    total, best = torch.logsumexp(logits.float(), -1, keepdim=True), _best(logits, indices)
    logits = logits if tokens is None else logits[:, tokens]
    return torch.exp(logits.float() - total).to(logits.dtype), best


def _best(logits: Tensor, indices: Tensor | None) -> Tensor:
    best = logits.argmax(-1)
    return best if indices is None else indices[best]


def _cross_entropies(
    logits: Tensor, labels: Tensor, best: Tensor, places: Tensor | None, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: the cross-entropy, its weighted gradient by the logits, and whether the top token is right.

    Row i of the logits belongs to row `places[i]` of the labels; None: to row i. Rows are taken here because a compiled
    kernel reads them in place.
    """
    if places is not None:
        labels, best = labels[places], best[places]
    wide, wanted = logits.float(), labels.float()
    total, mass = torch.logsumexp(wide, -1), wanted.sum(-1)
    losses = mass * total - (wanted * wide).sum(-1)
    slope = (mass[:, None] * torch.exp(wide - total[:, None]) - wanted) * weight[:, None]
    return losses, slope.to(logits.dtype), wide.argmax(-1) == best


def _mixed(
    logits: Tensor, targets: RowTargets, best: Tensor, places: Tensor | None, weight: Tensor, mixture: Mixture
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for other losses."""
    if places is not None:
        targets, best = targets.at(places), best[places]
    losses, slopes = mixed(logits, targets, mixture)
    return losses, (slopes * weight[:, None]).to(logits.dtype), logits.argmax(-1) == best


def _fused(function: Any, device: torch.device) -> Any:
    """The function, compiled on a GPU."""
    return _compiled(function) if device.type == "cuda" else function


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=True)
