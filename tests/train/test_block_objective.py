"""The objective of block heads: what rows see, the loss against an explicit loop, and whether heads learn."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from helpers.random_heads import BLOCKS, random_block
from helpers.teaching import batch, greedy
from helpers.tiny import VOCABULARY, prompt, tiny
from windfall.heads.block import BlockHead
from windfall.heads.fitting import fit
from windfall.model.target import Target
from windfall.train import losses
from windfall.train.batch import Batch
from windfall.train.block_losses import block_figures, label_chances
from windfall.train.block_memory import Blocks, PaddedSizes
from windfall.train.coupling import TextRows
from windfall.train.new_block import PAIRS
from windfall.train.objectives import objective
from windfall.train.objectives.block import block_states, choose_anchors
from windfall.train.teacher import Teacher, TeacherOutput


def given(name: str = "block", **changes: Any) -> tuple[BlockHead, Teacher, TeacherOutput]:
    target = Target(tiny())
    head = fit(random_block(name, **changes), target)
    teacher = Teacher(target.model, head.config.taps)
    return head.train(), teacher, teacher.run(batch(3))


def every_block(outputs: TeacherOutput) -> Blocks:
    return Blocks.where(outputs.batch.answered, torch.device("cpu"))


def test_rows_see_the_text_before_the_anchor_only() -> None:
    """Other tokens after an anchor, and other features from it on, leave its block as it was."""
    for name in ("block", "block-dflash", "block-conv", "block-windows"):
        head, _, outputs = given(name)
        blocks = every_block(outputs)
        before = block_states(head, outputs, blocks, PaddedSizes())
        for text, start in ((0, 9), (1, 7), (2, 12)):
            tokens, features = outputs.batch.tokens.clone(), outputs.features.clone()
            tokens[text, start + 1 :] = 3
            features[text, start:] = 5.0
            other = outputs._replace(batch=replace(outputs.batch, tokens=tokens), features=features)
            after = block_states(head, other, blocks, PaddedSizes())
            same = (blocks.texts != text) | (blocks.starts <= start)
            torch.testing.assert_close(after[same], before[same])
            assert not torch.isclose(after[~same], before[~same]).all(-1).all(-1).any()
        tokens = outputs.batch.tokens.clone()
        tokens[0, 9] = (tokens[0, 9] + 1) % VOCABULARY
        after = block_states(head, outputs._replace(batch=replace(outputs.batch, tokens=tokens)), blocks, PaddedSizes())
        moved = (blocks.texts == 0) & (blocks.starts == 9)
        assert not torch.isclose(after[moved], before[moved]).all()
        torch.testing.assert_close(after[~moved], before[~moved])


def explicit(head: BlockHead, teacher: Teacher, outputs: TeacherOutput, blocks: Blocks, unary: float) -> list[Tensor]:
    """For each depth, the losses of all valid rows, one by one."""
    config, batch = head.config, outputs.batch
    names = torch.arange(VOCABULARY) if head.draft_tokens is None else head.draft_tokens
    found: list[list[Tensor]] = [[] for _ in range(config.depth)]
    normed = head.normed(block_states(head, outputs, blocks, PaddedSizes()))
    for place, (text, start) in enumerate(zip(blocks.texts.tolist(), blocks.starts.tolist(), strict=True)):
        carry = head.first_carry(batch.tokens[text, start][None], normed[place : place + 1])
        for depth in range(config.depth):
            if start + depth + 1 >= batch.tokens.shape[1] or not batch.answer[text, start + depth + 1]:
                break
            own = normed[place, depth + config.first_row]
            plain = head.vocabulary_logits(own)
            scores = plain
            if head.pair is not None:
                query, carry = head.pair.query(batch.tokens[text, start + depth][None], own[None], carry)
                scores = plain + (query * head.pair.keys(torch.arange(len(names)))).sum(-1)
            p = teacher.output(outputs.final[text, start + depth]).softmax(-1)[names]
            loss = -(p * scores.log_softmax(-1)).sum()
            if head.pair is not None:
                loss = loss - unary * (p * plain.log_softmax(-1)).sum()
            found[depth].append(loss)
    return [torch.stack(own) for own in found]


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("rows", [1, 7, 10**6])
def test_the_loss_is_that_of_an_explicit_loop(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss and its gradients do not depend on how many rows are computed at a time."""
    if rows != 7 and name not in ("block", "block-pruned"):
        return
    monkeypatch.setattr(losses, "MAX_LOGITS", rows * VOCABULARY)
    head, teacher, outputs = given(name)
    method = objective("block", share=1.0, unary=0.4)
    blocks = every_block(outputs)
    parts = explicit(head, teacher, outputs, blocks, 0.4)
    wanted = sum(math.exp(-depth / 4) * own.sum() for depth, own in enumerate(parts)) / len(blocks.texts)
    report = method.report(head, outputs, teacher, 0.0)
    torch.testing.assert_close(report.loss, wanted, rtol=1e-4, atol=1e-4)
    parameters = [p for p in head.parameters() if p.requires_grad]
    ours, true = (torch.autograd.grad(x, parameters, allow_unused=True) for x in (report.loss, wanted))
    for own, right in zip(ours, true, strict=True):
        assert (own is None) == (right is None)
        if own is not None:
            torch.testing.assert_close(own, right, rtol=1e-3, atol=1e-4 * float(right.abs().max()) + 1e-6)


