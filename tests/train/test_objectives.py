"""Training objectives: what they train is what drafting runs, and what they ask for can be learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.random_heads import KINDS, WINDOWED, Chain, random_head
from helpers.random_parallel import KINDS as PARALLEL
from helpers.random_parallel import random_heads
from helpers.tiny import VOCABULARY, prompt, tiny
from windfall import registry
from windfall.core.errors import InputError
from windfall.core.types import Grow
from windfall.heads.base import FeatureHead, Guess
from windfall.heads.fitting import fit
from windfall.heads.layers import masked_attention
from windfall.model.target import Target
from windfall.train import trees as tree_module
from windfall.train.attention import Chains
from windfall.train.losses import Labels, distil
from windfall.train.objectives import OBJECTIVES, objective
from windfall.train.objectives.eagle import disturbed, feature_loss
from windfall.train.objectives.griffin import aligned_columns
from windfall.train.objectives.talf import follow
from windfall.train.recipe import Recipe
from windfall.train.teacher import Batch, Lesson, Teacher
from windfall.train.trees import Grower, Shape, Trees, choose_roots, write_trees
from windfall.train.unroll import aligned, unroll

LENGTH = 20


def batch(count: int = 2, length: int = LENGTH, start: int = 6) -> Batch:
    """Random texts whose later part is the target's; the second ends early."""
    tokens = torch.tensor([prompt(length, seed) for seed in range(count)])
    answer = torch.zeros_like(tokens, dtype=torch.bool)
    answer[:, start:] = True
    answer[1:, length - 4 :] = False
    return Batch(tokens, answer, torch.tensor([length] + [length - 4] * (count - 1)))


def school(kind: str, given: Batch | None = None, family: str = "llama") -> tuple[FeatureHead, Teacher, Lesson]:
    target = Target(tiny(family))
    head = fit(random_head(kind), target)
    teacher = Teacher(target.model, head.config.taps)
    return head, teacher, teacher.teach(given or batch())


@torch.no_grad()
def drafted(head: FeatureHead, lesson: Lesson, row: int, column: int, path: list[int]) -> Guess:
    """The guess after `path`, which was drafted behind this column: one row at a time, each seeing all before it."""
    memory, columns = Chain(head), column + 1
    hidden = head.fuse(lesson.features[row : row + 1, :columns])
    tokens = lesson.batch.tokens[row : row + 1, 1 : columns + 1]
    guess: Guess = head(tokens, hidden, torch.arange(columns)[None], memory)
    for step, token in enumerate(path):
        guess = head(torch.tensor([[token]]), guess.recycled[:, -1:], torch.tensor([[columns + step]]), memory)
    return Guess(guess.state[0, -1], guess.recycled[0, -1])


