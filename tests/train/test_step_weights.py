"""Weights of draft steps, against loops over chains."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.teaching import batch, same, teach
from helpers.tiny import tiny
from windfall.model.target import Target
from windfall.train.objectives import objective
from windfall.train.step_weights import dpace, weigh_steps
from windfall.train.teacher import Teacher
from windfall.train.unroll import aligned, by_column, by_row, unroll


def test_dpace_sums_the_chances_to_reach_later_steps() -> None:
    chances = torch.tensor([0.8, 0.2, 0.5])
    smoothed = [0.9, 0.6, 0.75]
    reach = [math.prod(smoothed[: m + 1]) for m in range(3)]
    same(dpace(chances), torch.tensor([sum(reach[k:]) for k in range(3)]))
    valid = torch.tensor([False, True, True])
    same(dpace(chances, valid), torch.tensor([0.6 + 0.45, 0.6 + 0.45, 0.45]))


def test_weights_by_row_are_those_of_chains() -> None:
    """Row r of step s belongs to the chain of column r-1-s, whose first step is row r-s."""
    head, _, outputs = teach("eagle3", batch(2))
    _, _, valid = aligned(head, unroll(head, outputs, 4), outputs)
    torch.manual_seed(0)
    chances = torch.rand(valid.shape) * valid
    columns = by_column(chances, outputs)
    same(by_row(list(columns), outputs), chances)
    found = weigh_steps("dpace", valid, outputs, lambda: chances)
    rows = [(b, int(r)) for b in range(2) for r in outputs.batch.answer[b, 1:].nonzero()]
    place = {row: i for i, row in enumerate(rows)}
    for i, (b, r) in enumerate(rows):
        for step in range(4):
            if r - step < 1:
                assert not valid[step, i] and found[step, i] == 0
                continue
            chain = [place.get((b, r - step + m)) for m in range(4)]
            reach, total = 1.0, 0.0
            for m, row in enumerate(chain):
                if row is not None:
                    reach *= 0.5 * float(chances[m, row]) + 0.5
                    total += reach if m >= step else 0.0
            assert float(found[step, i]) == pytest.approx(total, rel=1e-5)


def test_fixed_weights() -> None:
    _, _, outputs = teach("eagle3")
    valid = torch.tensor([[True, True], [False, True]])
    never = lambda: pytest.fail("only dpace looks at the head")  # noqa: E731
    same(weigh_steps("decay", valid, outputs, never, 0.9), torch.tensor([[1, 1], [0, 0.9]]))
    same(weigh_steps("equal", valid, outputs, never), valid.float())
    exponential = torch.tensor([[1, 1], [0, math.exp(-0.25)]])
    same(weigh_steps("exp", valid, outputs, never), exponential)
    same(weigh_steps("dpace", valid, outputs, never, training=False), exponential)


@pytest.mark.parametrize("name", ["ttt", "hass", "griffin", "medusa", "hydra"])
def test_objectives_with_several_steps_take_all_weights(name: str) -> None:
    target = Target(tiny(num_hidden_layers=4))
    head = objective(name).new_head(target, {})
    teacher = Teacher(target.model, head.config.taps)
    outputs = teacher.run(batch())

    def loss(**settings: str) -> float:
        method = objective(name, **settings, **({"noise": 0.0} if name in ("hass", "griffin") else {}))
        return float(method.report(head, outputs, teacher, 1.0).loss.detach())

    exponential, by_chance, usual = loss(step_weights="exp"), loss(step_weights="dpace"), loss()
    assert len({exponential, by_chance, usual}) == 3
    head.eval()
    assert loss(step_weights="dpace") == pytest.approx(exponential, rel=1e-4), "in validation"
