"""Kinds of norms, rotations and activations, which differ between families of models."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from torch import Tensor


class NormKind(Enum):
    """What a norm multiplies by, and where it rounds. All but CENTRED are root-mean-square norms."""

    ROUNDED = "rounded"  # rounds the normalised values, then multiplies by the weight (Llama)
    WIDE = "wide"  # multiplies in fp32 and rounds once (gpt-oss)
    WIDE_PLUS_ONE = "wide plus one"  # the same with 1 + weight (Gemma)
    CENTRED = "centred"  # subtracts the mean, multiplies in fp32 and rounds once (LayerNorm)


class NormStyle(NamedTuple):
    """How a sum x + residual is made and normalised. The default is that of Llama."""

    kind: NormKind = NormKind.ROUNDED
    bias: Tensor | None = None  # [width], added after the weight is multiplied
    before: Tensor | float | None = None  # x is normalised with this weight [width], or multiplied, before the sum
    parallel: bool = False  # the norm is of the residual alone, not of the sum

    @property
    def plain(self) -> bool:
        """Whether it is that of Llama."""
        return self.kind is NormKind.ROUNDED and self.bias is None and self.before is None and not self.parallel


class HeadNorms(NamedTuple):
    """Norms of the heads of queries and keys, applied before the rotary embedding."""

    queries: Tensor  # [d], or [heads * d]: a weight for each head
    keys: Tensor  # [d], or [kv_heads * d]
    eps: float
    kind: NormKind = NormKind.ROUNDED
    joint: bool = False  # all heads are normalised as one vector; needs a weight for each head


class Rotation(NamedTuple):
    """How a rotary embedding turns the dimensions of a head. The default is that of Llama."""

    adjacent: bool = False  # it turns neighbouring dimensions, rather than one of each half
    wide: bool = False  # it computes in fp32 and rounds once


class Activation(Enum):
    """The activation of an MLP without a gate."""

    GELU = "gelu"  # in its tanh form
    RELU_SQUARED = "relu squared"


LLAMA_NORM = NormStyle()
LLAMA_ROTATION = Rotation()
