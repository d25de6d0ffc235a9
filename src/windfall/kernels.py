"""Skinny matrix products on a CPU: which way of multiplying is fastest depends on how many rows there are.

A tree pass has 2 to 64 rows, where libraries tuned for one row or for many differ by up to two times. Each shape of
weight is timed once at each row count, and every linear layer then uses the best way for the rows it is given.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MARGIN = 0.93  # another way must be this much faster than the ordinary one
ROUNDS = 7

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def ordinary(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, weight, bias)


def flipped(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The weight as the left factor: W xᵀ, then turned back."""
    out = torch.mm(weight, x.reshape(-1, x.shape[-1]).t()).t().reshape(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


WAYS: tuple[Multiply, ...] = (ordinary, flipped)


@torch.inference_mode()
def choose(weight: Tensor, rows: int) -> Multiply:
    """The fastest way to multiply this weight with this many rows, by medians of interleaved timings."""
    x = torch.randn(1, rows, weight.shape[1], dtype=weight.dtype)
    seconds: dict[Multiply, list[float]] = {way: [] for way in WAYS}
    for round_ in range(ROUNDS + 1):
        for way, times in seconds.items():
            started = time.perf_counter()
            way(x, weight, None)
            if round_:  # the first warms up
                times.append(time.perf_counter() - started)
    median = {way: sorted(times)[ROUNDS // 2] for way, times in seconds.items()}
    fastest = min(WAYS, key=lambda way: median[way])
    return fastest if median[fastest] < MARGIN * median[ordinary] else ordinary


def tune(model: Any, rows: tuple[int, ...] = ROWS) -> dict[str, dict[int, str]]:
    """Give every linear layer of a model on a CPU the best way for each row count; returns what was chosen.

    Layers whose ordinary way is always best stay untouched. The results agree to rounding.
    """
    tables: dict[tuple[int, ...], dict[int, Multiply]] = {}
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.device.type == "cpu":
            shape = tuple(module.weight.shape)
            if shape not in tables:
                tables[shape] = {count: choose(module.weight, count) for count in rows}
            if any(way is not ordinary for way in tables[shape].values()):
                module.forward = partial(_multiply, module, _by_rows(tables[shape]))
    return {str(shape): {n: way.__name__ for n, way in table.items()} for shape, table in tables.items()}


def _by_rows(table: dict[int, Multiply]) -> list[Multiply]:
    """Place n: the way for n rows, taken from the nearest count that was timed; past the last, the ordinary one."""
    counts = sorted(table)
    return [ordinary] + [table[min(counts, key=lambda c: abs(c - n))] for n in range(1, counts[-1] + 1)]


def _multiply(module: nn.Linear, ways: list[Multiply], x: Tensor) -> Tensor:
    rows = x.numel() // x.shape[-1]
    way = ways[rows] if rows < len(ways) else ordinary
    return way(x, module.weight, module.bias)