def same(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


# ---- chains


@pytest.mark.parametrize("kind", [*KINDS, *WINDOWED])
def test_unrolled_rows_are_drafted_rows(kind: str) -> None:
    """What ttt, HASS and Griffin train on."""
    head, _, lesson = school(kind)
    guesses = unroll(head, lesson, 4)
    for step, guess in enumerate(guesses):
        for column in (0, 3, 11):
            path = lesson.batch.tokens[1, column + 2 : column + 2 + step].tolist()
            alone = drafted(head, lesson, 1, column, path)
            same(guess.state[1, column], alone.state)
            same(guess.recycled[1, column], alone.recycled)


def chain_mask(columns: int, passes: int) -> Tensor:
    """What a pass's rows see of the text and of each later pass, their own included: [columns, passes * columns]."""
    eyes = [torch.eye(columns, dtype=torch.bool)] * (passes - 1)
    return torch.cat([torch.ones(columns, columns, dtype=torch.bool).tril(), *eyes], -1)


def test_hass_mask_of_the_third_pass() -> None:
    """Row 5 of 6 sees true features in columns 0 to 3, the first pass's in 4, and its own input, the second's, in 5."""
    columns, row, level, memory = 6, 5, 2, Chains()
    names = torch.eye(3 * columns).unflatten(0, (3, columns))  # as values: what comes out tells which were seen
    for values in names:
        found = memory.attend(0, *(torch.randn(1, 1, columns, 3 * columns) for _ in range(2)), values[None, None])
    third = found[0, 0, row - level].unflatten(0, (3, columns))  # by level, the column of the key's own chain
    rows = [[column + own for column in third[own].nonzero().flatten().tolist()] for own in range(3)]
    assert rows == [[0, 1, 2, 3], [4], [5]]


@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "texts", "size"),
    [(torch.float32, 2, 8), (torch.float32, 1, 7), (torch.float64, 2, 8)],
    ids=["fused", "odd", "masked"],
)
def test_chains_see_the_text_and_themselves(dtype: torch.dtype, texts: int, size: int, shared: int) -> None:
    """Output and gradients of four passes, against one softmax under an explicit mask."""
    torch.manual_seed(0)
    passes, columns, memory = 4, 37, Chains()
    queries, keys, values = (
        [torch.randn(texts, heads, columns, size, dtype=dtype, requires_grad=True) for _ in range(passes)]
        for heads in (6, 6 // shared, 6 // shared)
    )
    ours = [memory.attend(0, *rows) for rows in zip(queries, keys, values, strict=True)]
    plain = []
    for count, own in enumerate(queries, 1):
        seen = torch.cat(keys[:count], 2), torch.cat(values[:count], 2)
        plain.append(masked_attention(own, *seen, chain_mask(columns, count)[None]))
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    slopes = [torch.randn_like(out) for out in plain]
    learning = [*queries, *keys, *values]
    found, wanted = (torch.autograd.grad(out, learning, slopes) for out in (ours, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_no_gradient_runs_from_pass_to_pass() -> None:
    head, _, lesson = school("eagle")
    for detach in (True, False):
        guesses = unroll(head, lesson, 3, detach)
        [slope] = torch.autograd.grad(guesses[2].state.sum(), guesses[0].recycled, allow_unused=True)
        assert (slope is None) == detach


def test_eagle_and_hass_are_the_sum_of_their_parts() -> None:
    """Against a loop over rows: row r's guesses come from column r-1-s, and its feature is the target's at r."""
    head, teacher, lesson = school("eagle")
    output = teacher.output.weight
    for name, parts, steps in (("eagle", (1.0, 0.1, 0.0), 1), ("hass", (1.0, 0.1, 1.0), 3)):
        method = objective(name, noise=0)
        wanted, rows = torch.zeros(()), [(b, int(r)) for b in range(2) for r in lesson.batch.answer[b, 1:].nonzero()]
        for step, guess in enumerate(unroll(head, lesson, steps, detach=True)):
            for b, r in rows:
                if r - 1 - step < 0:
                    continue
                own, true = guess.state[b, r - 1 - step], lesson.final[b, r]
                chances, logq = (true @ output.T).softmax(-1), (own @ output.T).log_softmax(-1)
                top = chances.topk(10)
                ce = -(chances * logq).sum() * parts[1] - (top.values * logq[top.indices]).sum() * parts[2]
                wanted = wanted + ce + parts[0] * torch.nn.functional.smooth_l1_loss(own, true)
        loss = method.report(head, lesson, teacher, 1.0).loss
        torch.testing.assert_close(loss, wanted / len(rows), rtol=1e-4, atol=1e-5)


def test_weights_of_the_paper() -> None:
    assert tuple(objective("hass", weights="salf").parts()) == (1.0, 10.0, 10.0)
    assert tuple(objective("eagle", weights="salf", ce=3.0).parts()) == (1.0, 3.0, 0.0)
    with pytest.raises(InputError, match="width"):
        feature_loss(torch.zeros(1, 2, 3), torch.zeros(2, 4), torch.ones(1, 2))


def test_noise_is_uniform_and_stronger_for_short_texts() -> None:
    _, _, lesson = school("eagle")
    moved = (disturbed(lesson, 0.1).features - lesson.features).flatten(1)  # of 20 and 16 tokens
    for row, length in enumerate((20, 16)):
        bound = 0.1 * 512 / length
        assert 0.95 * bound < float(moved[row].abs().max()) <= bound * 1.0001
        assert float(moved[row].mean().abs()) < 0.2 * bound
    head, teacher, lesson = school("eagle")
    method = objective("eagle")
    measured = [method.report(head.eval(), lesson, teacher, 1.0).loss.item() for _ in range(2)]
    assert measured[0] == measured[1] != method.report(head.train(), lesson, teacher, 1.0).loss.item()


def test_the_release_bug_weakens_attention() -> None:
    head, _, lesson = school("eagle")
    plain, odd = (objective("hass", release_bug=bug).guesses(head, lesson, 1.0) for bug in (False, True))
    last = lesson.batch.tokens.shape[1] - 2
    same(plain[0].state[:, last], odd[0].state[:, last])  # the last row has no future
    assert not torch.allclose(plain[0].state[:, 0], odd[0].state[:, 0], rtol=1e-2)


def test_griffin_follows_a_chain_while_its_tokens_are_first_choices() -> None:
    head, teacher, lesson = school("eagle")
    tokens, first = lesson.batch.tokens, 20  # of 61, so that chains of every length occur
    method = objective("griffin", first=first, noise=0)
    guesses = unroll(head, lesson, 3, detach=True)
    kept = aligned_columns(head, guesses, lesson, first)
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
    passes = [len(method.report(head, lesson, teacher, progress).steps) for progress in (0.0, 0.3, 0.34, 0.7, 1.0)]
    assert passes == [1, 1, 2, 3, 3]


# ---- heads beside each other


@pytest.mark.parametrize("kind", PARALLEL)
def test_parallel_heads_train_on_what_they_draft(kind: str) -> None:
    """What is trained at a row is what the drafter's tree says after the text before it, head by head."""
    target = Target(tiny())
    head = random_heads(kind, target.model)
    drafter = registry.drafter("medusa" if kind.startswith("medusa") else "hydra", model=head)
    drafter.attach(target)
    method = objective("medusa" if kind.startswith("medusa") else "hydra")
    lesson = Teacher(target.model, (-1,)).teach(batch(1))
    states = method.states(head, lesson)  # rows 5 to 18
    for row in (5, 12):
        for i in range(3):
            committed = lesson.batch.tokens[0, : row + 1 - i].tolist()
            drafter.start([committed], target.prefill([committed], drafter.taps), [None])
            [tree] = drafter.begin([committed[-1]])
            for token in lesson.batch.tokens[0, row + 1 - i : row + 1].tolist():
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
    lesson = teacher.teach(batch())
    method = objective("medusa" if kind.startswith("medusa") else "hydra", soft=0.7, hard=0.2, decay=0.8, heads=4)
    told = method.report(head, lesson, teacher, 1.0)
    rows = torch.tensor([(b, int(r)) for b in range(2) for r in lesson.batch.answer[b, 1:].nonzero()])
    names = torch.arange(VOCABULARY) if head.draft_tokens is None else head.draft_tokens
    chances = teacher.output(lesson.final[rows[:, 0], rows[:, 1]]).softmax(-1)[:, names]
    text = lesson.batch.tokens[rows[:, 0], rows[:, 1] + 1]
    wanted = 0.7 * chances + 0.2 * (text[:, None] == names)
    plain = torch.zeros(())
    for i, states in enumerate(method.states(head, lesson)):
        logq = head.head_logits(i, states).log_softmax(-1)
        plain = plain - 0.8**i * (wanted * logq).sum() / len(rows)
    torch.testing.assert_close(told.loss, plain, rtol=1e-5, atol=1e-5)
    ours, true = (torch.autograd.grad(x, list(head.parameters())) for x in (told.loss, plain))
    for own, right in zip(ours, true, strict=True):
        torch.testing.assert_close(own, right, rtol=1e-3, atol=1e-4 * float(right.abs().max()) + 1e-7)
    assert told.steps.shape == (4,)


def test_hydra_drops_only_while_it_learns() -> None:
    target = Target(tiny())
    method = objective("hydra", plus=True)
    head = method.new_head(target, {})
    assert head.prefix is not None and head.config.blocks == 4
    lesson = Teacher(target.model, (-1,)).teach(batch())
    once, again = (method.states(head.train(), lesson) for _ in range(2))
    assert not torch.equal(once, again)
    once, again = (method.states(head.eval(), lesson) for _ in range(2))
    assert torch.equal(once, again)


def test_shapes_that_a_head_cannot_have_are_refused() -> None:
    target = Target(tiny())
    for name, shape in (("eagle", {"taps": (1, 2)}), ("griffin", {"layers": 2}), ("medusa", {"intermediate": 9})):
        with pytest.raises(InputError, match="leave out"):
            objective(name).new_head(target, shape)
    with pytest.raises(InputError, match="nothing to learn"):
        objective("medusa", soft=0)


# ---- trees


def grown(lesson: Lesson, teacher: Teacher, shape: Shape, share: float = 1.0) -> Trees:
    roots = choose_roots(lesson.batch.answer, share)
    return Grower(teacher.model).grow(lesson.batch.tokens, lesson.final, roots, shape)


def path_to(trees: Trees, row: int, root: int, depth: int, node: int) -> list[int]:
    path = []
    for level in reversed(trees.levels[:depth]):
        path.insert(0, int(level.tokens[row, root, node]))
        node = int(level.parents[row, root, node])
    return path


def test_roots_are_where_the_target_wrote_the_next_word() -> None:
    columns, valid = choose_roots(batch().answer)
    assert columns[0].tolist() == list(range(4, 18)) and bool(valid[0].all())
    assert columns[1][valid[1]].tolist() == list(range(4, 14))
    half, kept = choose_roots(batch().answer, 0.5, random=False)
    assert half[0][kept[0]].tolist() == list(range(5, 18, 2))
    columns, valid = choose_roots(torch.zeros(2, 2, dtype=torch.bool))
    assert columns.shape == (2, 1) and not bool(valid.any())


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gpt2", "gemma2", "qwen3"])
def test_the_target_grows_its_own_beam(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every level is the best k of all children by path probability, and labels are the target's states there."""
    monkeypatch.setattr(tree_module, "ROOTS", 5)
    k, (_, teacher, lesson) = 3, school("eagle3", family=family)
    trees = grown(lesson, teacher, Shape(k, 3))
    with torch.no_grad():
        for row, root in ((0, 0), (0, 13), (1, 6)):
            prefix = lesson.batch.tokens[row, : int(trees.columns[row, root]) + 2].tolist()
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


def test_trees_end_where_the_targets_positions_do() -> None:
    _, teacher, lesson = school("eagle3", batch(2, 256), family="gpt2")
    trees = grown(lesson, teacher, Shape(2, 3), share=0.2)
    assert int(trees.columns[trees.valid].max()) <= 256 - 5


def test_forced_trees_hold_the_text() -> None:
    _, teacher, lesson = school("eagle3")
    trees = grown(lesson, teacher, Shape(2, 3, forced=True))
    free = grown(lesson, teacher, Shape(2, 3))
    assert not torch.equal(trees.levels[0].tokens, free.levels[0].tokens)
    for root in range(14):
        for depth in (1, 2, 3):
            text = lesson.batch.tokens[0, root + 6 : root + 6 + depth].tolist()
            paths = [path_to(trees, 0, root, depth, node) for node in range(2)]
            assert (text in paths) == (len(text) == depth), (root, depth)
            assert paths[0] != paths[1]


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "eagle3-normed", "eagle3-deep", "eagle3-windows", "eagle-window"])
def test_rows_along_trees_are_drafted_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windfall.train.objectives.talf.ROOTS", 5)
    head, teacher, lesson = school(kind)
    trees = grown(lesson, teacher, Shape(3, 3))
    guesses = follow(head, lesson, trees, detach=True)
    for row, root in ((0, 0), (0, 13), (1, 6)):
        column = int(trees.columns[row, root])
        same(guesses[0].state[row, root], drafted(head, lesson, row, column, []).state)
        for depth, guess in enumerate(guesses[1:], 1):
            for node in range(3):
                alone = drafted(head, lesson, row, column, path_to(trees, row, root, depth, node))
                same(guess.state[row, root * 3 + node], alone.state)


def greedy(model: Any, start: list[int], length: int) -> Tensor:
    tokens = torch.tensor([start])
    with torch.no_grad():
        while tokens.shape[1] < length:
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("vocabulary", [None, torch.arange(0, 60, 2)])
def test_a_single_branch_along_the_targets_own_text_is_hass(kind: str, vocabulary: Tensor | None) -> None:
    """Loss and gradient, where both have all three passes: TALF means over nodes, HASS sums passes."""
    target = Target(tiny())
    tokens = torch.cat([greedy(target.model, prompt(6, seed), LENGTH) for seed in (0, 1)])
    answer = torch.zeros_like(tokens, dtype=torch.bool)
    answer[:, 6 : LENGTH - 2] = True  # two more tokens of text for the later passes
    method = objective("talf", k=1, share=1.0, kind=kind)
    torch.manual_seed(0)
    head = method.new_head(target, {"vocabulary": vocabulary})
    teacher = Teacher(target.model, head.config.taps)
    lesson = teacher.teach(Batch(tokens, answer))
    told = method.report(head, lesson, teacher, 1.0)
    columns, loss, vocabularies = slice(4, LENGTH - 4), torch.zeros(()), teacher.vocabularies(head)
    for step, guess in enumerate(unroll(head, lesson, 3, detach=True)):
        states = head.normed(guess.state[:, columns].flatten(0, 1))[None]
        final = lesson.final[:, columns.start + 1 + step : columns.stop + 1 + step].flatten(0, 1)
        weights = torch.full((1, len(final)), 1 / len(final))
        part = distil(states, final, vocabularies, weights)
        torch.testing.assert_close(told.steps[step], part.steps[0], rtol=1e-5, atol=1e-5)
        loss = loss + part.loss
    torch.testing.assert_close(told.loss * 3, loss, rtol=1e-5, atol=1e-5)
    learning = [p for p in head.parameters() if p.requires_grad]
    ours, wanted = (torch.autograd.grad(x, learning) for x in (told.loss * 3, loss))
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["eagle", "eagle3-pruned"])
def test_trees_from_files_teach_the_same(kind: str, tmp_path: Path) -> None:
    """All 61 probabilities fit into the file; a second call finds the work done."""
    head, teacher, lesson = school(kind)
    shape = Shape(3, 2)
    assert list(write_trees(teacher, [lesson.batch], tmp_path, shape)) == [1]
    [file] = tmp_path.iterdir()
    written = file.stat().st_mtime_ns
    assert list(write_trees(teacher, [lesson.batch, batch(3)], tmp_path, shape)) == [1, 2]
    assert file.stat().st_mtime_ns == written
    padded = Batch(*(torch.nn.functional.pad(x, (0, 3)) for x in lesson.batch[:2]))  # other company, other padding
    stored = objective("talf", k=3, stored=str(tmp_path)).report(head, teacher.teach(padded), teacher, 1.0)
    direct = objective("talf", k=3, share=1.0).report(head, lesson, teacher, 1.0)
    for ours, wanted in zip(stored, direct, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=2e-3, atol=2e-3)
    learning = [p for p in head.parameters() if p.requires_grad]
    ours, wanted = (torch.autograd.grad(x.loss, learning) for x in (stored, direct))
    for own, true in zip(ours, wanted, strict=True):
        torch.testing.assert_close(own, true, rtol=1e-2, atol=1e-2 * float(true.abs().max()))
    with pytest.raises(InputError, match="k=3 and passes=3"):
        objective("talf", stored=str(tmp_path)).report(head, lesson, teacher, 1.0)
    with pytest.raises(InputError, match="no trees for a text"):
        objective("talf", k=3, stored=str(tmp_path)).report(head, teacher.teach(batch(2, 12)), teacher, 1.0)
    with pytest.raises(InputError, match="holds no trees"):
        objective("talf", stored=str(tmp_path / "nothing")).report(head, lesson, teacher, 1.0)


def test_files_keep_the_likeliest_tokens_and_the_rest_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "KEPT", 5)
    head, teacher, lesson = school("eagle")
    list(write_trees(teacher, [lesson.batch], tmp_path, Shape(2, 2)))
    told = objective("talf", k=2, stored=str(tmp_path)).report(head, lesson, teacher, 1.0)
    trees = grown(lesson, teacher, Shape(2, 2))
    guess = follow(head, lesson, trees, detach=True)[1]
    with torch.no_grad():
        p = teacher.output(trees.levels[0].labels[trees.valid].flatten(0, 1)).softmax(-1)
        logq = head.logits(guess.state.unflatten(1, (-1, 2))[trees.valid].flatten(0, 1)).log_softmax(-1)
        top = p.topk(5)
        others = torch.ones_like(p).scatter(1, top.indices, 0)
        rest = (p * others).sum(-1), (logq.exp() * others).sum(-1).clamp(min=1e-6).log()
        wanted = -(top.values * logq.gather(1, top.indices)).sum(-1) - rest[0] * rest[1]
        torch.testing.assert_close(told.steps[1], wanted.mean(), rtol=5e-3, atol=5e-3)


