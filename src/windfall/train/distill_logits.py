"""Distillation of heads whose logits are more than a product with their vocabulary, such as heads with pair scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from windfall.train import losses
from windfall.train.coupling import TextRows
from windfall.train.losses import MIXTURE_TENSORS, Goal, Report, Vocabularies, target_logits
from windfall.train.row_losses import draft_indices, new_generator, row_losses, row_targets


def distill_logits(
    logits: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    teacher: Tensor,
    vocabularies: Vocabularies,
    weights: Tensor,
    goal: Goal = Goal(),
) -> Report:
    """Σ weights · loss(target's distribution, head's), summed over steps and rows.

    `logits(*parts)` computes the head's logits [n, Vd] of n rows from slices of `inputs`, [S, N, ..] each; it may use
    parameters. teacher [S, N, Ht] are the target's final states of the same rows, weights [S, N], and the tensors of
    `goal.text` are [S, N]. Of `vocabularies`, `draft` is not used. The logits of a slice exist only while its loss or
    gradient is computed: the backward pass computes them again, with the same noise.
    """
    seed = int(torch.randint(2**62, ())) if goal.seed is None else goal.seed
    size = max(1, losses.MAX_LOGITS // MIXTURE_TENSORS // vocabularies.target.shape[0])
    total, means, hits = teacher.new_zeros((), dtype=torch.float32), [], []
    for step, weight in enumerate(weights):
        mean, hit = weight.new_zeros(()), weight.new_zeros(())
        for start in range(0, len(weight), size):
            part = slice(start, start + size)
            text = goal.text and TextRows(goal.text.tokens[step], goal.text.temperatures[step]).part(part)
            labels = teacher[step, part], vocabularies, goal._replace(text=text, seed=seed + step * len(weight) + start)
            own = [each[step, part] for each in inputs]
            found, right = checkpoint(_slice_losses, logits, labels, *own, use_reentrant=False)
            counted = weight[part] > 0
            total = total + (weight[part] * found).sum()
            mean, hit = mean + (found.detach() * counted).sum(), hit + (right & counted).sum()
        used = (weight > 0).sum().clamp(min=1)
        means.append(mean / used)
        hits.append(hit / used)
    return Report(total, torch.stack(means), torch.stack(hits))


def _slice_losses(
    logits: Callable[..., Tensor], labels: tuple[Tensor, Vocabularies, Goal], *inputs: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss of each row, and whether its top token is the target's."""
    teacher, vocabularies, goal = labels
    with torch.no_grad():
        wanted, tokens = target_logits(teacher, vocabularies), vocabularies.tokens
        generator = new_generator(wanted.device, goal.seed)
        targets = row_targets(wanted, tokens, goal.mixture, goal.text, generator)
        best = wanted.argmax(-1)
        best = best if tokens is None else draft_indices(tokens, wanted.shape[-1])[best]
    own = logits(*inputs)
    return row_losses(own, targets, goal.mixture), own.argmax(-1) == best
