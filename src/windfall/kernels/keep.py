"""Where the rows of a norm also go."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Keep(NamedTuple):
    rows: Tensor  # [m, width], written
    at: Tensor  # [n] long: each row's place there
    normed: bool  # the norm, or else the sum before it
