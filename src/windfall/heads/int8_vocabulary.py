"""A vocabulary head in int8, for drafting on a CPU, where reading that matrix takes most of a draft pass.

CPUs multiply unsigned with signed bytes (AVX-512 VNNI does only that; AMX does it too), so hidden states go in as
unsigned bytes around a zero point. With signed states oneDNN falls back to its reference code on a CPU with VNNI alone.
Without VNNI and AMX, sums of two products saturate, and the logits are wrong.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.kernels.eight_bits import LARGEST_INT8, round_rows, row_scales
from windfall.kernels.few_rows import linear

ZERO_POINT = 128  # of hidden states, which are unsigned
FINE_FACTOR = 2 * LARGEST_INT8  # the remainder after rounding is half a unit at most
MIN_ELEMENTS = 2**20  # smaller matrices are not worth quantising
MAX_ERROR = 0.15  # of a logit, as a share of the logits' standard deviation
ROW_STEP = 8  # product sizes are multiples of this, because oneDNN compiles each new size
WARM_UP_ROWS = 32  # sizes up to this are compiled in advance
TRIAL_VOCABULARY = 1024  # vocabulary rows of the first, small trial
MAX_TRIAL_SECONDS = 0.02  # of the small trial: fast code takes 0.0001, oneDNN's reference code 0.15
TRIAL_STATES = 4  # hidden states of a trial
TRIALS = 5


class Int8Vocabulary:
    """Logits [n, Vd] of hidden states [n, H], by a product of bytes.

    Each row of the vocabulary has a scale. Hidden states have outliers, so each is split into a coarse part, which int8
    can hold, and the remainder, and goes in as two rows. Reading the matrix takes most of the time, so the second row
    is nearly free.
    """

    def __init__(self, vocabulary: Tensor, bias: Tensor | None = None):
        whole, scales = round_rows(vocabulary.detach())  # [Vd, H] int8, [Vd, 1]
        self._packed = torch.ops.onednn.qlinear_prepack(whole, None)
        self._scales, self._zeros = scales[:, 0], torch.zeros(len(whole), dtype=torch.long)
        self._bias = None if bias is None else bias.detach().float()

    def warm_up(self) -> None:
        """Let oneDNN compile the usual sizes before the first draft pass."""
        for rows in range(ROW_STEP, WARM_UP_ROWS + 1, ROW_STEP):
            self._product(torch.full((rows, self._packed.shape[0]), ZERO_POINT, dtype=torch.uint8))

    def __call__(self, hidden: Tensor) -> Tensor:
        size, wide = len(hidden), hidden.float()
        scales = row_scales(wide)
        wide = wide / scales
        coarse = wide.round()
        fine = wide.sub_(coarse).mul_(FINE_FACTOR).round_()
        padding = wide.new_zeros(-2 * size % ROW_STEP, wide.shape[1])
        both = self._product(torch.cat([coarse, fine, padding]).add_(ZERO_POINT).to(torch.uint8))
        logits = both[:size].add_(both[size : 2 * size], alpha=1 / FINE_FACTOR).mul_(scales)
        return logits if self._bias is None else logits.add_(self._bias)

    def _product(self, rows: Tensor) -> Tensor:
        """[m, H] uint8 around the zero point → [m, Vd] fp32, scaled as the vocabulary's rows are."""
        found: Tensor = torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, ZERO_POINT, self._packed, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return found


def quantise_vocabulary(
    vocabulary: Tensor, bias: Tensor | None = None, only_if_faster: bool = False
) -> Int8Vocabulary | None:
    """The same vocabulary in int8. None if this torch has no such product for the device, if its result is wrong or,
    with `only_if_faster`, if it saves no time.

    A product with a small part of the vocabulary is tried first: if oneDNN has no fast code for this CPU, a product
    with all of it takes seconds.
    """
    if vocabulary.device.type != "cpu":
        return None
    part = vocabulary[:TRIAL_VOCABULARY]
    small = _tried(part)
    if small is None or (
        only_if_faster and _seconds(lambda: small(some_states(part)), MAX_TRIAL_SECONDS) > MAX_TRIAL_SECONDS
    ):
        return None
    made = _tried(vocabulary, bias)
    if made is None or (only_if_faster and slowdown(made, vocabulary) >= 1):
        return None
    made.warm_up()
    return made


@torch.no_grad()
def _tried(vocabulary: Tensor, bias: Tensor | None = None) -> Int8Vocabulary | None:
    """The vocabulary in int8, if its product works here and is close to the full one."""
    try:
        made, hidden = Int8Vocabulary(vocabulary, bias), some_states(vocabulary)
        exact = F.linear(hidden, vocabulary, bias).float()
        error = float((made(hidden) - exact).abs().max())
    except (AttributeError, RuntimeError, TypeError):  # no such operator, other arguments, or not on this CPU
        return None
    return made if error < MAX_ERROR * float(exact.std()) else None


def some_states(vocabulary: Tensor) -> Tensor:
    """A few hidden states [n, H] of a realistic size: rows of the vocabulary itself."""
    return vocabulary.detach()[:: -(-len(vocabulary) // TRIAL_STATES)].clone()


def pays(vocabulary: Tensor) -> bool:
    """Whether this matrix is large enough to be worth quantising."""
    return vocabulary.numel() >= MIN_ELEMENTS


@torch.inference_mode()
def slowdown(made: Int8Vocabulary, vocabulary: Tensor) -> float:
    """The time of the int8 product over that of the full one."""
    hidden = some_states(vocabulary)
    return _seconds(lambda: made(hidden)) / _seconds(lambda: linear(hidden, vocabulary))


def _seconds(work: Callable[[], Tensor], limit: float = math.inf) -> float:
    """The fastest of a few runs; only one run if that takes longer than `limit`."""
    quickest = math.inf
    for _ in range(TRIALS):
        started = time.perf_counter()
        work()
        quickest = min(quickest, time.perf_counter() - started)
        if quickest > limit:
            break
    return quickest
