"""Weights of draft steps in a loss: later steps count less, because they matter only if the earlier ones are right."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from windfall.train.teacher import TeacherOutput
from windfall.train.unroll import by_column, by_row

EXP_STEPS = 4  # with "exp", a step weighs exp(-1 / EXP_STEPS) times the step before it
HELP = "exp: exp(-step / 4); dpace: by the head's probability of the text up to the step (arXiv 2605.18810)"


def weigh_steps(
    kind: str,
    valid: Tensor,
    outputs: TeacherOutput,
    chances: Callable[[], Tensor],
    decay: float = 1.0,
    training: bool = True,
) -> Tensor:
    """Weights [S, N] of steps by answer row, 0 where a row is not valid [S, N].

    `chances()` are the head's probabilities of the text's tokens [S, N]; only `dpace` calls it. In validation, `exp`
    takes its place: the weights of `dpace` grow as a head learns, so held-out losses could not be compared.
    """
    if kind == "dpace" and training:
        by_chain = dpace(by_column(chances(), outputs), by_column(valid, outputs))
        return by_row(list(by_chain), outputs) * valid
    return decaying(valid, decay if kind in ("decay", "equal") else math.exp(-1 / EXP_STEPS))


def decaying(valid: Tensor, rate: float = math.exp(-1 / EXP_STEPS)) -> Tensor:
    """Weights of valid steps [S, ...], each `rate` times that of the step before it."""
    factors: Tensor = rate ** torch.arange(len(valid), device=valid.device)
    return valid * factors.view(-1, *[1] * (valid.dim() - 1))


def dpace(chances: Tensor, valid: Tensor | None = None) -> Tensor:
    """D-PACE's weights of the steps of chains, [S, ...] → [S, ...]: w_k = sum_{m >= k} prod_{i <= m} (q_i + 1) / 2.

    `chances` are the head's probabilities q_i of the text's token in each step. Steps that are not valid count neither
    in the products nor in the sums. No gradient flows into the weights.
    """
    smoothed = 0.5 * chances.detach() + 0.5
    if valid is not None:
        smoothed = torch.where(valid, smoothed, torch.ones_like(smoothed))
    reach = smoothed.cumprod(0)
    reach = reach if valid is None else reach * valid
    return reach.flip(0).cumsum(0).flip(0)
