"""TALF: the target's own trees, and drafting along them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.teaching import LENGTH, batch, drafted, greedy, same, teach
from helpers.tiny import VOCABULARY, prompt, tiny
from windfall.model.target import Target
from windfall.train.batch import Batch
from windfall.train.losses import distill
from windfall.train.objectives import objective, target_trees
from windfall.train.objectives.talf import follow
from windfall.train.objectives.target_trees import TreeGrower, Trees, TreeShape, choose_roots
from windfall.train.teacher import Teacher, TeacherOutput
from windfall.train.unroll import unroll


def grown(outputs: TeacherOutput, teacher: Teacher, shape: TreeShape, share: float = 1.0) -> Trees:
    roots = choose_roots(outputs.batch.answer, share)
    return TreeGrower(teacher.model).grow(outputs.batch.tokens, outputs.final, roots, shape)


def path_to(trees: Trees, row: int, root: int, depth: int, node: int) -> list[int]:
    path = []
    for level in reversed(trees.levels[:depth]):
        path.insert(0, int(level.tokens[row, root, node]))
        node = int(level.parents[row, root, node])
    return path


def test_roots_are_columns_whose_next_token_was_generated() -> None:
    columns, valid = choose_roots(batch().answer)
    assert columns[0].tolist() == list(range(4, 18)) and bool(valid[0].all())
    assert columns[1][valid[1]].tolist() == list(range(4, 14))
    half, kept = choose_roots(batch().answer, 0.5, random=False)
    assert half[0][kept[0]].tolist() == list(range(5, 18, 2))
    columns, valid = choose_roots(torch.zeros(2, 2, dtype=torch.bool))
    assert columns.shape == (2, 1) and not bool(valid.any())


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gpt2", "gemma2", "qwen3"])
def test_trees_are_the_targets_beam(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every level is the best k of all children by path probability, and labels are the target's states there."""
    monkeypatch.setattr(target_trees, "MAX_ROOTS", 5)
    k, (_, teacher, outputs) = 3, teach("eagle3", family=family)
    trees = grown(outputs, teacher, TreeShape(k, 3))
    with torch.no_grad():
        for row, root in ((0, 0), (0, 13), (1, 6)):
            prefix = outputs.batch.tokens[row, : int(trees.columns[row, root]) + 2].tolist()
            beam = [([], 0.0)]
            for depth, level in enumerate(trees.levels, 1):
                rows = torch.tensor([prefix + path for path, _ in beam])
                logp = teacher.model(rows).logits[:, -1].log_softmax(-1)
                every = [
                    ([*path, token], score + float(logp[i, token]))
                    for i, (path, score) in enumerate(beam)
                    for token in range(VOCABULARY)
                ]
                beam = sorted(every, key=lambda own: -own[1])[:k]
                assert [path_to(trees, row, root, depth, n) for n in range(k)] == [path for path, _ in beam]
                texts = torch.tensor([prefix + path for path, _ in beam])
                same(level.labels[row, root], teacher.model.base_model(texts).last_hidden_state[:, -1])


def test_trees_beyond_the_targets_positions_are_invalid() -> None:
    _, teacher, outputs = teach("eagle3", batch(2, 256), family="gpt2")
    trees = grown(outputs, teacher, TreeShape(2, 3), share=0.2)
    assert int(trees.columns[trees.valid].max()) <= 256 - 5


def test_forced_trees_contain_the_text() -> None:
    _, teacher, outputs = teach("eagle3")
    trees = grown(outputs, teacher, TreeShape(2, 3, forced=True))
    free = grown(outputs, teacher, TreeShape(2, 3))
    assert not torch.equal(trees.levels[0].tokens, free.levels[0].tokens)
    for root in range(14):
        for depth in (1, 2, 3):
            text = outputs.batch.tokens[0, root + 6 : root + 6 + depth].tolist()
            paths = [path_to(trees, 0, root, depth, node) for node in range(2)]
            assert (text in paths) == (len(text) == depth), (root, depth)
            assert paths[0] != paths[1]


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "eagle3-normed", "eagle3-deep", "eagle3-windows", "eagle-window"])
def test_rows_along_trees_are_drafted_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windfall.train.objectives.talf.MAX_ROOTS", 5)
    head, teacher, outputs = teach(kind)
    trees = grown(outputs, teacher, TreeShape(3, 3))
    guesses = follow(head, outputs, trees, detach=True)
    for row, root in ((0, 0), (0, 13), (1, 6)):
        column = int(trees.columns[row, root])
        same(guesses[0].state[row, root], drafted(head, outputs, row, column, []).state)
        for depth, guess in enumerate(guesses[1:], 1):
            for node in range(3):
                alone = drafted(head, outputs, row, column, path_to(trees, row, root, depth, node))
                same(guess.state[row, root * 3 + node], alone.state)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("vocabulary", [None, torch.arange(0, 60, 2)])
def test_trees_of_one_branch_along_a_greedy_text_train_like_hass(kind: str, vocabulary: Tensor | None) -> None:
    """Loss and gradient, where both have all three passes: TALF averages over nodes, HASS sums over passes."""
    target = Target(tiny())
    tokens = torch.cat([greedy(target.model, prompt(6, seed), LENGTH) for seed in (0, 1)])
    answer = torch.zeros_like(tokens, dtype=torch.bool)
    answer[:, 6 : LENGTH - 2] = True  # two more tokens of text for the later passes
    method = objective("talf", k=1, share=1.0, kind=kind)
    torch.manual_seed(0)
    head = method.new_head(target, {"vocabulary": vocabulary})
    teacher = Teacher(target.model, head.config.taps)
    outputs = teacher.run(Batch(tokens, answer))
    report = method.report(head, outputs, teacher, 1.0)
    columns, loss, vocabularies = slice(4, LENGTH - 4), torch.zeros(()), teacher.vocabularies(head)
    for step, guess in enumerate(unroll(head, outputs, 3, detach=True)):
        states = head.normed(guess.state[:, columns].flatten(0, 1))[None]
        final = outputs.final[:, columns.start + 1 + step : columns.stop + 1 + step].flatten(0, 1)
        weights = torch.full((1, len(final)), 1 / len(final))
        part = distill(states, final, vocabularies, weights)
        torch.testing.assert_close(report.steps[step], part.steps[0], rtol=1e-5, atol=1e-5)
        loss = loss + part.loss
    torch.testing.assert_close(report.loss * 3, loss, rtol=1e-5, atol=1e-5)
    learning = [p for p in head.parameters() if p.requires_grad]
    ours, wanted = (torch.autograd.grad(x, learning) for x in (report.loss * 3, loss))
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)