def test_a_soft_cap_has_the_right_gradient() -> None:
    head, teacher, outputs = given(softcap=4.0)
    blocks = every_block(outputs)
    parts = explicit(head, teacher, outputs, blocks, 0.3)
    wanted = sum(math.exp(-depth / 4) * own.sum() for depth, own in enumerate(parts)) / len(blocks.texts)
    report = objective("block", share=1.0).report(head, outputs, teacher, 0.0)
    torch.testing.assert_close(report.loss, wanted, rtol=1e-4, atol=1e-4)
    ours, true = (torch.autograd.grad(x, [head.fc.weight])[0] for x in (report.loss, wanted))
    torch.testing.assert_close(ours, true, rtol=1e-3, atol=1e-4 * float(true.abs().max()))


def test_losses_change_after_the_first_part_of_the_training() -> None:
    head, teacher, outputs = given()
    plain, other = objective("block", share=1.0), objective("block", share=1.0, loss="tv", unary=0.0)
    early, late = (other.report(head, outputs, teacher, progress).loss for progress in (0.39, 0.41))
    without = objective("block", share=1.0, unary=0.0).report(head, outputs, teacher, 1.0).loss
    torch.testing.assert_close(early, without)
    assert late < early < plain.report(head, outputs, teacher, 0.39).loss
    for loss in ("lk", "match", "coupled:0.5,lk:0.5"):
        report = objective("block", loss=loss).report(head, outputs, teacher, 1.0)
        assert bool(torch.isfinite(report.loss)) and report.steps.shape == (head.config.depth,)


