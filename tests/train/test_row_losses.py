"""Losses between distributions: against their definitions, against simulation, and their gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from helpers.row_losses import row_losses
from windfall.core.errors import InputError
from windfall.train.coupling import TextRows
from windfall.train.mixtures import KL, LOSSES, Mixture, parse_mixture, without_kl
from windfall.train.row_losses import KAPPA, new_generator, row_targets

ROWS, SIZE = 6, 17


def random_rows(tokens: Tensor | None = None, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits of the head (differentiable) and of the target, in fp64."""
    torch.manual_seed(0)
    drafted = SIZE if tokens is None else len(tokens)
    own = (scale * torch.randn(ROWS, drafted, dtype=torch.float64)).requires_grad_()
    return own, scale * torch.randn(ROWS, SIZE, dtype=torch.float64)


def subset() -> Tensor:
    return torch.tensor([0, 2, 3, 7, 8, 11, 12, 16])


def distributions(own: Tensor, target: Tensor, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
    """q, 0 for tokens that are not drafted, and p; over the whole vocabulary."""
    q = own.softmax(-1)
    if tokens is not None:
        q = torch.zeros(ROWS, SIZE, dtype=q.dtype).index_add(1, tokens, q)
    return q, target.softmax(-1)


def brute_force(p: Tensor, q: Tensor) -> Tensor:
    """The probability that both draw the same token, as it is defined."""
    found = []
    for own, true in zip(q, p, strict=True):
        drafted = own.nonzero().flatten().tolist()
        found.append(sum(1 / torch.maximum(true / true[i], own / own[i]).sum() for i in drafted))
    return torch.stack(found)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [None, subset()], ids=["whole", "subset"])
def test_match_is_the_sum_over_pairs(tokens: Tensor | None) -> None:
    own, target = random_rows(tokens)
    q, p = distributions(own, target, tokens)
    mass = p.sum(-1) if tokens is None else p[:, tokens].sum(-1)
    plain = -mass * brute_force(p, q).log()
    losses = row_losses(own, row_targets(target, tokens, (("match", 1.0),)), (("match", 1.0),))
    torch.testing.assert_close(losses, plain)
    ours, true = (torch.autograd.grad(x.sum(), own)[0] for x in (losses, plain))
    torch.testing.assert_close(ours, true)


@pytest.mark.parametrize("tokens", [None, subset()], ids=["whole", "subset"])
def test_match_is_how_often_shared_noise_draws_the_same_token(tokens: Tensor | None) -> None:
    own, target = random_rows(tokens, scale=1.0)
    q, p = distributions(own.detach(), target, tokens)
    mass = p.sum(-1) if tokens is None else p[:, tokens].sum(-1)
    loss = row_losses(own.detach(), row_targets(target, tokens, (("match", 1.0),)), (("match", 1.0),))
    draws = 40_000
    noise = -torch.empty(draws, 1, SIZE, dtype=torch.float64).exponential_().log()
    same = ((p.log() + noise).argmax(-1) == (q.log() + noise).argmax(-1)).double().mean(0)
    torch.testing.assert_close(torch.exp(-loss / mass), same, rtol=0, atol=4 * 0.5 / math.sqrt(draws))


def test_match_lies_between_its_bounds_and_survives_extremes() -> None:
    own, target = random_rows()
    q, p = distributions(own.detach(), target, None)
    variation = (p - q).abs().sum(-1) / 2
    found = torch.exp(-row_losses(own.detach(), row_targets(target, None, (("match", 1.0),)), (("match", 1.0),)))
    assert bool(((found >= (1 - variation) / (1 + variation)) & (found <= 1 - variation)).all())
    equal = row_losses(target, row_targets(target, None, (("match", 1.0),)), (("match", 1.0),))
    torch.testing.assert_close(equal, torch.zeros(ROWS, dtype=torch.float64), rtol=0, atol=1e-9)
    for name in LOSSES:
        far = torch.tensor([[200.0, 0, -150, -300], [0, 0, 0, 0], [-90, 90, 3, -torch.inf]])
        wide, mixture = far[:, [3, 1, 0, 2]].clamp(min=-400).requires_grad_(), ((name, 1.0),)
        losses = row_losses(wide, row_targets(far, None, mixture), mixture)
        (slope,) = torch.autograd.grad(losses.sum(), wide)
        assert bool(losses.isfinite().all()) and bool(slope.isfinite().all()), name


@pytest.mark.parametrize("tokens", [None, subset()], ids=["whole", "subset"])
@pytest.mark.parametrize("name", ["kl", "tv", "match", "coupled"])
def test_gradients(name: str, tokens: Tensor | None) -> None:
    own, target = random_rows(tokens)
    text = TextRows(torch.arange(ROWS), torch.tensor([1.0, 0.0, 0.7, 1.0, math.nan, 1.0]))
    mixture = ((name, 0.8),)
    targets = row_targets(target, tokens, mixture, text, new_generator(own.device, 3))
    assert torch.autograd.gradcheck(lambda logits: row_losses(logits, targets, mixture), own)


