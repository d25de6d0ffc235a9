"""Distillation of computed logits, against `distill` and against its own noise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.teaching import teach
from windfall.train.coupling import TextRows
from windfall.train.distill_logits import distill_logits
from windfall.train.losses import Goal, distill
from windfall.train.mixtures import parse_mixture
from windfall.train.unroll import aligned, unroll


@pytest.mark.parametrize("kind", ["eagle3", "eagle3-pruned"])
@pytest.mark.parametrize("loss", ["kl", "lk:0.5,match:2"])
def test_it_is_the_same_as_a_product_with_the_vocabulary(kind: str, loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windfall.train.losses.MAX_LOGITS", 4 * 5 * 61)
    head, teacher, outputs = teach(kind)
    states, final, valid = aligned(head, unroll(head, outputs, 3), outputs)
    states = states.detach().requires_grad_()
    scale = torch.ones(states.shape[:2]).requires_grad_()
    given, goal = teacher.vocabularies(head), Goal(parse_mixture(loss))

    def logits(rows: Tensor, factors: Tensor) -> Tensor:
        return (rows @ head.vocabulary.T) * factors[:, None]

    ours = distill_logits(logits, (states, scale), final.expand(3, -1, -1), given, valid.float(), goal)
    plain = distill(states, final, given, valid.float(), goal=goal)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    found, slope = torch.autograd.grad(ours.loss, (states, scale))
    (wanted,) = torch.autograd.grad(plain.loss, states)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(slope, (wanted * states).sum(-1), rtol=1e-3, atol=1e-4)


def test_the_backward_pass_has_the_same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the gradient would not be that of the loss."""
    monkeypatch.setattr("windfall.train.losses.MAX_LOGITS", 4 * 5 * 61)
    head, teacher, outputs = teach("eagle3-pruned")
    states, final, valid = aligned(head, unroll(head, outputs, 2), outputs)
    states, rows = states.detach(), len(final)
    text = TextRows(torch.arange(rows).expand(2, -1), torch.tensor([0.0, 1.0])[:, None].expand(2, rows))
    given, goal = teacher.vocabularies(head), Goal(parse_mixture("coupled"), text, seed=7)

    def loss(moved: Tensor) -> Tensor:
        product = lambda part: part @ head.vocabulary.T  # noqa: E731
        return distill_logits(product, (moved,), final.expand(2, -1, -1), given, valid.float(), goal).loss

    leaf = states.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(leaf), leaf)
    step = 1e-2 * torch.randn_like(states)
    change = (loss(states + step) - loss(states - step)) / 2
    torch.testing.assert_close(change, (slope * step).sum(), rtol=2e-2, atol=1e-3)
    assert float(loss(states)) == float(loss(states))
