"""Products that layers compute themselves: in calls of fixed sizes, which the layers' own results decide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.quantised import CountingLinear, OneScaleLinear, OutlierLinear, OwnLinear, PlaceLinear
from windfall.kernels.module_product import (
    LARGER_PIECES,
    PIECE_ROWS,
    ModuleProduct,
    kind_of,
    steady_sizes,
    trial_rows,
)
from windfall.kernels.norm import add_norm, gate_mul
from windfall.kernels.product import linear, norm_gate, product

INPUTS = 24
ROWS = trial_rows(INPUTS, torch.empty(0, dtype=torch.bfloat16))


def layer(kind: Any = OwnLinear, outputs: int = 16, seed: int = 0, bias: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    made: nn.Module = kind(nn.Linear(INPUTS, outputs, bias=bias).to(torch.bfloat16).requires_grad_(False))
    return made


class Recording(OwnLinear):
    """Notes the number of rows of each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__.setdefault("calls", []).append(x.shape[-2])
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (OwnLinear, (PIECE_ROWS, *LARGER_PIECES)),
        (CountingLinear, (PIECE_ROWS, 64, 128)),
        (OneScaleLinear, ()),
        (OutlierLinear, ()),
        (PlaceLinear, ()),
    ],
)
def test_sizes_of_calls_follow_from_the_bits(kind: Any, sizes: tuple[int, ...]) -> None:
    assert steady_sizes(layer(kind), ROWS) == sizes


def test_a_layer_that_gives_other_bits_when_repeated_has_no_sizes() -> None:
    class Noisy(OwnLinear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.01 * torch.rand(())

    assert steady_sizes(layer(Noisy), ROWS) == ()


@pytest.mark.parametrize(
    ("count", "sizes", "calls"),
    [
        (1, (32,), [32]),
        (32, (32,), [32]),
        (70, (32,), [32, 32, 32]),
        (40, (32, 64, 512), [64]),
        (100, (32, 64, 512), [512]),
        (600, (32, 64), [64] * 10),
    ],
)
def test_exact_products_use_the_allowed_sizes_only(count: int, sizes: tuple[int, ...], calls: list[int]) -> None:
    made: Any = layer(Recording)
    together = ModuleProduct([made], INPUTS, 16)
    together.sizes = [sizes]
    rows = torch.randn(count, INPUTS).to(torch.bfloat16)
    found = together(rows, exact=True)
    assert made.calls == calls
    assert torch.equal(found, OwnLinear.forward(made, rows))
    made.calls.clear()
    assert torch.equal(together(rows, exact=False), found) and made.calls == [count]


@pytest.mark.parametrize("exact", [False, True])
def test_it_takes_the_place_of_a_merged_weight(exact: bool) -> None:
    one, other = layer(outputs=10, bias=True), layer(outputs=10, seed=1)
    together = ModuleProduct([one, other], INPUTS, 20)
    x, residual, norm = torch.randn(5, INPUTS), torch.randn(5, INPUTS), torch.rand(INPUTS)
    wanted = torch.cat([one(x), other(x)], -1)
    for found in (linear(x, together, None, exact), product(x, together, None, exact)):
        assert torch.equal(found, wanted)
    into = torch.empty_like(wanted)
    assert linear(x, together, None, exact, out=into) is into and torch.equal(into, wanted)
    normed, total = add_norm(x, residual, norm, 1e-6)
    gates, found_total = norm_gate(x, residual, norm, 1e-6, together, exact)
    assert torch.equal(gates, gate_mul(torch.cat([one(normed), other(normed)], -1))) and torch.equal(found_total, total)
    assert len(together) == 20 and together.shape == (20, INPUTS)


def test_kinds_name_what_quantises_a_layer() -> None:
    packed = nn.Linear(2, 2)
    packed.weight.__class__ = type("Packed", (nn.Parameter,), {})
    assert [kind_of(each) for each in (nn.Linear(2, 2), packed, layer())] == ["Linear", "Linear (Packed)", "OwnLinear"]
