"""The larger shape that models are widened to."""

from __future__ import annotations

from windfall.bench.widen import Shape

LARGER = Shape(hidden=72, layers=6, intermediate=96, heads=9, kv_heads=3, head_dim=16)  # groups of 3, not of 2
