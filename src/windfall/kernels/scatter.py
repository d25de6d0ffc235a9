"""A second destination for the rows that a norm computes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Scatter(NamedTuple):
    """Write buffer[rows[i]] = row i of the norm, or of the sum before it."""

    buffer: Tensor  # [m, width], written
    rows: Tensor  # [n] long
    normed: bool  # whether the normalised row is written, rather than the sum
