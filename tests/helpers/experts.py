"""Checks of mixtures of experts, against transformers' modules and for bits that do not depend on other rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GptOssConfig, MixtralConfig, OlmoeConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from helpers.interpreter import HALF
from windfall.kernels.backend import on_triton
from windfall.kernels.expert_weights import Experts
from windfall.kernels.experts import experts, mixture, mixture_reference

MLPS: dict[str, tuple[Any, Any, dict[str, Any]]] = {  # configuration, module and settings
    "gpt-oss": (GptOssConfig, GptOssMLP, {}),
    "qwen3-moe": (Qwen3MoeConfig, Qwen3MoeSparseMoeBlock, {"norm_topk_prob": True}),
    "mixtral": (MixtralConfig, MixtralSparseMoeBlock, {}),
    "olmoe": (OlmoeConfig, OlmoeSparseMoeBlock, {}),
}


class Size(NamedTuple):
    hidden: int
    inner: int
    experts: int
    top_k: int
    kind: str = "gpt-oss"  # of MLPS


class Weights(NamedTuple):
    router: Tensor
    router_bias: Tensor | None
    experts: Experts


def random_weights(size: Size, dtype: torch.dtype, device: str) -> Weights:
    """Values of the projections reach past the limit of GPT-OSS's activation."""
    hidden, inner, count, top_k, kind = size

    def numbers(*shape: int, scale: float) -> Tensor:
        return (scale * torch.randn(*shape, device=device)).to(dtype)

    if kind != "gpt-oss":
        return Weights(
            numbers(count, hidden, scale=2 * hidden**-0.5),
            None,
            Experts(
                numbers(count, 2 * inner, hidden, scale=hidden**-0.5),
                None,
                numbers(count, hidden, inner, scale=2 * inner**-0.5),
                None,
                top_k,
                limit=None,
                linear=True,
                normalised=kind != "olmoe",
                wide=kind == "mixtral",
            ),
        )
    return Weights(
        numbers(count, hidden, scale=hidden**-0.5),
        numbers(count, scale=1.0),
        Experts(
            numbers(count, hidden, 2 * inner, scale=3 * hidden**-0.5),
            numbers(count, 2 * inner, scale=1.0),
            numbers(count, inner, hidden, scale=0.3 * inner**-0.5),
            numbers(count, hidden, scale=0.3),
            top_k,
        ),
    )


def random_rows(n: int, size: Size, dtype: torch.dtype, device: str) -> Tensor:
    """Rows of a larger tensor."""
    return torch.randn(n, size.hidden + 64, device=device).to(dtype)[:, : size.hidden]


def transformers_mlp(x: Tensor, weights: Weights, size: Size, implementation: str) -> Tensor:
    make_config, make, settings = MLPS[size.kind]
    config = make_config(
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_local_experts=size.experts,
        num_experts_per_tok=size.top_k,
        **settings,
    )
    config.moe_intermediate_size, config.num_experts = size.inner, size.experts
    config._experts_implementation = implementation
    with torch.device("meta"):
        mlp = make(config)
    names = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
    state = {f"experts.{name}": each for name, each in zip(names, weights.experts[:4], strict=True)}
    router = "router" if size.kind == "gpt-oss" else "gate"
    state |= {f"{router}.weight": weights.router, f"{router}.bias": weights.router_bias}
    mlp.load_state_dict({name: each for name, each in state.items() if each is not None}, assign=True)
    with torch.no_grad():
        made = mlp(x[None])
    return made[0][0] if isinstance(made, tuple) else made[0]


def clear_rows(n: int, weights: Weights) -> Tensor:
    """Random rows whose choice of experts does not depend on the rounding of their logits."""
    router, bias, top_k = weights.router, weights.router_bias, weights.experts.top_k
    x = torch.randn(2 * n + 8, router.shape[1], device=router.device).to(router.dtype)
    logits = x.double() @ router.double().T + (0.0 if bias is None else bias.double())
    best = logits.sort(descending=True).values
    x = x[best[:, top_k - 1] - best[:, top_k] > (1e-5 if x.dtype == torch.float32 else 0.05)]
    assert len(x) >= n
    return x[:n]


def check_experts(n: int, size: Size, dtype: torch.dtype, device: str = "cpu") -> None:
    """Against transformers' implementations."""
    torch.manual_seed(n)
    weights = random_weights(size, dtype, device)
    x = clear_rows(n, weights)
    close = 2e-5 if dtype == torch.float32 else 0.03
    made = experts(x, *weights)
    for implementation in ("eager", "grouped_mm") if device == "cpu" or dtype == torch.bfloat16 else ("eager",):
        wanted = transformers_mlp(x, weights, size, implementation)
        torch.testing.assert_close(made, wanted, atol=close, rtol=close)


