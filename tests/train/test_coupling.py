"""The noise given a token: it has the distribution of noise that happens to draw this token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from windfall.train.coupling import TextRows, draw_coupling, noise_below
from windfall.train.row_losses import draft_indices, new_generator

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0], dtype=torch.float64)
DRAFTED = torch.tensor([0, 2, 3, 5])
COUNT = 20_000


def rows(temperature: float) -> tuple[Tensor, TextRows]:
    """Many rows of one distribution, and texts drawn from it at a temperature."""
    torch.manual_seed(0)
    drawn = torch.multinomial((LOGITS / (temperature or 1)).softmax(-1), COUNT, replacement=True)
    return LOGITS.expand(COUNT, -1), TextRows(drawn, torch.full((COUNT,), temperature))


def is_gumbel(sample: Tensor) -> bool:
    """A Kolmogorov–Smirnov test; standard Gumbel noise fails once in 100,000 times."""
    below = torch.exp(-torch.exp(-sample.sort().values.double()))
    places = torch.arange(len(sample) + 1) / len(sample)
    gap = torch.maximum(places[1:] - below, below - places[:-1]).max()
    return float(gap) < 2.5 / len(sample) ** 0.5


def fits(observed: Tensor, expected: Tensor) -> bool:
    """A chi-squared test; draws with the expected frequencies fail once in 100,000 times."""
    deviation = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc((expected.new_tensor(len(expected)) - 1) / 2, deviation / 2)) > 1e-5


def seeded() -> torch.Generator:
    return new_generator(torch.device("cpu"), 1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_noise_given_the_text(temperature: float) -> None:
    """The text's token always wins, and over texts drawn from p the noise is independent standard Gumbel noise."""
    logits, text = rows(temperature)
    noise, drawn, temperatures = draw_coupling(logits, None, None, text, seeded())
    scores = (logits / temperature).log_softmax(-1) + noise
    assert scores.argmax(-1).tolist() == drawn.tolist() == text.tokens.tolist()
    assert temperatures.unique().tolist() == pytest.approx([temperature])
    for token in range(len(LOGITS)):
        assert is_gumbel(noise[:, token]), token
    assert float(torch.corrcoef(noise.T).fill_diagonal_(0).abs().max()) < 0.03
    best = scores.max(-1).values
    assert is_gumbel(best)
    assert is_gumbel(best[drawn == 3]), "the maximum does not depend on the token"


def test_fresh_noise_draws_its_own_token() -> None:
    """On greedy texts, and where nothing is known about the text."""
    logits, text = rows(0.0)
    unknown = text._replace(temperatures=text.temperatures * torch.nan)
    shares = LOGITS.softmax(-1)
    for given in (text, unknown, None):
        noise, drawn, temperatures = draw_coupling(logits, None, None, given, seeded())
        assert (logits.log_softmax(-1) + noise).argmax(-1).tolist() == drawn.tolist()
        assert temperatures.unique().tolist() == [1.0]
        observed = torch.bincount(drawn, minlength=len(LOGITS)).double()
        assert fits(observed, COUNT * shares)
        assert is_gumbel(noise[:, 2])


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_tokens_that_the_head_does_not_draft(temperature: float) -> None:
    """Each token is drawn with the target's probability. The noise of drafted tokens does not change."""
    logits, text = rows(temperature)
    indices = draft_indices(DRAFTED, len(LOGITS))
    noise, drawn, _ = draw_coupling(logits, indices, DRAFTED, text, seeded())
    scores = logits.log_softmax(-1)[:, DRAFTED] + noise
    inside = drawn >= 0
    assert scores[inside].argmax(-1).tolist() == drawn[inside].tolist()
    shares = LOGITS.softmax(-1)
    expected = torch.cat([1 - shares[DRAFTED].sum()[None], shares[DRAFTED]])
    observed = torch.bincount(drawn + 1, minlength=len(DRAFTED) + 1).double()
    assert fits(observed, COUNT * expected)
    for place in range(len(DRAFTED)):
        assert is_gumbel(noise[:, place]), place


def test_noise_below_a_limit() -> None:
    logp = LOGITS.log_softmax(-1).expand(1000, -1)
    assert bool((logp + noise_below(logp, torch.full((1000,), -2.0), seeded()) <= -2).all())
    single = noise_below(logp.float(), torch.full((1000,), 0.5), seeded())
    assert single.dtype == torch.float32 and bool((logp + single <= 0.5 + 1e-5).all())
