"""Norms, rotations and activations of families of models: here as torch computes them, in a second process under
Triton's interpreter, and from tests/gpu on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from helpers.family_kernels import check_activations, check_norm_styles, check_rotations
from helpers.interpreter import both


@both
@pytest.mark.parametrize(("n", "width"), [(1, 64), (3, 700)])
def test_styles_of_norms(n: int, width: int, dtype: torch.dtype) -> None:
    check_norm_styles(n, width, dtype)


@both
def test_activations(dtype: torch.dtype) -> None:
    check_activations(3, 700, dtype)


@both
@pytest.mark.parametrize(
    ("name", "n", "heads", "shared", "width", "rotated"),
    [
        ("cohere", 2, 4, 2, 16, 16),
        ("glm", 1, 3, 1, 16, 8),
        ("glm", 3, 4, 2, 24, 24),
        ("olmo2", 2, 6, 2, 16, 16),
        ("olmo2", 3, 4, 4, 24, 0),
    ],
)
def test_rotations(name: str, n: int, heads: int, shared: int, width: int, rotated: int, dtype: torch.dtype) -> None:
    check_rotations(name, n, heads, shared, width, rotated, dtype)