def check_mixture(n: int, size: Size, dtype: torch.dtype, kind: str = "random", device: str = "cpu") -> None:
    """Against torch, with logits of some kind; and on Triton, a row has the same bits in other company."""
    torch.manual_seed(n)
    weights, x = random_weights(size, dtype, device), random_rows(n, size, dtype, device)
    logits = torch.randn(n, size.experts, device=device)
    if kind == "same":  # all rows choose the same experts
        logits = logits[:1].expand(n, -1) * torch.linspace(0.5, 2, n, device=device)[:, None]
    elif kind == "ties":
        logits = logits.round()
    elif kind == "missing":  # no row chooses the first or the last expert
        logits[:, [0, -1]] = -torch.inf
    logits = logits.to(dtype)
    made = mixture(x, logits, weights.experts)
    wanted = mixture_reference(x, logits, weights.experts)
    close = 2e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(made, wanted, atol=close, rtol=close)
    if on_triton(x):
        for rows in companies(n, device):
            assert torch.equal(mixture(x[rows], logits[rows], weights.experts), made[rows]), rows


def check_bits(counts: tuple[int, ...], size: Size, dtype: torch.dtype, device: str = "cpu") -> None:
    """Router and mixture: a row has the same bits for any number of rows and in every order."""
    torch.manual_seed(size.hidden)
    n = max(counts)
    weights, x = random_weights(size, dtype, device), random_rows(n, size, dtype, device)
    whole = experts(x, *weights)
    for count in counts:
        rows = torch.randperm(n, device=device)[:count]
        assert torch.equal(experts(x[rows], *weights), whole[rows]), count
        assert torch.equal(experts(x[n - count :], *weights), whole[n - count :]), count


def companies(n: int, device: str) -> list[Tensor]:
    """Two rows alone, some together in another order, all in reverse."""
    order = torch.randperm(n, device=device)
    return [*order[:2, None], order[: n // 2 + 1], torch.arange(n, device=device).flip(0)]


def check_tiles(n: int, size: Size, tiles: list[tuple[int, ...]], device: str) -> None:
    """All tiles give the same bits."""
    from windfall.kernels.triton.experts import Tile
    from windfall.kernels.triton.experts import mixture as run

    torch.manual_seed(n)
    weights, x = random_weights(size, HALF, device), random_rows(n, size, HALF, device)
    logits = torch.randn(n, size.experts, device=device).to(HALF)
    made = [run(x, logits, weights.experts, Tile(*tile)) for tile in tiles]
    for tile, other in zip(tiles, made, strict=True):
        assert torch.equal(other, made[0]), tile


def check_padding(size: Size, dtype: torch.dtype, device: str = "cpu") -> None:
    """A row of NaN gives NaN, and does not change the others."""
    torch.manual_seed(0)
    weights, x = random_weights(size, dtype, device), random_rows(6, size, dtype, device)
    logits = torch.randn(6, size.experts, device=device).to(dtype)
    wanted = mixture(x, logits, weights.experts)
    x[2], logits[2], logits[4, 1] = torch.nan, torch.nan, torch.nan
    made = mixture(x, logits, weights.experts)
    others = torch.tensor([0, 1, 3, 5], device=device)
    assert made[[2, 4]].isnan().all() and torch.equal(made[others], wanted[others])


def check_ties(dtype: torch.dtype, device: str = "cpu") -> None:
    """Of equal logits the lowest indices are chosen, also if they are the lowest numbers there are."""
    size = Size(64, 16, 12, 4)
    weights = random_weights(size, dtype, device)
    weights.experts.down.zero_()
    assert weights.experts.down_bias is not None
    weights.experts.down_bias.copy_(torch.eye(12, 64))  # the output shows the share of each expert
    logits = torch.zeros(3, 12, device=device, dtype=dtype)
    logits[1, [3, 7, 9, 10, 11]], logits[2, 5:] = 1, -torch.inf
    logits[2, [8, 2]] = 5
    made = mixture(random_rows(3, size, dtype, device), logits, weights.experts)
    assert made[0].nonzero()[:, 0].tolist() == [0, 1, 2, 3] and (made[0, :4] == 0.25).all()
    assert made[1].nonzero()[:, 0].tolist() == [3, 7, 9, 10]
    assert made[2].nonzero()[:, 0].tolist() == [0, 1, 2, 8]
