"""Converts the blocks of GGUF formats, without loss, to integers with scales and addends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from windfall.kernels.panels import Panels, of_halves, of_integers

Array = np.ndarray
Parts = tuple[Array, Array, Array | None]  # integers [blocks, K], and scales and addends [blocks, groups]


def panels(data: Array, format: str, inputs: int) -> Panels:
    """The rows [N, bytes] uint8 of a tensor in this format, each of `inputs` weights."""
    rows = np.ascontiguousarray(data).view(np.uint8)
    if format in HALVES:
        return of_halves(torch.from_numpy(rows).view(HALVES[format]).view(len(rows), inputs))
    read, bytes, bits = INTEGERS[format]
    values, scales, addends = read(rows.reshape(-1, bytes))
    own = None if addends is None else _rows(addends, len(rows), np.float32)
    return of_integers(_rows(values, len(rows), np.int8), _rows(scales, len(rows), np.float32), own, bits)


def _rows(array: Array, count: int, dtype: type) -> torch.Tensor:
    return torch.from_numpy(array.astype(dtype).reshape(count, -1))


def _number(blocks: Array, at: int) -> Array:
    """The float16 at this byte of each block: [blocks, 1] float32"""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _low_high(bytes: Array) -> Array:
    """[blocks, n] → [blocks, 2n]: the low four bits of all bytes, then the high ones."""
    return np.concatenate([bytes & 15, bytes >> 4], 1)


def _bits(bytes: Array, count: int) -> Array:
    """[blocks, n] → [blocks, 8 / count, n]: `count` bits of all bytes, the lowest first."""
    shifts = np.arange(0, 8, count, dtype=np.uint8)[:, None]
    return bytes[:, None] >> shifts & ((1 << count) - 1)


def _fifth_bits(blocks: Array, at: int) -> Array:
    """[blocks, 32]: 16 times the bits of four bytes"""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def _q4_0(blocks: Array) -> Parts:
    return _low_high(blocks[:, 2:]).astype(np.int8) - 8, _number(blocks, 0), None


def _q4_1(blocks: Array) -> Parts:
    return _low_high(blocks[:, 4:]), _number(blocks, 0), _number(blocks, 2)


def _q5_0(blocks: Array) -> Parts:
    values = _low_high(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return values.astype(np.int8) - 16, _number(blocks, 0), None


def _q5_1(blocks: Array) -> Parts:
    return _low_high(blocks[:, 8:]) | _fifth_bits(blocks, 4), _number(blocks, 0), _number(blocks, 2)


def _q8_0(blocks: Array) -> Parts:
    return blocks[:, 2:].view(np.int8), _number(blocks, 0), None


def _q2_k(blocks: Array) -> Parts:
    values = np.concatenate([_bits(half, 2) for half in (blocks[:, 16:48], blocks[:, 48:80])], 1)
    numbers = blocks[:, :16]
    return values, _number(blocks, 80) * (numbers & 15), -(_number(blocks, 82) * (numbers >> 4))


def _q3_k(blocks: Array) -> Parts:
    low = np.concatenate([_bits(half, 2) for half in (blocks[:, 32:64], blocks[:, 64:96])], 1)
    values = (low | _bits(blocks[:, :32], 1) << 2).astype(np.int8) - 4
    scales = _low_high(blocks[:, 96:104]) | _bits(blocks[:, 104:108], 2).reshape(-1, 16) << 4
    return values, _number(blocks, 108) * (scales.astype(np.int8) - 32), None


def _scales_and_minima(blocks: Array) -> tuple[Array, Array]:
    """Of the 8 groups of a block: [blocks, 8] float32 each"""
    first, second, both = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (both & 15) | first >> 6 << 4], 1)
    minima = np.concatenate([second & 63, both >> 4 | second >> 6 << 4], 1)
    return _number(blocks, 0) * scales, _number(blocks, 2) * minima


def _pairs(bytes: Array) -> Array:
    """[blocks, 128] → [blocks, 8, 32]: of 32 bytes each the low four bits, then the high ones."""
    parts = bytes.reshape(-1, 4, 32)
    return np.stack([parts & 15, parts >> 4], 2).reshape(-1, 8, 32)


def _q4_k(blocks: Array) -> Parts:
    scales, minima = _scales_and_minima(blocks)
    return _pairs(blocks[:, 16:]), scales, -minima


def _q5_k(blocks: Array) -> Parts:
    scales, minima = _scales_and_minima(blocks)
    return _pairs(blocks[:, 48:]) | _bits(blocks[:, 16:48], 1) << 4, scales, -minima


def _q6_k(blocks: Array) -> Parts:
    low, high = blocks[:, :128].reshape(-1, 2, 1, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    values = np.concatenate([low & 15, low >> 4], 2).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    values |= (high >> shifts & 3) << 4
    return values.astype(np.int8) - 32, _number(blocks, 208) * blocks[:, 192:208].view(np.int8), None


HALVES = {"F16": torch.float16, "BF16": torch.bfloat16}
INTEGERS: dict[str, tuple[Callable[[Array], Parts], int, int]] = {  # bytes of a block, bits of an integer in panels
    **{"Q4_0": (_q4_0, 18, 4), "Q4_1": (_q4_1, 20, 4), "Q5_0": (_q5_0, 22, 8), "Q5_1": (_q5_1, 24, 8)},
    **{"Q8_0": (_q8_0, 34, 8), "Q2_K": (_q2_k, 84, 4), "Q3_K": (_q3_k, 110, 4), "Q4_K": (_q4_k, 144, 4)},
    **{"Q5_K": (_q5_k, 176, 8), "Q6_K": (_q6_k, 210, 8)},
}