# ---- what is learnt


@pytest.mark.parametrize("family", ["phi", "gemma2"])
@pytest.mark.parametrize("kind", ["eagle3", "eagle3-pruned"])
def test_distil_compares_what_is_said_in_the_end(family: str, kind: str) -> None:
    """Vocabularies with a bias, and logits that are bent before they become probabilities."""
    head, teacher, lesson = school(kind, family=family)
    bias = teacher.output.bias
    if bias is not None:
        with torch.no_grad():
            bias.copy_(torch.randn_like(bias) * 5)
        head.borrow(teacher.model.get_input_embeddings().weight, teacher.output.weight, bias)
    guesses = unroll(head, lesson, 1)
    states, final, valid = aligned(head, guesses, lesson)
    rows = lesson.batch.answer[:, 1:]
    chances = teacher.model(lesson.batch.tokens).logits[:, :-1][rows].softmax(-1)
    chances = chances if head.draft_tokens is None else chances[:, head.draft_tokens]
    logq = head.logits(guesses[0].state.roll(1, 1)[rows]).log_softmax(-1)
    fused = distil(states, final, teacher.vocabularies(head), valid.float())
    torch.testing.assert_close(fused.loss, -(chances * logq).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("labels", [Labels(), Labels(0.1, 1.0, 10), Labels(1.0, 0.5, 5)])
@pytest.mark.parametrize("kind", ["eagle3", "eagle3-pruned", "eagle", "eagle3-before-fc"])
def test_gradients_of_distil(kind: str, labels: Labels) -> None:
    """Borrowed, pruned and own vocabularies."""
    head, teacher, lesson = school(kind)
    states, final, valid = aligned(head, unroll(head, lesson, 3), lesson)
    states = states.detach().requires_grad_()
    weights = valid * torch.tensor([1, 0.9, 0.81])[:, None]
    logq = torch.log_softmax(states @ head.vocabulary.T, -1)
    chances = torch.softmax(final @ teacher.output.weight.T, -1)
    chances = chances if head.draft_tokens is None else chances[:, head.draft_tokens]
    top = chances.topk(labels.k, -1)
    wanted = (labels.share * chances).scatter_add(1, top.indices, labels.top * top.values)
    plain = -(weights * (wanted * logq).sum(-1)).sum()
    fused = distil(states, final, teacher.vocabularies(head), weights, labels).loss
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
    learning = [states, head.vocabulary] if head.vocabulary.requires_grad else [states]
    ours, true = (torch.autograd.grad(x, learning) for x in (fused, plain))
    torch.testing.assert_close(ours, true, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_method_reports_and_learns_from_every_parameter(name: str) -> None:
    target = Target(tiny())
    method = objective(name)
    torch.manual_seed(0)
    head = method.new_head(target, {})
    teacher = Teacher(target.model, head.config.taps)
    for progress in (0.0, 0.5, 1.0):
        told = method.report(head, teacher.teach(batch()), teacher, progress)
        assert told.loss.ndim == 0 and bool(torch.isfinite(told.loss)) and told.steps.shape == told.hits.shape
        assert bool(((told.hits >= 0) & (told.hits <= 1)).all())
    told.loss.backward()
    assert [key for key, p in head.named_parameters() if p.grad is None or not bool(p.grad.abs().sum())] == []


def overfit(name: str, length: int, rate: float, **settings: Any) -> tuple[list[float], list[float]]:
    """Hits by step before and after learning a few of the target's own texts by heart."""
    target = Target(tiny())
    method = objective(name, **settings)
    torch.manual_seed(0)
    head = method.new_head(target, {})
    teacher = Teacher(target.model, head.config.taps)
    tokens = torch.cat([greedy(target.model, prompt(4, seed), 16) for seed in range(4)])
    answer = torch.ones_like(tokens, dtype=torch.bool)
    answer[:, :4] = False
    lesson = teacher.teach(Batch(tokens, answer))
    before = method.report(head, lesson, teacher, 1.0).hits.tolist()
    recipe = Recipe(steps=length, rate=rate)
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], betas=(0.9, 0.95))
    for step in range(length):
        optimizer.param_groups[0]["lr"] = recipe.rate_at(step / length)
        optimizer.zero_grad()
        method.report(head, lesson, teacher, step / length).loss.backward()
        optimizer.step()
    return before, method.report(head.eval(), lesson, teacher, 1.0).hits.tolist()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ttt", {"steps": 3}),
        ("hass", {"noise": 0.0}),
        ("talf", {"k": 2, "share": 1.0}),
        ("griffin", {"noise": 0.0}),
        ("medusa", {"heads": 2, "blocks": 2}),
        ("medusa", {"heads": 2, "soft": 0.0, "hard": 1.0, "own_vocabulary": True}),
        ("hydra", {"heads": 3}),
    ],
)
def test_a_head_learns_a_few_texts_by_heart(name: str, settings: dict[str, Any]) -> None:
    before, after = overfit(name, 200, 1e-2, **settings)
    assert max(before) < 0.5 and min(after) > 0.8, (before, after)
