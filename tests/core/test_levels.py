"""Levels: candidates with pair scores, and a tail without."""

from __future__ import annotations

import math

import pytest
import torch

from windfall.core.levels import entropies, find_level
from windfall.core.sampling import Dice, gumbel
from windfall.core.types import SamplingParams

LOGITS = torch.tensor([[2.0, 0.0, 1.0, -1.0, 0.5], [0.0, 3.0, -2.0, 1.0, 2.5]])
PAIRS = torch.tensor([[0.5, -1.0], [2.0, 0.0]])  # of two nodes of depth 0


def test_candidates_and_tail() -> None:
    level = find_level(LOGITS, 2)
    assert level.tokens.tolist() == [[0, 2], [1, 4]] and level.scores.tolist() == [[2.0, 1.0], [3.0, 2.5]]
    rest = [math.log(1 + math.exp(-1) + math.exp(0.5)), math.log(1 + math.exp(-2) + math.exp(1))]
    assert level.tail.tolist() == pytest.approx(rest)
    whole = find_level(LOGITS, 9)
    assert whole.tokens.shape == (2, 5) and whole.tail.tolist() == [-math.inf] * 2
    torch.testing.assert_close(whole.log_probabilities(), LOGITS.log_softmax(-1).gather(1, whole.tokens))


def test_pair_scores_change_the_candidates_and_the_total() -> None:
    depths = torch.tensor([0, 0])
    logq = find_level(LOGITS, 2).at(depths).log_probabilities(PAIRS)
    for node, pairs in enumerate(PAIRS.tolist()):
        changed = LOGITS[0].clone()
        changed[[0, 2]] += torch.tensor(pairs)
        torch.testing.assert_close(logq[node], changed.log_softmax(-1)[[0, 2]])
        entropy = torch.special.entr(changed.softmax(-1)).sum()
        found = entropies(LOGITS, find_level(LOGITS, 2), PAIRS, depths)[node]
        torch.testing.assert_close(found, entropy)


def test_a_coupled_level_has_the_noise_of_its_position() -> None:
    dice = Dice(SamplingParams(temperature=0.8, seed=5), committed=[1, 2, 3])
    dice.kappa = 1.4
    level = find_level(dice.race(LOGITS, torch.arange(2), None), 2, dice.weight)
    for depth in range(2):
        noise = gumbel(dice.params.noise_seed, torch.tensor([3 + depth]), torch.arange(5))[0]
        best = (LOGITS[depth] / 0.8 + noise).topk(2).indices
        assert level.tokens[depth].tolist() == best.tolist()
        changed = LOGITS[depth].clone()
        changed[best] += PAIRS[0]
        wanted = ((changed / 0.8 + noise) / 1.4).log_softmax(-1)[best]
        found = level.at(torch.tensor([depth])).log_probabilities(PAIRS[:1])[0]
        torch.testing.assert_close(found, wanted)


def test_excluded_tokens_stay_excluded() -> None:
    scores = torch.tensor([[1.0, -torch.inf, 0.0]])
    logq = find_level(scores, 3).log_probabilities(torch.ones(1, 3))
    assert logq[0, 2] == -torch.inf and float(logq.exp().sum()) == pytest.approx(1.0)
