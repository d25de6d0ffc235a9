"""Kinds of norms, which differ between families of models."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from torch import Tensor


class NormKind(Enum):
    """What a root-mean-square norm multiplies by, and where it rounds."""

    ROUNDED = "rounded"  # rounds the normalised values, then multiplies by the weight (Llama)
    WIDE = "wide"  # multiplies in fp32 and rounds once (gpt-oss)
    WIDE_PLUS_ONE = "wide plus one"  # the same with 1 + weight (Gemma)


class HeadNorms(NamedTuple):
    """Norms of the heads of queries and keys, applied before the rotary embedding."""

    queries: Tensor  # [d]
    keys: Tensor  # [d]
    eps: float
    kind: NormKind = NormKind.ROUNDED
