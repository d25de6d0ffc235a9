"""A vocabulary in int8, for drafting on a CPU: reading that matrix is most of a draft pass there.

CPUs multiply unsigned with signed bytes (AVX-512 VNNI does only that; AMX does it too), so hidden states go in as
unsigned bytes around a zero point. With signed states oneDNN falls back to its reference code on a CPU with VNNI alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

LARGEST_INT8 = 127
ZERO_POINT = 128  # of hidden states, which are unsigned
FINER = 2 * LARGEST_INT8  # rounding leaves half a unit at most
MIN_ELEMENTS = 2**20  # in a matrix worth rounding; smaller products cost little anyway
MAX_ERROR = 0.02  # of the logits' standard deviation
ROW_STEP = 8  # product sizes are multiples of this, because oneDNN prepares each size when it first sees it
WARM_ROWS = 32  # sizes up to this are prepared in advance
ROWS_PER_PART = 4096  # vocabulary rows that are rounded at a time
TRIAL_VOCABULARY = 1024  # vocabulary rows of the first, small trial
HOPELESS = 0.02  # seconds of the small trial: fast code takes 0.0001, oneDNN's reference code 0.15
TRIAL_STATES = 4  # hidden states of a trial
TRIALS = 5


class Rounded:
    """Logits [n, Vd] of hidden states [n, H], by a product of bytes.

    Each row of the vocabulary has a scale. Hidden states have outliers, so each is split into a coarse part, which int8
    can hold, and the remainder, and goes in as two rows. Reading the matrix takes most of the time, so the second row
    is nearly free.
    """

    def __init__(self, vocabulary: Tensor, bias: Tensor | None = None):
        starts = range(0, len(vocabulary), ROWS_PER_PART)
        parts = [round_rows(vocabulary[at : at + ROWS_PER_PART].detach().float()) for at in starts]
        whole, scales = (torch.cat(each) for each in zip(*parts, strict=True))  # [Vd, H] int8, [Vd, 1]
        self._packed = torch.ops.onednn.qlinear_prepack(whole, None)
        self._scales, self._zeros = scales[:, 0], torch.zeros(len(whole), dtype=torch.long)
        self._bias = None if bias is None else bias.detach().float()

    def warm_up(self) -> None:
        """Let oneDNN prepare the usual sizes before the first draft pass."""
        for rows in range(ROW_STEP, WARM_ROWS + 1, ROW_STEP):
            self._product(torch.full((rows, self._packed.shape[0]), ZERO_POINT, dtype=torch.uint8))

    def __call__(self, hidden: Tensor) -> Tensor:
        size, wide = len(hidden), hidden.float()
        scales = row_scales(wide)
        wide = wide / scales
        coarse = wide.round()
        fine = wide.sub_(coarse).mul_(FINER).round_()
        padding = wide.new_zeros(-2 * size % ROW_STEP, wide.shape[1])
        both = self._product(torch.cat([coarse, fine, padding]).add_(ZERO_POINT).to(torch.uint8))
        logits = both[:size].add_(both[size : 2 * size], alpha=1 / FINER).mul_(scales)
        return logits if self._bias is None else logits.add_(self._bias)

    def _product(self, rows: Tensor) -> Tensor:
        """[m, H] uint8 around the zero point → [m, Vd] fp32, scaled as the vocabulary's rows are."""
        found: Tensor = torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, ZERO_POINT, self._packed, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return found


def row_scales(rows: Tensor) -> Tensor:
    """[n, H] → [n, 1], the value of one unit when the row is rounded."""
    return rows.abs().amax(1, keepdim=True).clamp_(min=1e-20).div_(LARGEST_INT8)


def round_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[n, H] → int8 [n, H] and the scale of each row [n, 1]."""
    scales = row_scales(rows)
    return (rows / scales).round_().to(torch.int8), scales


def rounded(vocabulary: Tensor, bias: Tensor | None = None, must_be_quicker: bool = False) -> Rounded | None:
    """The same vocabulary in int8. None where this torch has no such product for the device, where its result is wrong,
    or, with `must_be_quicker`, where it saves no time.

    A product with a small part of the vocabulary is tried first: where oneDNN has no fast code for this CPU, a product
    with all of it takes seconds.
    """
    if vocabulary.device.type != "cpu":
        return None
    part = vocabulary[:TRIAL_VOCABULARY]
    small = _tried(part)
    if small is None or (must_be_quicker and _seconds(lambda: small(some_states(part)), HOPELESS) > HOPELESS):
        return None
    made = _tried(vocabulary, bias)
    if made is None or (must_be_quicker and slowdown(made, vocabulary) >= 1):
        return None
    made.warm_up()
    return made


@torch.no_grad()
def _tried(vocabulary: Tensor, bias: Tensor | None = None) -> Rounded | None:
    """The vocabulary in int8, if its product works here and is close to the full one."""
    try:
        made, hidden = Rounded(vocabulary, bias), some_states(vocabulary)
        exact = F.linear(hidden, vocabulary, bias).float()
        error = float((made(hidden) - exact).abs().mean())
    except (AttributeError, RuntimeError, TypeError):  # no such operator, another one, or none for this CPU
        return None
    return made if error < MAX_ERROR * float(exact.std()) else None


def some_states(vocabulary: Tensor) -> Tensor:
    """A few hidden states [n, H] of the right size: rows of the vocabulary itself."""
    return vocabulary.detach()[:: -(-len(vocabulary) // TRIAL_STATES)].clone()


def pays(vocabulary: Tensor) -> bool:
    """Whether the product with this matrix takes long enough to be worth rounding."""
    return vocabulary.numel() >= MIN_ELEMENTS


@torch.inference_mode()
def slowdown(made: Rounded, vocabulary: Tensor) -> float:
    """The time of the rounded product, as a multiple of the full one's time."""
    hidden = some_states(vocabulary)
    return _seconds(lambda: made(hidden)) / _seconds(lambda: F.linear(hidden, vocabulary))


def _seconds(work: Callable[[], Tensor], hopeless: float = math.inf) -> float:
    """The time of the quickest of a few runs; of the first one, if that is hopeless."""
    quickest = math.inf
    for _ in range(TRIALS):
        started = time.perf_counter()
        work()
        quickest = min(quickest, time.perf_counter() - started)
        if quickest > hopeless:
            break
    return quickest
