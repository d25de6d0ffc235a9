"""Weights in panels, the form in which the C kernel of `few_rows.py` reads packed weights (kernels/cpu/panels.h)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LAYOUT = 1  # of panels in files; raise it when the bytes of a panel change
PANEL = 32  # outputs
BLOCK = 32  # inputs
WORD = 32  # bits
LARGEST = {8: 127, 4: 7}  # integers with a scale alone
HALVES = {torch.bfloat16: 1, torch.float16: 2}  # the numbers of these formats in panels.h
INTEGERS = {  # bits, inputs in a group, with addends
    **{(8, 32, False): 3, (8, 32, True): 4, (8, 16, False): 5, (8, 16, True): 6},
    **{(4, 32, False): 7, (4, 32, True): 8, (4, 16, False): 9, (4, 16, True): 10},
}


class Panels(NamedTuple):
    """A weight [outputs, inputs]."""

    bytes: Tensor  # [panels, bytes] uint8
    format: int
    outputs: int
    inputs: int


def of_halves(weight: Tensor) -> Panels:
    """A weight in bfloat16 or float16."""
    words = F.pad(weight.contiguous().view(torch.int32), (0, 0, 0, -len(weight) % PANEL))  # two inputs in each
    panels = words.view(-1, PANEL, words.shape[1]).transpose(1, 2).contiguous()
    return Panels(panels.view(torch.uint8).flatten(1), HALVES[weight.dtype], *weight.shape)


def is_bf16(weight: Tensor) -> bool:
    """Whether all these numbers in float32 are numbers in bfloat16."""
    low = (0, 1)[sys.byteorder == "big"]
    return not torch.count_nonzero(weight.contiguous().view(torch.int16).flatten()[low::2])


def of_integers(values: Tensor, scales: Tensor, addends: Tensor | None = None, bits: int = 8) -> Panels:
    """values * scales + addends, for int8 values [N, K], and fp32 scales and addends [N, groups].

    Values of 4 bits are -8 to 7, or 0 to 15 with addends.
    """
    outputs, inputs = values.shape
    group = inputs // scales.shape[1]
    numbers = torch.stack([scales] if addends is None else [scales, addends], 2)  # [N, groups, 1 or 2]
    header = _panelled(numbers.view(outputs, inputs // BLOCK, -1)).transpose(2, 3)  # [P, blocks, numbers, 32]
    words = _by_input(values).view(-1, inputs // BLOCK, BLOCK * bits // WORD, WORD // bits, PANEL)
    if bits == 4:
        words = (words[..., ::2, :] & 15) | (words[..., 1::2, :] << 4)
    words = words.transpose(3, 4)  # [P, blocks, words, 32, bytes]
    parts = [part.contiguous().view(torch.uint8).flatten(2) for part in (header, words)]
    format = INTEGERS[bits, group, addends is not None]
    return Panels(torch.cat(parts, 2).flatten(1), format, outputs, inputs)


def rounded(weight: Tensor, group: int = BLOCK, bits: int = 8) -> Panels:
    """A weight [N, K], rounded to integers with a scale for each group of inputs."""
    values = weight.float().view(len(weight), -1, group)
    scales = values.abs().amax(2, keepdim=True).clamp_(min=1e-20).div_(LARGEST[bits])
    integers = (values / scales).round_().to(torch.int8).view(weight.shape)
    return of_integers(integers, scales[..., 0], bits=bits)


def samples(weight: Tensor) -> Iterator[tuple[Panels, Tensor]]:
    """Some weights in every format, and what they are in float32; the integers come from this weight [N, K]."""
    for dtype in HALVES:
        yield of_halves(weight.to(dtype)), weight.to(dtype).float()
    for bits, group, with_addends in INTEGERS:
        values = weight.view(torch.int32) & 15 if bits == 4 else weight.view(torch.int32) >> 8 & 255
        values = (values if bits == 4 and with_addends else values - 2 ** (bits - 1)).to(torch.int8)
        scales, addends = weight[:, ::group].bfloat16().float().contiguous(), weight[:, 1::group].bfloat16().float()
        wide = values.float() * scales.repeat_interleave(group, 1)  # exact, like the sum, which is rounded once
        exact = wide.double() + addends.repeat_interleave(group, 1) if with_addends else wide
        yield of_integers(values, scales, addends.contiguous() if with_addends else None, bits), exact.float()


def _panelled(rows: Tensor) -> Tensor:
    """[N, blocks, x] → [P, blocks, 32 rows, x]; rows of zeros complete the last panel."""
    padded = F.pad(rows, (0, 0, 0, 0, 0, -len(rows) % PANEL))
    return padded.view(-1, PANEL, *rows.shape[1:]).transpose(1, 2)


def _by_input(weight: Tensor) -> Tensor:
    """[N, K] → [P, blocks, 32 inputs, 32 outputs]"""
    return _panelled(weight.view(len(weight), -1, BLOCK)).transpose(2, 3).contiguous()
