"""Training objectives: their losses against explicit loops, and whether heads learn from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.random_parallel import KINDS as PARALLEL
from helpers.random_parallel import random_heads
from helpers.teaching import LENGTH, batch, greedy, same, teach
from helpers.tiny import VOCABULARY, prompt, tiny
from windfall import registry
from windfall.core.errors import InputError
from windfall.core.types import Grow
from windfall.heads.fitting import fit
from windfall.model.target import Target
from windfall.train.batch import Batch
from windfall.train.objectives import OBJECTIVES, objective
from windfall.train.objectives.eagle import add_noise, feature_loss
from windfall.train.objectives.griffin import aligned_columns
from windfall.train.recipe import Recipe
from windfall.train.teacher import Teacher
from windfall.train.unroll import unroll


def test_eagle_and_hass_are_the_sum_of_their_parts() -> None:
    """Against a loop over rows: row r's guesses come from column r-1-s, and its feature is the target's at r."""
    head, teacher, outputs = teach("eagle")
    output = teacher.output.weight
    for name, parts, steps in (("eagle", (1.0, 0.1, 0.0), 1), ("hass", (1.0, 0.1, 1.0), 3)):
        method = objective(name, noise=0)
        wanted, rows = torch.zeros(()), [(b, int(r)) for b in range(2) for r in outputs.batch.answer[b, 1:].nonzero()]
        for step, guess in enumerate(unroll(head, outputs, steps, detach=True)):
            for b, r in rows:
                if r - 1 - step < 0:
                    continue
                own, true = guess.state[b, r - 1 - step], outputs.final[b, r]
                chances, logq = (true @ output.T).softmax(-1), (own @ output.T).log_softmax(-1)
                top = chances.topk(10)
                ce = -(chances * logq).sum() * parts[1] - (top.values * logq[top.indices]).sum() * parts[2]
                wanted = wanted + ce + parts[0] * torch.nn.functional.smooth_l1_loss(own, true)
        loss = method.report(head, outputs, teacher, 1.0).loss
        torch.testing.assert_close(loss, wanted / len(rows), rtol=1e-4, atol=1e-5)


def test_loss_weights() -> None:
    assert tuple(objective("hass", weights="salf").loss_weights()) == (1.0, 10.0, 10.0)
    assert tuple(objective("eagle", weights="salf", ce=3.0).loss_weights()) == (1.0, 3.0, 0.0)
    with pytest.raises(InputError, match="width"):
        feature_loss(torch.zeros(1, 2, 3), torch.zeros(2, 4), torch.ones(1, 2))


def test_noise_is_uniform_and_stronger_for_short_texts() -> None:
    _, _, outputs = teach("eagle")
    moved = (add_noise(outputs, 0.1).features - outputs.features).flatten(1)  # of 20 and 16 tokens
    for row, length in enumerate((20, 16)):
        bound = 0.1 * 512 / length
        assert 0.95 * bound < float(moved[row].abs().max()) <= bound * 1.0001
        assert float(moved[row].mean().abs()) < 0.2 * bound
    head, teacher, outputs = teach("eagle")
    method = objective("eagle")
    measured = [method.report(head.eval(), outputs, teacher, 1.0).loss.item() for _ in range(2)]
    assert measured[0] == measured[1] != method.report(head.train(), outputs, teacher, 1.0).loss.item()


def test_the_release_bug_weakens_attention() -> None:
    head, _, outputs = teach("eagle")
    plain, odd = (objective("hass", release_bug=bug).guesses(head, outputs, 1.0) for bug in (False, True))
    last = outputs.batch.tokens.shape[1] - 2
    same(plain[0].state[:, last], odd[0].state[:, last])  # the last row has no future
    assert not torch.allclose(plain[0].state[:, 0], odd[0].state[:, 0], rtol=1e-2)


def test_griffin_follows_a_chain_while_its_tokens_are_top_choices() -> None:
    head, teacher, outputs = teach("eagle")
    tokens, first = outputs.batch.tokens, 20  # of 61, so that chains of every length occur
    method = objective("griffin", first=first, noise=0)
    guesses = unroll(head, outputs, 3, detach=True)
    kept = aligned_columns(head, guesses, outputs, first)
    lengths = set()
    for b in range(2):
        for column in range(LENGTH - 5):
            length = 0
            while length < 2:
                choices = head.logits(guesses[length].state[b, column]).topk(first).indices.tolist()
                if int(tokens[b, column + 2 + length]) not in choices:
                    break
                length += 1
            lengths.add(length)
            assert [bool(own[b, column]) for own in kept] == [step <= length for step in range(3)]
    assert lengths == {0, 1, 2}
    passes = [len(method.report(head, outputs, teacher, progress).steps) for progress in (0.0, 0.3, 0.34, 0.7, 1.0)]
    assert passes == [1, 1, 2, 3, 3]


@pytest.mark.parametrize("kind", PARALLEL)
def test_parallel_heads_train_on_what_they_draft(kind: str) -> None:
    """Each head's states at a row lead to the drafter's children after the same text."""
    target = Target(tiny())
    head = random_heads(kind, target.model)
    drafter = registry.drafter("medusa" if kind.startswith("medusa") else "hydra", model=head)
    drafter.attach(target)
    method = objective("medusa" if kind.startswith("medusa") else "hydra")
    outputs = Teacher(target.model, (-1,)).run(batch(1))
    states = method.states(head, outputs)  # rows 5 to 18
    for row in (5, 12):
        for i in range(3):
            committed = outputs.batch.tokens[0, : row + 1 - i].tolist()
            drafter.start([committed], target.prefill([committed], drafter.taps), [None])
            [tree] = drafter.begin([committed[-1]])
            for token in outputs.batch.tokens[0, row + 1 - i : row + 1].tolist():
                zero = torch.zeros(1, dtype=torch.long)
                tree = tree.extend(zero + len(tree) - 1, zero + token, zero.float(), zero)
            [tree] = drafter.expand([tree], [Grow(torch.tensor([len(tree) - 1]), 3)])
            logq = head.head_logits(i, states[i, row - 5]).log_softmax(-1)
            names = torch.arange(len(logq)) if head.draft_tokens is None else head.draft_tokens
            top = logq.topk(3)
            assert tree.tokens[-3:].tolist() == names[top.indices].tolist()
            same(tree.logq[-3:], top.values)


@pytest.mark.parametrize("kind", PARALLEL)
def test_losses_of_parallel_heads(kind: str) -> None:
    """Against plain cross-entropies, with both kinds of labels, gradients included."""
    target = Target(tiny())
    head = fit(random_heads(kind, target.model), target)
    teacher = Teacher(target.model, (-1,))
    outputs = teacher.run(batch())
    method = objective("medusa" if kind.startswith("medusa") else "hydra", soft=0.7, hard=0.2, decay=0.8, heads=4)
    report = method.report(head, outputs, teacher, 1.0)
    rows = torch.tensor([(b, int(r)) for b in range(2) for r in outputs.batch.answer[b, 1:].nonzero()])
    names = torch.arange(VOCABULARY) if head.draft_tokens is None else head.draft_tokens
    chances = teacher.output(outputs.final[rows[:, 0], rows[:, 1]]).softmax(-1)[:, names]
    text = outputs.batch.tokens[rows[:, 0], rows[:, 1] + 1]
    wanted = 0.7 * chances + 0.2 * (text[:, None] == names)
    plain = torch.zeros(())
    for i, states in enumerate(method.states(head, outputs)):
        logq = head.head_logits(i, states).log_softmax(-1)
        plain = plain - 0.8**i * (wanted * logq).sum() / len(rows)
    torch.testing.assert_close(report.loss, plain, rtol=1e-5, atol=1e-5)
    ours, true = (torch.autograd.grad(x, list(head.parameters())) for x in (report.loss, plain))
    for own, right in zip(ours, true, strict=True):
        torch.testing.assert_close(own, right, rtol=1e-3, atol=1e-4 * float(right.abs().max()) + 1e-7)
    assert report.steps.shape == (4,)


def test_hydra_uses_dropout_in_training_only() -> None:
    target = Target(tiny())
    method = objective("hydra", plus=True)
    head = method.new_head(target, {})
    assert head.prefix is not None and head.config.blocks == 4
    outputs = Teacher(target.model, (-1,)).run(batch())
    once, again = (method.states(head.train(), outputs) for _ in range(2))
    assert not torch.equal(once, again)
    once, again = (method.states(head.eval(), outputs) for _ in range(2))
    assert torch.equal(once, again)


def test_impossible_shapes_are_refused() -> None:
    target = Target(tiny())
    for name, shape in (("eagle", {"taps": (1, 2)}), ("griffin", {"layers": 2}), ("medusa", {"intermediate": 9})):
        with pytest.raises(InputError, match="leave out"):
            objective(name).new_head(target, shape)
    with pytest.raises(InputError, match="nothing to learn"):
        objective("medusa", soft=0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_gives_every_parameter_a_gradient(name: str) -> None:
    target = Target(tiny())
    method = objective(name)
    torch.manual_seed(0)
    head = method.new_head(target, {})
    if name == "block":
        head.pair.scale.data.fill_(1.0)  # at 0, as in a new head, the other weights of the pair score wait for it
    teacher = Teacher(target.model, head.config.taps)
    for progress in (0.0, 0.5, 1.0):
        report = method.report(head, teacher.run(batch()), teacher, progress)
        assert report.loss.ndim == 0 and bool(torch.isfinite(report.loss)) and report.steps.shape == report.hits.shape
        assert bool(((report.hits >= 0) & (report.hits <= 1)).all())
    report.loss.backward()
    assert [key for key, p in head.named_parameters() if p.grad is None or not bool(p.grad.abs().sum())] == []


def overfit(name: str, length: int, rate: float, **settings: Any) -> tuple[list[float], list[float]]:
    """Hits by step before and after memorising a few of the target's own texts."""
    target = Target(tiny(num_hidden_layers=2))
    method = objective(name, **settings)
    torch.manual_seed(0)
    head = method.new_head(target, {})
    teacher = Teacher(target.model, head.config.taps)
    tokens = torch.cat([greedy(target.model, prompt(4, seed), 14) for seed in range(3)])
    answer = torch.ones_like(tokens, dtype=torch.bool)
    answer[:, :4] = False
    outputs = teacher.run(Batch(tokens, answer))
    before = method.report(head, outputs, teacher, 1.0).hits.tolist()
    recipe = Recipe(steps=length, rate=rate)
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], betas=(0.9, 0.95))
    for step in range(length):
        optimizer.param_groups[0]["lr"] = recipe.rate_at(step / length)
        optimizer.zero_grad()
        method.report(head, outputs, teacher, step / length).loss.backward()
        optimizer.step()
    return before, method.report(head.eval(), outputs, teacher, 1.0).hits.tolist()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ttt", {"steps": 3}),
        ("hass", {"noise": 0.0}),
        ("talf", {"k": 2, "share": 1.0, "passes": 2}),
        ("griffin", {"noise": 0.0}),
        ("medusa", {"heads": 2, "blocks": 2}),
        ("medusa", {"heads": 2, "soft": 0.0, "hard": 1.0, "own_vocabulary": True}),
        ("hydra", {"heads": 3}),
    ],
)
def test_a_head_memorises_a_few_texts(name: str, settings: dict[str, Any]) -> None:
    before, after = overfit(name, 70, 1.5e-2, **settings)
    assert max(before) < 0.45 and min(after) > 0.6, (before, after)
