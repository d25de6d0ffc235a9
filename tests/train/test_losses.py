"""The fused cross-entropies against plain ones, gradients included."""

from __future__ import annotations

import pytest
import torch

from helpers.row_losses import row_losses
from helpers.teaching import teach
from windfall.train.coupling import TextRows
from windfall.train.losses import Goal, Labels, distill, label_chances, target_logits, token_cross_entropy
from windfall.train.mixtures import Mixture, parse_mixture
from windfall.train.row_losses import new_generator, row_targets
from windfall.train.unroll import aligned, unroll


@pytest.mark.parametrize("family", ["phi", "gemma2"])
@pytest.mark.parametrize("kind", ["eagle3", "eagle3-pruned"])
def test_distill_uses_the_final_distributions(family: str, kind: str) -> None:
    """Vocabularies with a bias, and logits that are scaled or capped."""
    head, teacher, outputs = teach(kind, family=family)
    bias = teacher.output.bias
    if bias is not None:
        with torch.no_grad():
            bias.copy_(torch.randn_like(bias) * 5)
        head.borrow(teacher.model.get_input_embeddings().weight, teacher.output.weight, bias)
    guesses = unroll(head, outputs, 1)
    states, final, valid = aligned(head, guesses, outputs)
    rows = outputs.batch.answer[:, 1:]
    chances = teacher.model(outputs.batch.tokens).logits[:, :-1][rows].softmax(-1)
    chances = chances if head.draft_tokens is None else chances[:, head.draft_tokens]
    logq = head.logits(guesses[0].state.roll(1, 1)[rows]).log_softmax(-1)
    fused = distill(states, final, teacher.vocabularies(head), valid.float())
    torch.testing.assert_close(fused.loss, -(chances * logq).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("labels", [Labels(), Labels(0.1, 1.0, 10), Labels(1.0, 0.5, 5)])
@pytest.mark.parametrize("kind", ["eagle3", "eagle3-pruned", "eagle", "eagle3-before-fc"])
def test_gradients_of_distill(kind: str, labels: Labels) -> None:
    """Borrowed, pruned and own vocabularies."""
    head, teacher, outputs = teach(kind)
    states, final, valid = aligned(head, unroll(head, outputs, 3), outputs)
    states = states.detach().requires_grad_()
    weights = valid * torch.tensor([1, 0.9, 0.81])[:, None]
    logq = torch.log_softmax(states @ head.vocabulary.T, -1)
    chances = torch.softmax(final @ teacher.output.weight.T, -1)
    chances = chances if head.draft_tokens is None else chances[:, head.draft_tokens]
    top = chances.topk(labels.k, -1)
    wanted = (labels.share * chances).scatter_add(1, top.indices, labels.top * top.values)
    plain = -(weights * (wanted * logq).sum(-1)).sum()
    fused = distill(states, final, teacher.vocabularies(head), weights, labels).loss
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
    learning = [states, head.vocabulary] if head.vocabulary.requires_grad else [states]
    ours, true = (torch.autograd.grad(x, learning) for x in (fused, plain))
    torch.testing.assert_close(ours, true, rtol=1e-4, atol=1e-4)


MIXTURES = ["kl:2", "tv", "lk", "match", "coupled", "coupled:0.5,lk:0.5", "match:0.3,kl:0.7"]


@pytest.mark.parametrize("labels", [Labels(), Labels(0.1, 1.0, 10)], ids=["plain", "top"])
@pytest.mark.parametrize("kind", ["eagle3", "eagle3-pruned", "eagle3-before-fc"])
@pytest.mark.parametrize("loss", MIXTURES)
def test_distill_with_other_losses(loss: str, kind: str, labels: Labels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused losses are those of `row_losses`, gradients included; without noise also in parts."""
    head, teacher, outputs = teach(kind)
    states, final, valid = aligned(head, unroll(head, outputs, 3), outputs)
    states, mixture = states.detach().requires_grad_(), parse_mixture(loss)
    weights = valid * torch.tensor([1, 0.9, 0.81])[:, None]
    text = TextRows(torch.arange(len(final)) * 2, torch.arange(len(final)) % 3 / 2)
    given = teacher.vocabularies(head)
    logits = states @ head.vocabulary.T
    wanted = target_logits(final, given)
    targets = row_targets(wanted, head.draft_tokens, mixture, text, new_generator(states.device, 5))
    plain = sum((weights[i] * row_losses(logits[i], targets, mixture)).sum() for i in range(3))
    top: Mixture = (("kl", 1.0),)
    likely = row_targets(wanted, head.draft_tokens, top)
    kept = likely.logp >= likely.logp.topk(labels.k, -1).values[:, -1:]
    likely = likely._replace(logp=likely.logp.masked_fill(~kept, -torch.inf))
    tops = sum((weights[i] * row_losses(logits[i], likely, top)).sum() for i in range(3))
    plain = labels.share * plain + labels.top * tops
    if "coupled" not in loss:
        monkeypatch.setattr("windfall.train.losses.MAX_LOGITS", 4 * 5 * 61)
    fused = distill(states, final, given, weights, labels, Goal(mixture, text, 5)).loss
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
    learning = [states, head.vocabulary] if head.vocabulary.requires_grad else [states]
    ours, true = (torch.autograd.grad(x, learning) for x in (fused, plain))
    torch.testing.assert_close(ours, true, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["eagle3", "eagle3-pruned"])
def test_label_chances(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windfall.train.losses.MAX_LOGITS", 3 * 61)
    head, teacher, outputs = teach(kind)
    states, final, _ = aligned(head, unroll(head, outputs, 2), outputs)
    tokens = torch.arange(len(final)) * 2
    found = label_chances(states, teacher.vocabularies(head), tokens)
    q = torch.zeros(2, len(final), 61)
    drafted = slice(None) if head.draft_tokens is None else head.draft_tokens
    q[:, :, drafted] = (states @ head.vocabulary.T).softmax(-1).detach()
    torch.testing.assert_close(found, q[:, torch.arange(len(final)), tokens])


def test_token_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed in parts; tokens that the head lacks (-1) have no loss but are counted."""
    monkeypatch.setattr("windfall.train.losses.MAX_LOGITS", 3 * 11)
    torch.manual_seed(0)
    matrix, states = torch.randn(11, 6), torch.randn(8, 6, requires_grad=True)
    tokens, weights = torch.tensor([0, 3, -1, 5, 10, 2, 7, -1]), torch.tensor([1.0, 2, 1, 0, 1, 1, 0.5, 1])
    report = token_cross_entropy(lambda x: x @ matrix.T, states, tokens, weights)
    logq = (states @ matrix.T).log_softmax(-1)
    losses = torch.where(tokens >= 0, -logq.gather(1, tokens.clamp(min=0)[:, None])[:, 0], 0.0)
    torch.testing.assert_close(report.loss, (losses * weights).sum())
    torch.testing.assert_close(report.steps, (losses * (weights > 0)).sum()[None].detach() / 7)
    hits = ((logq.argmax(-1) == tokens) & (weights > 0)).sum() / 7
    torch.testing.assert_close(report.hits, hits[None])
    [ours], [plain] = (torch.autograd.grad(x, states) for x in (report.loss, (losses * weights).sum()))
    torch.testing.assert_close(ours, plain)