@pytest.mark.parametrize("tokens", [None, subset()], ids=["whole", "subset"])
def test_tv_and_lk_follow_their_definitions(tokens: Tensor | None) -> None:
    own, target = random_rows(tokens)
    q, p = distributions(own, target, tokens)
    variation = (p - q).abs().sum(-1) / 2
    drafted = slice(None) if tokens is None else tokens
    divergence = (p * (p.log() - q.log()))[:, drafted].sum(-1)
    share = torch.exp(-3 * (1 - variation)).detach()
    for name, plain in (("tv", variation), ("lk", share * divergence + (1 - share) * variation)):
        mixture: Mixture = ((name, 1.0),)
        losses = row_losses(own, row_targets(target, tokens, mixture), mixture)
        torch.testing.assert_close(losses, plain)
        ours, true = (torch.autograd.grad(x.sum(), own, retain_graph=True)[0] for x in (losses, plain))
        torch.testing.assert_close(ours, true)


def test_coupled_is_a_cross_entropy_under_noise() -> None:
    own, target = random_rows(subset())
    mixture: Mixture = (("coupled", 1.0),)
    text = TextRows(torch.tensor([0, 1, 2, 3, 4, 5]), torch.tensor([1.0, 1.0, 0.5, 0.0, 1.0, 1.0]))
    targets = row_targets(target, subset(), mixture, text, new_generator(own.device, 0))
    assert targets.coupling is not None
    noise, drawn, temperatures = targets.coupling
    assert temperatures.tolist() == [1, 1, 0.5, 1, 1, 1]
    assert drawn[[0, 1, 2, 4, 5]].tolist() == [0, -1, 1, -1, -1], "tokens 1, 4 and 5 are not drafted"
    losses = row_losses(own, targets, mixture)
    for row in range(ROWS):
        logq = (own[row] / temperatures[row]).log_softmax(-1)
        scores = ((logq + noise[row]) / KAPPA).log_softmax(-1)
        wanted = -scores[drawn[row]] if drawn[row] >= 0 else torch.zeros((), dtype=torch.float64)
        torch.testing.assert_close(losses[row], wanted)


def test_a_mixture_is_the_weighted_sum() -> None:
    own, target = random_rows(subset())
    mixture = parse_mixture("match:0.25, tv:2,kl")
    parts = [(row_losses(own, row_targets(target, subset(), ((name, 1.0),)), ((name, 1.0),)), w) for name, w in mixture]
    losses = row_losses(own, row_targets(target, subset(), mixture), mixture)
    plain = sum(weight * part for part, weight in parts)
    assert isinstance(plain, Tensor)
    torch.testing.assert_close(losses, plain)
    ours, true = (torch.autograd.grad(x.sum(), own)[0] for x in (losses, plain))
    torch.testing.assert_close(ours, true)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_precision_gives_the_same_losses(dtype: torch.dtype) -> None:
    own, target = random_rows(subset())
    for name in LOSSES:
        mixture: Mixture = ((name, 1.0),)
        own_half, target_half = own.detach().to(dtype).requires_grad_(), target.to(dtype)
        losses = row_losses(own_half, row_targets(target_half, subset(), mixture, None, seeded()), mixture)
        (slope,) = torch.autograd.grad(losses.sum(), own_half)
        assert losses.dtype == torch.float32 and slope.dtype == dtype
        if name != "coupled":  # whose noise depends on the precision
            exact = row_losses(own, row_targets(target, subset(), mixture), mixture)
            tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(losses.double(), exact, rtol=tolerance, atol=tolerance)


def seeded() -> torch.Generator:
    return new_generator(torch.device("cpu"), 0)


# ---- names and weights


def test_mixtures_are_parsed() -> None:
    assert parse_mixture("kl") == KL
    assert parse_mixture(" coupled:0.5 , lk : 0.5") == (("coupled", 0.5), ("lk", 0.5))
    assert without_kl(parse_mixture("kl:3,tv:1"), 0.5) == (1.5, (("tv", 0.5),))
    for text in ("", "lk,", "magic", "lk:0.5,magic:1"):
        with pytest.raises(InputError, match=r"there is no loss '(magic)?'; choose from kl, tv, lk, match, coupled"):
            parse_mixture(text)
    for text in ("lk:", "lk:x", "lk:0", "lk:-1", "lk:nan", "lk:inf", "lk:1:2"):
        with pytest.raises(InputError, match=r"names and weights above 0, for example coupled:0.5,lk:0.5, not 'lk"):
            parse_mixture(text)
    with pytest.raises(InputError, match="'lk' occurs twice"):
        parse_mixture("lk,kl,lk:2")
