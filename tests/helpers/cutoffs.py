"""Checks of the cutoffs that stand for top-k, top-p and min-p."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from windfall.core.sampling import Dice, gumbel
from windfall.core.types import SamplingParams
from windfall.kernels.backend import on_triton
from windfall.kernels.cutoff import cutoffs, reference
from windfall.kernels.draw import draw
from windfall.kernels.draw import reference as draw_reference
from windfall.kernels.top import reference as top_reference
from windfall.kernels.top import top_children

Settings = tuple[float, int, float, float]  # temperature, top-k, top-p, min-p
MIXED: list[Settings] = [
    (0.7, 50, 0.9, 0.0),
    (0.0, 5, 0.5, 0.1),  # greedy
    (1.0, 0, 0.8, 0.0),
    (1.3, 0, 1.0, 0.05),
    (0.9, 7, 1.0, 0.0),
    (0.8, 20, 0.95, 0.1),
    (1.0, 0, 1.0, 0.0),  # no filter
    (1.5, 100_000_000, 0.999, 0.0),
    (0.8, 0, 1e-30, 0.0),  # only the likeliest
]


def on_device(settings: list[Settings], device: str = "cpu") -> list[Tensor]:
    dtypes = torch.float32, torch.long, torch.float32, torch.float32
    columns = zip(zip(*settings, strict=True), dtypes, strict=True)
    return [torch.tensor(values, dtype=dtype, device=device) for values, dtype in columns]


def kept_by_definition(row: list[float], settings: Settings) -> list[bool]:
    """Which tokens stay, by adding weights one by one."""
    temperature, k, p, ratio = settings
    if not temperature:
        return [True] * len(row)
    temperature, p, ratio = torch.tensor([temperature, p, ratio]).tolist()  # as fp32 rounds them
    best, values = max(row), sorted(set(row), reverse=True)
    weight = {value: math.floor(math.exp((value - best) * (1 / temperature)) * 2**32) for value in values}
    lowest = -math.inf
    if 0 < k < len(row):
        lowest = next(value for value in values if sum(x >= value for x in row) >= k)
    if p < 1:
        total = sum(weight[x] for x in row if x >= lowest)
        wanted = max(p * total, 1)
        lowest = next(value for value in values if sum(weight[x] for x in row if x >= value) >= wanted)
    if ratio > 0:
        lowest = max(lowest, float(torch.tensor(best + temperature * math.log(ratio), dtype=torch.float64).float()))
    return [x >= lowest for x in row]


def make_logits(n: int, width: int, dtype: torch.dtype, device: str, tied: bool) -> Tensor:
    """Rows of a larger tensor; rounded to quarters if `tied`."""
    torch.manual_seed(n + width)
    logits = torch.randn(n, width + 8, device=device) * 3
    return (torch.round(logits * 4) / 4 if tied else logits).to(dtype)[:, :width]


def check_cutoffs(
    settings: list[Settings], n: int, width: int, dtype: torch.dtype, tied: bool, device: str = "cpu"
) -> None:
    """Against torch, for requests with these settings, for any number of programs, and for each row alone."""
    logits, given = make_logits(n, width, dtype, device, tied), on_device(settings, device)
    owners = (torch.arange(n, device=device) % len(settings)).int()
    wanted, found = reference(logits, *given, owners), cutoffs(logits, *given, owners)
    assert found.dtype == torch.float32 and torch.equal(found, wanted)
    row = n - 1
    alone = [x[owners[row]].reshape(1) for x in given]
    assert torch.equal(cutoffs(logits[row:], *alone), wanted[row:])
    if on_triton(logits):
        from windfall.kernels.triton.cutoff import BLOCK
        from windfall.kernels.triton.cutoff import cutoffs as compiled

        for splits in (1, 2, 7, 1000) if device == "cuda" else (1,) if width > BLOCK else ():
            assert torch.equal(compiled(logits, *given, owners, splits), wanted)


def check_cut_draws(n: int, width: int, dtype: torch.dtype, named: bool, device: str = "cpu") -> None:
    """Draws and children below the cutoff do not exist."""
    logits, owners = make_logits(n, width, dtype, device, False), torch.arange(n, device=device).int() % 3
    cutoff = logits.float().topk(n + 2, dim=-1).values[:, -1].contiguous()
    cutoff[-1] = logits[-1].max()  # fewer tokens than children
    cutoff[0] = -torch.inf
    seed = torch.tensor([5, -7, 2**60], device=device)
    heat, kappa = torch.tensor([0.7, 1.0, 1.4], device=device), torch.tensor([1.2, 1.0, 0.9], device=device)
    positions, k = torch.arange(n, device=device) * 5, 4
    found = draw(logits, positions, seed, heat, offset=2, owners=owners, cutoff=cutoff)
    assert torch.equal(found, draw_reference(logits, positions, seed, heat, False, 2, None, owners, cutoff))
    own = owners.long()
    scores = (logits.float() / heat[own][:, None]).masked_fill(logits < cutoff[:, None], -torch.inf)
    names = torch.arange(width, device=device)
    noise = torch.cat([gumbel(int(seed[o]), p[None] + 2, names) for o, p in zip(own, positions, strict=True)])
    assert torch.equal(found, (scores + noise).argmax(-1))
    tokens = torch.randperm(3 * width, device=device)[:width].sort().values if named else None
    rest = positions, seed, heat, kappa, tokens, 2, None, owners, cutoff
    values, children = top_children(logits, k, *rest)
    wanted, others = top_reference(logits, k, *rest)
    torch.testing.assert_close(values, wanted, atol=1e-5, rtol=0)
    assert torch.equal(children, others)
    one = slice(0, 1)
    alone = positions[one], seed[one], heat[one], kappa[one], tokens, 2, None, None, cutoff[one]
    assert torch.equal(top_children(logits[one], k, *alone)[1], children[one])


def check_coupling(width: int, params: SamplingParams, device: str = "cpu") -> None:
    """The children of coupled drafting are those that the host chooses."""
    logits, dice = make_logits(3, width, torch.float32, device, False), Dice(params, committed=[0] * 11)
    given = on_device([(params.temperature, params.top_k, params.top_p, params.min_p)], device)
    seed, one = torch.tensor([params.noise_seed], device=device), torch.ones(1, device=device)
    positions = 11 + torch.arange(3, device=device)
    cutoff = cutoffs(logits, *given)
    values, children = top_children(logits, 3, positions, seed, given[0], one, cutoff=cutoff)
    coupled = dice.couple(logits.log_softmax(-1), torch.arange(3), None)
    wanted, others = coupled.topk(3, dim=-1)
    torch.testing.assert_close(values, wanted, atol=1e-5, rtol=0)
    real = wanted > -math.inf
    assert torch.equal(children[real], others[real])
