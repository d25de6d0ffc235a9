"""A vocabulary in int8, for drafting on a CPU: there most of a draft pass goes into reading that matrix."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

MOST = 127  # of a rounded number
FINER = 2 * MOST  # rounding leaves half a unit at the most
SMALL = 2**20  # numbers: what a product with fewer of them costs does not matter
CLOSE = 0.02  # of the logits' spread, which rounding may cost
STEP = 8  # rows by which products differ: oneDNN prepares for each size when it first sees it
WARM = 32  # rows up to which that happens beforehand
PART = 4096  # rows that are rounded at a time
FEW = 4  # rows, of which it is tried
TRIALS = 5


class Rounded:
    """Logits [n, Vd] of hidden states [n, H], by products of small integers.

    Each row of the vocabulary has a scale. States have outliers, so they are split into what int8 can tell and what it
    leaves, and go in as two rows: the product is bound by the matrix, and the second row costs next to nothing.
    """

    def __init__(self, vocabulary: Tensor, bias: Tensor | None = None):
        parts = [round_rows(vocabulary[at : at + PART].detach().float()) for at in range(0, len(vocabulary), PART)]
        whole, scales = (torch.cat(each) for each in zip(*parts, strict=True))  # [Vd, H] int8, [Vd, 1]
        self._packed = torch.ops.onednn.qlinear_prepack(whole, None)
        self._scales, self._zeros = scales[:, 0], torch.zeros(len(whole), dtype=torch.long)
        self._bias = None if bias is None else bias.detach().float()
        for rows in range(STEP, WARM + 1, STEP):
            self._product(whole.new_zeros(rows, whole.shape[1]))

    def __call__(self, hidden: Tensor) -> Tensor:
        size, wide = len(hidden), hidden.float()
        scales = row_scales(wide)
        wide = wide / scales
        coarse = wide.round()
        fine = wide.sub_(coarse).mul_(FINER).round_()
        spare = wide.new_zeros(-2 * size % STEP, wide.shape[1])
        both = self._product(torch.cat([coarse, fine, spare]).to(torch.int8))
        logits = both[:size].add_(both[size : 2 * size], alpha=1 / FINER).mul_(scales)
        return logits if self._bias is None else logits.add_(self._bias)

    def _product(self, rows: Tensor) -> Tensor:
        """[m, H] int8 → [m, Vd] fp32, scaled as the vocabulary's rows are."""
        found: Tensor = torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, 0, self._packed, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return found


def row_scales(rows: Tensor) -> Tensor:
    """[n, H] → [n, 1], what 1 stands for when the row is rounded."""
    return rows.abs().amax(1, keepdim=True).clamp_(min=1e-20).div_(MOST)


def round_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[n, H] → int8 [n, H] and the scale of each row [n, 1]."""
    scales = row_scales(rows)
    return (rows / scales).round_().to(torch.int8), scales


@torch.no_grad()
def rounded(vocabulary: Tensor, bias: Tensor | None = None) -> Rounded | None:
    """The same vocabulary in int8; None where this torch has no such product for this device, or a wrong one."""
    if vocabulary.device.type != "cpu":
        return None
    try:
        made = Rounded(vocabulary, bias)
        hidden = some_states(vocabulary)
        exact = F.linear(hidden, vocabulary, bias).float()
        return made if float((made(hidden) - exact).abs().mean()) < CLOSE * float(exact.std()) else None
    except (AttributeError, RuntimeError, TypeError):  # no such operator, another one, or none for this CPU
        return None


def some_states(vocabulary: Tensor) -> Tensor:
    """A few hidden states [n, H] of the right size: rows of the vocabulary itself."""
    return vocabulary.detach()[:: -(-len(vocabulary) // FEW)].clone()


def pays(vocabulary: Tensor) -> bool:
    """Whether the product with this matrix takes long enough to bother."""
    return vocabulary.numel() >= SMALL


@torch.inference_mode()
def quicker(made: Rounded, vocabulary: Tensor) -> bool:
    """Whether rounding saves time here."""
    hidden = some_states(vocabulary)
    return _seconds(lambda: made(hidden)) < _seconds(lambda: F.linear(hidden, vocabulary))


def _seconds(work: Callable[[], Tensor]) -> float:
    """Of the quickest of a few runs."""
    taken = []
    for _ in range(TRIALS):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return min(taken)