@pytest.mark.parametrize(
    ("name", "unary", "loss", "judges"),
    [("block", 0.3, "lk", 2), ("block", 0.0, "lk", 1), ("block", 0.3, "kl", 1), ("block-dflash", 0.3, "lk", 1)],
)
def test_the_target_is_compared_in_two_ways_only_if_both_count(
    name: str, unary: float, loss: str, judges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the loss of U + e, and with the cross-entropy of U alone if there are pair scores."""
    made, take = set(), losses.Judge.take

    def counted(judge: losses.Judge, *given: Any) -> None:
        made.add(judge)
        take(judge, *given)

    monkeypatch.setattr(losses.Judge, "take", counted)
    head, teacher, outputs = given(name)
    report = objective("block", share=1.0, loss=loss, unary=unary).report(head, outputs, teacher, 1.0)
    assert len(made) == judges and report.loss.isfinite()


def test_losses_are_compiled_once_for_all_parts_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounter()
    compiled = cache(partial(torch.compile, dynamic=True, backend=counter))
    monkeypatch.setattr(losses, "_fused", lambda function, _: compiled(function))
    head, teacher, outputs = given("block-plain")
    plain, other = objective("block", share=1.0), objective("block", share=1.0, loss="tv")
    for rows in (5, 7, 12, 20, 50, 10**6):  # at a time
        monkeypatch.setattr(losses, "MAX_LOGITS", rows * VOCABULARY)
        plain.report(head, outputs, teacher, 1.0)
        monkeypatch.setattr(losses, "MAX_LOGITS", rows * VOCABULARY * losses.MIXTURE_TENSORS)
        other.report(head, outputs, teacher, 1.0)
    torch._dynamo.reset()
    assert counter.frame_count == 3, "the labels, the cross-entropies, and the other losses"


def test_anchors_are_a_share_of_the_answers() -> None:
    _, _, outputs = given()
    answer = outputs.batch.answer
    possible = {(b, t) for b in range(3) for t in range(1, answer.shape[1] - 1) if answer[b, t + 1]}
    answered = outputs.batch.answered
    for random in (False, True):
        assert {*map(tuple, choose_anchors(answered, 1.0, 512, random).nonzero().tolist())} == possible
        blocks = Blocks.where(choose_anchors(answered, 0.5, 512, random), torch.device("cpu"))
        found = [*zip(blocks.texts.tolist(), blocks.starts.tolist(), strict=True)]
        assert found == sorted(found) and {*found} <= possible
        assert torch.bincount(blocks.texts).tolist() == blocks.counts == [7, 5, 5]
        assert choose_anchors(answered, 1.0, 4, random).sum(1).tolist() == [4, 4, 4]
        assert not choose_anchors(answered & False, 0.5, 512, random).any()
    draws = {tuple(choose_anchors(answered, 0.5, 512, True).flatten().tolist()) for _ in range(4)}
    assert len(draws) > 1


def test_a_batch_without_answers_has_no_loss() -> None:
    head, teacher, outputs = given()
    outputs = outputs._replace(batch=replace(outputs.batch, answer=outputs.batch.answer & False))
    report = objective("block").report(head, outputs, teacher, 1.0)
    assert float(report.loss) == 0
    report.loss.backward()


def test_figures_of_a_validation() -> None:
    head, teacher, outputs = given("block-pruned")
    method, blocks = objective("block", share=1.0), every_block(outputs)
    figures = method.report(head.eval(), outputs, teacher, 1.0).figures
    assert figures is not None and {*figures} == {"top1", "recall", "tv", "greedy_top1", "greedy_recall"}
    rows = method.rows(head, outputs, outputs.batch.answered)
    vocabularies, text = teacher.vocabularies(head), outputs.batch
    tokens = text.tokens[:, 1:][text.answer[:, 1:]]
    final = outputs.final[:, :-1][text.answer[:, 1:]]
    first = TextRows(tokens, torch.tensor([0.0] * 14 + [1.0] * (len(tokens) - 14)))  # the first text is greedy
    alone = block_figures(rows, final, vocabularies, first, head.config.candidates)
    chances = label_chances(rows, vocabularies, tokens)
    names = head.draft_tokens.tolist()
    for depth in range(head.config.depth):
        sums, greedy = {"top1": 0.0, "recall": 0.0, "tv": 0.0}, 0
        for place, (b, start) in enumerate(zip(blocks.texts.tolist(), blocks.starts.tolist(), strict=True)):
            if not rows.valid[depth, place]:
                continue
            unary = head.vocabulary_logits(rows.states[depth, place])
            scores = unary + head.pair.keys(torch.arange(30)) @ rows.queries[depth, place]
            token = int(text.tokens[b, start + depth + 1])
            p = teacher.output(outputs.final[b, start + depth]).softmax(-1)
            q = torch.zeros(VOCABULARY).index_copy(0, head.draft_tokens, scores.softmax(-1))
            torch.testing.assert_close(chances[depth, place], q[token])
            sums["top1"] += names[int(scores.argmax())] == token
            sums["recall"] += token in [names[i] for i in unary.topk(head.config.candidates).indices.tolist()]
            sums["tv"] += float((p - q).abs().sum() / 2)
            greedy += (b == 0) * (names[int(scores.argmax())] == token)
        for name, total in sums.items():
            assert torch.equal(figures[name], alone[name])
            assert alone[name][:, depth].tolist() == pytest.approx([total, int(rows.valid[depth].sum())], abs=1e-4)
        assert alone["greedy_top1"][:, depth].tolist() == [greedy, int(rows.valid[depth, blocks.texts == 0].sum())]


def test_dpace_weighs_rows_by_the_chance_to_reach_them() -> None:
    head, teacher, outputs = given()
    plain, other = (objective("block", share=1.0, step_weights=kind) for kind in ("exp", "dpace"))
    assert plain.report(head, outputs, teacher, 0.0).loss != other.report(head, outputs, teacher, 0.0).loss
    head.eval()
    assert plain.report(head, outputs, teacher, 0.0).loss == other.report(head, outputs, teacher, 0.0).loss


@pytest.mark.parametrize("pair", PAIRS)
def test_a_head_memorises_a_few_texts(pair: str) -> None:
    target = Target(tiny(num_hidden_layers=2))
    method = objective("block", share=1.0, loss="lk")
    torch.manual_seed(0)
    head = method.new_head(target, {"layers": 2, "block": 4, "pair": pair, "rank": 8, "conv": 2})
    teacher = Teacher(target.model, head.config.taps)
    tokens = torch.cat([greedy(target.model, prompt(4, seed), 14) for seed in range(3)])
    answer = torch.ones_like(tokens, dtype=torch.bool)
    answer[:, :4] = False
    outputs = teacher.run(Batch(tokens, answer))
    first = method.report(head, outputs, teacher, 1.0)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2, betas=(0.9, 0.95))
    for step in range(60):
        optimizer.zero_grad()
        method.report(head, outputs, teacher, step / 60).loss.backward()
        optimizer.step()
    last = method.report(head, outputs, teacher, 1.0)
    assert max(last.steps.tolist()) < 0.3 * min(first.steps.tolist()) and min(last.hits.tolist()) > 0.5
    if head.pair is not None:
        keys = head.pair.keys(torch.arange(VOCABULARY))
        assert bool((head.pair.query(torch.arange(9), torch.randn(9, 32))[0] @ keys.T).abs().max() > 0.1)
