"""Muon for matrices of a shape together: the updates of `torch.optim.Muon`, in fewer operators."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

from helpers.pretend_device import PretendDevice
from windfall.train import muon
from windfall.train.muon import Muon

SHAPES = ((6, 6), (6, 6), (9, 4), (4, 9), (9, 4), (1, 5))


def matrices() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def train(given: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        for matrix in given:
            matrix.grad = torch.randn(matrix.shape, generator=generator)
        optimizer.step()


def test_the_updates_are_those_of_torch() -> None:
    ours, theirs = matrices(), matrices()
    train(ours, Muon(ours, weight_decay=0.1), 5)
    train(theirs, torch.optim.Muon(theirs, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), 5)
    for own, right, start in zip(ours, theirs, matrices(), strict=True):
        torch.testing.assert_close(own, right, rtol=1e-2, atol=1e-3)
        assert (own - start).abs().max() > 0.05


def test_large_matrices_are_updated_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same result, and memory for only these few."""
    together: Counter[int] = Counter()
    orthogonal: Callable[[torch.Tensor], torch.Tensor] = muon.orthogonal

    def counted(given: torch.Tensor) -> torch.Tensor:
        together[len(given)] += 1
        return orthogonal(given)

    monkeypatch.setattr(muon, "orthogonal", counted)
    found = []
    for most in (muon.MAX_NUMBERS, 2 * 36):
        monkeypatch.setattr(muon, "MAX_NUMBERS", most)
        given = [nn.Parameter(torch.ones(6, 6)) for _ in range(5)]
        train(given, Muon(given, weight_decay=0.1), 2)
        found.append(torch.stack(given))
    assert together == {5: 2, 2: 4, 1: 2}
    torch.testing.assert_close(*found)


def test_matrices_without_a_gradient_stay() -> None:
    given = matrices()
    given[0].grad = torch.ones(6, 6)
    optimizer = Muon(given, weight_decay=0.1)
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    moved = [not torch.equal(own, start) for own, start in zip(given, matrices(), strict=True)]
    assert moved == [True] + [False] * 5


def test_a_saved_state_goes_on() -> None:
    whole, cut = matrices(), matrices()
    optimizer = Muon(whole, weight_decay=0.1)
    train(whole, optimizer, 2)
    first = Muon(cut, weight_decay=0.1)
    train(cut, first, 2)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = Muon(cut, weight_decay=0.0)
    second.load_state_dict(torch.load(file))
    train(whole, optimizer, 2, seed=2)
    train(cut, second, 2, seed=2)
    assert all(torch.equal(one, other) for one, other in zip(whole, cut, strict=True))


def test_more_matrices_of_a_shape_take_no_more_operators() -> None:
    counts = []
    for count in (2, 20):
        given = [nn.Parameter(torch.randn(6, 4)) for _ in range(count)]
        optimizer = Muon(given, weight_decay=0.1)
        train(given, optimizer, 1)
        held = [tensor for own in given for tensor in (own, own.grad, optimizer.state[own]["momentum_buffer"])]
        device = PretendDevice(held)
        with device:
            optimizer.step()
        counts.append(sum(device.operators.values()))
    assert counts[0] == counts[1] < 40
