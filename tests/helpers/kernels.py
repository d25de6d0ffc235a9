"""Checks that a kernel agrees with its reference."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import (
    LlamaConfig,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as rotate_partly

from helpers.interpreter import HALF, INTERPRETED
from helpers.interpreter import both as both  # tests of kernels take it from here
from helpers.trees import random_tree
from windfall.core.sampling import Dice, gumbel, signed
from windfall.core.types import Grow, SamplingParams
from windfall.drafters.base import add_children
from windfall.engine.gpu.tree import next_rows, term_buffers, tree_buffers
from windfall.kernels import (
    add_norm,
    draw,
    gate_mul,
    path_attention,
    rotate_and_store,
    soft_cap,
    top_children,
    tree_attention,
)
from windfall.kernels.backend import on_triton
from windfall.kernels.draw import update_noise
from windfall.kernels.eight_bits import EightBitWeight
from windfall.kernels.grow import grow
from windfall.kernels.levels import Carries, Levels, PairTables
from windfall.kernels.norm import add_norm_reference, gate_mul_reference, rotate_and_store_reference
from windfall.kernels.norm_kinds import HeadNorms, NormKind, NormStyle
from windfall.kernels.pair_children import PairCandidates, grow_levels, reference
from windfall.kernels.product import linear, norm_gate, norm_rotate, tiling_for
from windfall.kernels.rows import ancestors, place_rows
from windfall.kernels.rules import Rule
from windfall.kernels.scatter import Scatter
from windfall.kernels.top import LazyLogits
from windfall.kernels.trees import Calibration, NextPass, TreeArrays

SEED = 2**63 + 12345  # its int64 is negative


def make_cache(
    shared: int, capacity: int, width: int, used: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    """Keys and values as slices of a larger buffer; slots that must not be read are NaN."""
    buffer = torch.randn(3, 2, shared, capacity + 7, width, device=device).to(dtype)
    buffer[:, :, :, used:] = torch.nan
    return buffer[1, 0, :, :capacity], buffer[1, 1, :, :capacity]


def check_attention(
    n: int, heads: int, shared: int, width: int, length: int, capacity: int, dtype: torch.dtype, device: str = "cpu"
) -> None:
    torch.manual_seed(n + length)
    fused = torch.randn(n, (heads + 2 * shared) * width, device=device).to(dtype)
    queries = fused[:, : heads * width].unflatten(1, (heads, width))
    keys, values = make_cache(shared, capacity, width, length + n, dtype, device)
    mask = random_tree(n, seed=n).mask().to(device)
    seen = torch.cat([torch.ones(n, length, dtype=torch.bool, device=device), mask], 1)
    repeated = (x[:, : length + n].double().repeat_interleave(heads // shared, 0) for x in (keys, values))
    wanted = F.scaled_dot_product_attention(queries.double().transpose(0, 1), *repeated, seen).transpose(0, 1)
    given = torch.tensor([length], device=device)
    made = unrounded(queries, keys, values, given, mask)
    close = 2e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(made.double(), wanted, atol=close, rtol=close)
    rounded = tree_attention(queries, keys, values, given, mask)
    torch.testing.assert_close(rounded, made.to(dtype), atol=close, rtol=close)
    # a row's result is the same, to the bit, without the other rows
    for row in {0, n // 2, n - 1} if device == "cuda" else {n // 2}:
        alone = unrounded(queries[row : row + 1], keys, values, given, mask[row : row + 1])
        assert_same(alone[0], made[row], close)


def unrounded(queries: Tensor, keys: Tensor, values: Tensor, length: Tensor, mask: Tensor) -> Tensor:
    """Attention with fp32 output, where rounding does not hide differences."""
    return tree_attention(queries, keys, values, length, mask, out=torch.empty_like(queries, dtype=torch.float32))


def assert_same(one: Tensor, other: Tensor, close: float) -> None:
    """Bit-identical on Triton; torch's own kernels may sum in another order."""
    if one.is_cuda or INTERPRETED:
        assert torch.equal(one, other)
    else:
        torch.testing.assert_close(one, other, atol=close, rtol=close)


def check_chain(n: int, width: int, length: int, capacity: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Verifying a chain in one pass gives the same as decoding its tokens one by one, since key blocks are aligned."""
    torch.manual_seed(n)
    keys, values = make_cache(2, capacity, width, length + n, dtype, device)
    queries, chain = torch.randn(n, 6, width, device=device).to(dtype), torch.ones(n, n, device=device).tril() > 0
    made = unrounded(queries, keys, values, torch.tensor([length], device=device), chain)
    for row in range(n):
        committed = torch.tensor([length + row], device=device)
        alone = unrounded(queries[row : row + 1], keys, values, committed, chain[:1, :1])
        assert_same(alone[0], made[row], 2e-6 if dtype == torch.float32 else 1e-2)


def check_paths(
    n: int, heads: int, shared: int, width: int, length: int, capacity: int, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Rows of a tree agree with tree_attention, and are bit-identical to decoding their path as a plain sequence: in a
    larger cache, with ancestors committed or in other slots, with other rows or alone."""
    torch.manual_seed(n + length)
    queries = torch.randn(n, heads, width, device=device).to(dtype)
    keys, values = make_cache(shared, capacity, width, length + n, dtype, device)
    tree = random_tree(n, seed=n)
    mask, depth = tree.mask().to(device), tree.depth.to(device)
    given = torch.tensor([length], device=device)
    made = path_attention(queries, keys, values, given, length + depth + 1, length + ancestors(mask, depth))
    close = 2e-6 if dtype == torch.float32 else 1e-2
    wanted = tree_attention(queries.double(), keys.double(), values.double(), given, mask)
    torch.testing.assert_close(made.double(), wanted, atol=close, rtol=close)
    assert depth.max() >= 3
    for row in {0, n // 2, n - 1, int(depth.argmax())} if device == "cuda" else {int(depth.argmax())}:
        path = tree.mask()[row].nonzero()[:, 0].to(device)
        text = torch.cat([torch.arange(length, device=device), length + path])
        for staged, above, beside, room in ((1, 0, 0, 0), (1, 3, 2, 256), (min(3, len(path)), 2, 1, 1024)):
            own = alone(queries[row], keys, values, text, staged, above, beside, capacity + room)
            assert torch.equal(own, made[row]), (row, staged, above, beside)
        for rows in (1, 2, 33):
            own = last_of_chain(queries[row], keys[:, text], values[:, text], min(rows, len(text)), capacity)
            assert torch.equal(own, made[row]), (row, rows)


def check_path_options(
    length: int,
    capacity: int,
    window: int | None,
    cap: float | None,
    sinks: bool,
    dtype: torch.dtype,
    device: str = "cpu",
    chunked: bool = False,
) -> None:
    """Windows or chunks, caps and sinks, against attention over each row's own text."""
    torch.manual_seed(length)
    n, heads, shared, width = 9, 6, 2, 16
    queries = torch.randn(n, heads, width, device=device).to(dtype)
    keys, values = make_cache(shared, capacity, width, length + n, dtype, device)
    extra = torch.randn(heads, device=device).to(dtype) if sinks else None
    tree = random_tree(n, seed=n)
    mask, depth = tree.mask().to(device), tree.depth.to(device)
    lines = length + ancestors(mask, depth)
    given = torch.tensor([length], device=device)
    how: dict[str, Any] = {"scale": 0.3, "window": window, "cap": cap, "sinks": extra, "chunked": chunked}
    made = path_attention(queries, keys, values, given, length + depth + 1, lines, **how)
    close = 1e-5 if dtype == torch.float32 else 1e-2
    for row in range(n):
        path = tree.mask()[row].nonzero()[:, 0].to(device)
        text = torch.cat([torch.arange(length, device=device), length + path])
        kept = (len(text) - 1) % window + 1 if chunked and window else window
        text = text[-(kept or capacity) :]
        k, v = (x[:, text].double().repeat_interleave(heads // shared, 0) for x in (keys, values))
        scores = (queries[row].double()[:, None] * k).sum(-1) * 0.3
        scores = scores if cap is None else cap * (scores / cap).tanh()
        if extra is not None:
            scores = torch.cat([scores, extra.double()[:, None]], 1)
        shares = scores.softmax(-1)[:, : len(text)]
        wanted = (shares[..., None] * v).sum(1)
        torch.testing.assert_close(made[row].double(), wanted, atol=close, rtol=close)


def check_places(n: int, size: int, device: str = "cpu") -> None:
    """Of a tree of n rows, padded to this size, and of a chain."""
    tree = random_tree(n, seed=n)
    mask = torch.zeros(size, size, dtype=torch.bool, device=device)
    mask[:n, :n] = tree.mask().to(device)
    depth = torch.zeros(size, dtype=torch.long, device=device)
    depth[:n] = tree.depth.to(device)
    length, count = torch.tensor([40], device=device), torch.tensor([n], device=device)
    positions, slots, reach, lineage = place_rows(length, depth, count, mask)
    assert positions.tolist() == (depth + 40).tolist() and slots.tolist() == list(range(40, 40 + size))
    assert reach.tolist() == [*(tree.depth + 41).tolist(), *[0] * (size - n)]
    assert lineage is not None
    for row, path in enumerate(tree.mask()):
        wanted = (40 + path.nonzero()[:, 0]).tolist()
        assert lineage[row, : len(wanted)].tolist() == wanted
    chain = place_rows(length, torch.arange(size, device=device), count, None)
    assert torch.equal(chain.positions, slots) and chain.lineage is None
    assert chain.reach.tolist() == [*range(41, 41 + n), *[0] * (size - n)]


def check_matmul(
    rows: tuple[int, ...], outputs: int, k: int, bias: bool, device: str = "cpu", eight_bits: bool = False
) -> None:
    """For every number of rows the product is right; on a GPU a row has the same bits in all of them."""
    from windfall.kernels.triton.matmul import matmul

    torch.manual_seed(outputs + k)
    x = torch.randn(max(rows), k, device=device).to(HALF)
    weight = (torch.randn(outputs, k, device=device) / k**0.5).to(HALF)
    added = torch.randn(outputs, device=device).to(HALF) if bias else None
    small = EightBitWeight(weight) if eight_bits else None
    values, scales = (weight, None) if small is None else (small.values, small.scales)
    exact = weight.double() if scales is None else values.double() * scales.double()[:, None]
    wanted = F.linear(x.double(), exact, None if added is None else added.double())
    first: Tensor | None = None
    for count in rows:
        start = max(rows) - count
        made = matmul(x[start:], values, added, scales=scales)
        torch.testing.assert_close(made.double(), wanted[start:], atol=2e-2, rtol=2e-2)
        if device == "cuda":
            first = made if first is None else first
            assert torch.equal(made[-1].view(torch.int16), first[-1].view(torch.int16)), count
            assert torch.equal(made[-len(first) :], first[-count:]), count


def alone(
    query: Tensor, keys: Tensor, values: Tensor, text: Tensor, staged: int, above: int, beside: int, capacity: int
) -> Tensor:
    """The last row of a text whose last `staged` rows are a chain, stored in reverse `above` slots after the committed
    rows; the pass has `beside` other rows."""
    shared, width, length = keys.shape[0], keys.shape[2], len(text) - staged
    moved = make_cache(shared, capacity, width, length + above + staged, keys.dtype, str(keys.device))
    slots = above + torch.arange(staged, device=keys.device).flip(0)  # of the chain, by depth
    for goal, source in zip(moved, (keys, values), strict=True):
        goal[:, :length], goal[:, length + slots] = source[:, text[:length]], source[:, text[length:]]
    queries = torch.randn(beside + 1, *query.shape, device=query.device).to(query.dtype)
    queries[beside] = query
    reach = torch.randint(length + 1, (beside + 1,), device=keys.device)
    reach[beside] = len(text)
    lines = (length + slots).int().expand(beside + 1, -1)
    return path_attention(queries, *moved, torch.tensor([length], device=keys.device), reach, lines)[beside]


def last_of_chain(query: Tensor, keys: Tensor, values: Tensor, rows: int, capacity: int) -> Tensor:
    """The last row of a text whose last rows are run as a chain."""
    length = keys.shape[1]
    chain = make_cache(keys.shape[0], capacity, keys.shape[2], length, keys.dtype, str(keys.device))
    for goal, source in zip(chain, (keys, values), strict=True):
        goal[:, :length] = source
    queries = torch.randn(rows + 1, *query.shape, device=query.device).to(query.dtype)
    queries[rows - 1] = query
    reach = length - rows + 1 + torch.arange(rows + 1, device=query.device)
    reach[rows] = 0  # padding
    committed = torch.tensor([length - rows], device=query.device)
    return path_attention(queries, *chain, committed, reach, None)[rows - 1]


def check_window(
    n: int, length: int, capacity: int, window: int, dtype: torch.dtype, device: str = "cpu", width: int = 16
) -> None:
    """Rows of a tree see the positions that are less than `window` before their own."""
    torch.manual_seed(n + length)
    queries = torch.randn(n, 6, width, device=device).to(dtype)
    keys, values = make_cache(2, capacity, width, length + n, dtype, device)
    tree = random_tree(n, seed=n)
    mask, depth = tree.mask().to(device), tree.depth.to(device)
    seen = torch.cat([torch.ones(n, length, dtype=torch.bool, device=device), mask], 1)
    columns = torch.cat([torch.arange(length, device=device), length + depth])
    seen &= length + depth[:, None] - columns < window
    repeated = (x[:, : length + n].double().repeat_interleave(3, 0) for x in (keys, values))
    wanted = F.scaled_dot_product_attention(queries.double().transpose(0, 1), *repeated, seen).transpose(0, 1)
    given = torch.tensor([length], device=device)

    def attend(rows: slice) -> Tensor:
        out = torch.empty_like(queries[rows], dtype=torch.float32)
        how = {"positions": length + depth[rows], "window": window, "out": out}
        return tree_attention(queries[rows], keys, values, given, mask[rows], **how)

    close = 2e-6 if dtype == torch.float32 else 1e-2
    made = attend(slice(None))
    torch.testing.assert_close(made.double(), wanted, atol=close, rtol=close)
    assert_same(attend(slice(n // 2, n // 2 + 1))[0], made[n // 2], close)


def noise_at(positions: Tensor, width: int, device: str) -> Tensor:
    """Precomputed noise that covers these positions."""
    count = int(positions.max() - positions.min()) + 1
    noise, seed = torch.full((count, width), math.nan, device=device), torch.tensor([signed(SEED)], device=device)
    update_noise(noise, positions.min().reshape(1), torch.tensor([count], device=device), seed)
    return noise


def check_noise(count: int, width: int, device: str = "cpu") -> None:
    """The ring buffer advances; only the rows of new positions are written."""
    noise, seed = torch.zeros(count, width, device=device), torch.tensor([signed(SEED)], device=device)
    length = torch.tensor([5], device=device)
    for step in (320, 1, count - 1, count, 2):
        entered, before = torch.tensor([step], device=device), noise.clone()
        length += step
        update_noise(noise, length, entered, seed)
        positions = length + torch.arange(count, device=device)
        wanted = gumbel(SEED, positions, torch.arange(width, device=device))
        assert torch.equal(noise[positions % count], wanted)
        old = positions[: count - min(step, count)] % count
        assert torch.equal(noise[old], before[old])


def check_draw(n: int, vocabulary: int, dtype: torch.dtype, temperature: float, device: str = "cpu") -> None:
    torch.manual_seed(n)
    logits = (torch.randn(n, vocabulary + 8, device=device) * 3).to(dtype)[:, :vocabulary]
    positions = torch.arange(n, device=device) * 37
    seed = torch.tensor([signed(SEED)], device=device)
    heat = torch.tensor([temperature], device=device)
    wanted = logits.float()
    if temperature:
        wanted = wanted / heat + gumbel(SEED, positions, torch.arange(vocabulary, device=device))
    assert torch.equal(draw(logits, positions, seed, heat), wanted.argmax(-1))
    assert torch.equal(draw(logits, positions - 2, seed, heat, offset=2), wanted.argmax(-1))
    found = draw(logits, positions - 2, seed, heat, offset=2, noise=noise_at(positions, vocabulary + 3, device))
    assert torch.equal(found, wanted.argmax(-1))
    first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)  # bf16 has ties
    assert torch.equal(draw(logits, positions, seed, heat, greedy=True), first)


def check_close_draws(n: int, vocabulary: int, device: str = "cpu") -> None:
    """Scores that are almost equal, so that only exact noise tells which is the highest."""
    positions, seed = torch.arange(n, device=device), torch.tensor([signed(SEED)], device=device)
    noise = gumbel(SEED, positions, torch.arange(vocabulary, device=device))
    generator = torch.Generator().manual_seed(n)
    logits = -noise + 1e-5 * torch.randn(n, vocabulary, generator=generator).to(device)
    found = draw(logits, positions, seed, torch.ones(1, device=device))
    assert torch.equal(found, (logits + noise).argmax(-1))


def check_top(w: int, k: int, columns: int, dtype: torch.dtype, dice: bool, named: bool, device: str = "cpu") -> None:
    """Against `add_children` on the same scores."""
    torch.manual_seed(w + k)
    logits = (torch.randn(w, columns, device=device) * 3).to(dtype)
    tokens = torch.randperm(3 * columns, device=device)[:columns].sort().values if named else None
    tree = random_tree(w, seed=3)
    params = SamplingParams(temperature=0.8, seed=SEED)
    dealt = Dice(params, committed=[0] * 11)
    dealt.kappa = 1.25
    scores, more = logits.float().log_softmax(-1), k + 1  # one more, to see whether the last one is ambiguous
    grown = add_children(tree, Grow(torch.arange(w), more), scores, dealt if dice else None, tokens)
    wanted, found = (x[w:].reshape(w, more) for x in (grown.logq, grown.tokens))
    given = (torch.tensor([x], device=device) for x in (signed(SEED), params.temperature, dealt.kappa))
    rest = ((11 + tree.depth).to(device), *given) if dice else ()
    values, names = top_children(logits, k, *rest, tokens=tokens)
    buffers = torch.zeros_like(values), torch.zeros_like(names)
    top_children(logits, k, *rest, tokens=tokens, out=buffers)
    assert torch.equal(buffers[0], values) and torch.equal(buffers[1], names)
    if dice:
        later = top_children(logits, k, rest[0] - 3, *rest[1:], tokens=tokens, offset=3)
        assert torch.equal(later[0], values) and torch.equal(later[1], names)
        known = top_children(logits, k, *rest, tokens=tokens, noise=noise_at(rest[0], 3 * columns, device))
        torch.testing.assert_close(known[0], values, atol=1e-6, rtol=1e-6)
        assert torch.equal(known[1], names)
    torch.testing.assert_close(values.cpu(), wanted[:, :k], atol=1e-5, rtol=0)
    assert values.dtype == torch.float32 and names.dtype == torch.long
    gaps = wanted.diff(dim=1).abs() > 1e-5  # [w, k]
    clear = gaps & F.pad(gaps, (1, -1), value=True)
    assert clear.any() and torch.equal(names.cpu()[clear], found[:, :k][clear])


def check_lazy_logits(w: int, k: int, columns: int, width: int, dice: bool, bias: bool, device: str = "cpu") -> None:
    """Against torch's product and its top k."""
    torch.manual_seed(w)
    dtype = torch.bfloat16 if device == "cuda" else HALF
    states, vocabulary = torch.randn(w, width, device=device).to(dtype), torch.randn(columns, width, device=device)
    lazy = LazyLogits(states, vocabulary.to(dtype), torch.randn(columns, device=device).to(dtype) if bias else None)
    tokens = torch.randperm(2 * columns, device=device)[:columns].sort().values
    given = (torch.tensor([x], device=device) for x in (signed(SEED), 0.8, 1.25))
    rest: Any = (torch.arange(w, device=device) + 7, *given) if dice else (None,) * 4
    wanted, found = top_children(lazy.logits, k + 1, *rest, tokens, 2)
    noise = noise_at(rest[0] + 2, 2 * columns, device) if dice else None
    if on_triton(states):
        from windfall.kernels.triton.top import fits, top_children_of_product

        assert fits(states, lazy.weight)
        values, names = top_children_of_product(*lazy, k, rest[0], *rest[2:], tokens, 2, noise)
    else:
        values, names = top_children(lazy, k, *rest, tokens, 2, noise)
    off = 0.02 * float(lazy.logits.abs().max())  # both products are rounded to half precision
    torch.testing.assert_close(values, wanted[:, :k], atol=off, rtol=0)
    gaps = wanted.diff(dim=1).abs() > off
    clear = gaps & F.pad(gaps, (1, -1), value=True)
    assert torch.equal(names[clear], found[:, :k][clear]) and (names.sort(1).values.diff(dim=1) > 0).all()


def check_norm(n: int, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
    torch.manual_seed(n)
    norm = LlamaRMSNorm(width, eps=1e-5).to(device, dtype)
    torch.nn.init.normal_(norm.weight)
    x, residual = torch.randn(2, n, width, device=device).to(dtype)
    ulp = 3e-6 if dtype == torch.float32 else 2**-7
    with torch.no_grad():
        for other in (residual, None):
            summed = x if other is None else other + x
            normed, total = add_norm(x, other, norm.weight, 1e-5)
            assert torch.equal(total, summed)
            torch.testing.assert_close(normed, norm(summed), atol=1e-6, rtol=ulp)
            check_picked(x, other, norm.weight.data, normed, summed)
    parts = torch.stack([norm.weight.data, 2 * norm.weight.data, -norm.weight.data])
    several = torch.cat([x, residual, x])[: 3 * n].contiguous()
    factors = torch.tensor([1.0, 2.0, -1.0], device=device).repeat(n)[:, None].to(dtype)
    plain = add_norm(several, None, norm.weight.data, 1e-5)[0]
    torch.testing.assert_close(add_norm(several, None, parts, 1e-5)[0], factors * plain, atol=1e-6, rtol=ulp)
    gate_up = torch.randn(n, 2 * width, device=device).to(dtype) * 3
    wanted = F.silu(gate_up[:, :width]) * gate_up[:, width:]
    torch.testing.assert_close(gate_mul(gate_up), wanted, atol=1e-6, rtol=ulp)


NORMS = {
    NormKind.ROUNDED: LlamaRMSNorm,
    NormKind.WIDE: GptOssRMSNorm,
    NormKind.WIDE_PLUS_ONE: Gemma2RMSNorm,
    NormKind.CENTRED: CohereLayerNorm,
}


@torch.no_grad()
def check_norm_kinds(n: int, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Every kind of norm against transformers' module, also with a norm before the sum; a row alone gives the same."""
    torch.manual_seed(n)
    x, residual = torch.randn(2, n, width, device=device).to(dtype)
    ulp = 3e-6 if dtype == torch.float32 else 2**-7
    for kind, make in NORMS.items():
        norm, first = (make(width, eps=1e-5).to(device, dtype) for _ in range(2))
        for each in (norm, first):
            torch.nn.init.normal_(each.weight)
        for other, before in ((None, None), (residual, None), (residual, first)):
            style = NormStyle(kind, before=None if before is None else before.weight)
            normed, total = add_norm(x, other, norm.weight, 1e-5, style=style)
            wanted = x if before is None else before(x)
            wanted = wanted if other is None else other + wanted
            torch.testing.assert_close(total, wanted, atol=1e-6 if before is None else 8 * ulp, rtol=ulp)
            torch.testing.assert_close(normed, norm(total), atol=1e-6, rtol=ulp)
            last = None if other is None else other[-1:]
            alone = add_norm(x[-1:], last, norm.weight, 1e-5, style=style)
            assert_same(torch.cat(alone), torch.cat([normed[-1:], total[-1:]]), 1e-6)


def check_gelu_and_cap(n: int, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """The gate of Gemma and the soft cap of its logits, rounded after each step as in transformers."""
    torch.manual_seed(n)
    ulp = 3e-6 if dtype == torch.float32 else 2**-7
    gate_up = torch.randn(n, 2 * width, device=device).to(dtype) * 3
    gate_up[0, :4] = torch.tensor([0.0, 1e-3, -40.0, 40.0], device=device)
    made, wanted = gate_mul(gate_up, gelu=True), F.gelu(gate_up[:, :width], approximate="tanh") * gate_up[:, width:]
    torch.testing.assert_close(made, wanted, atol=1e-5, rtol=ulp)  # 1 + tanh loses digits far below 0
    assert_same(gate_mul(gate_up[-1:], gelu=True), made[-1:], 1e-5)
    logits = 40 * torch.randn(n, width, device=device).to(dtype)
    logits[0, :4] = torch.tensor([0.0, 1e-3, -9e3, 9e3], device=device)
    wanted = torch.tanh(logits / 30.0) * 30.0
    made = soft_cap(logits, 30.0)
    assert made.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(made, wanted, atol=1e-6, rtol=ulp)


def check_picked(x: Tensor, residual: Tensor | None, weight: Tensor, normed: Tensor, summed: Tensor) -> None:
    """Some rows of a norm, also scattered to a buffer, after or before the norm."""
    n, width = x.shape
    for pick in (None, torch.tensor([n - 1], device=x.device)):
        chosen = slice(None) if pick is None else pick
        at = torch.randperm(n + 3, device=x.device)[: len(normed[chosen])]
        for before in (False, True):
            rows = torch.zeros(n + 3, width, dtype=x.dtype, device=x.device)
            made, total = add_norm(x, residual, weight, 1e-5, pick, Scatter(rows, at, not before))
            assert torch.equal(made, normed[chosen]) and torch.equal(total, summed[chosen])
            wanted = torch.zeros_like(rows)
            wanted[at] = total if before else made
            assert torch.equal(rows, wanted)


def check_rotation(n: int, heads: int, shared: int, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
    torch.manual_seed(n)
    config = LlamaConfig(hidden_size=heads * width, num_attention_heads=heads, head_dim=width)
    positions = torch.arange(n, device=device)[None] + 90
    qkv = torch.randn(n, (heads + 2 * shared) * width, device=device).to(dtype)
    cos, sin = LlamaRotaryEmbedding(config).to(device)(qkv, positions)  # [1, n, d]
    rows = qkv.unflatten(1, (-1, width)).transpose(0, 1)[None]  # [1, heads, n, d]
    queries, turned = apply_rotary_pos_emb(rows[:, :heads], rows[:, heads : heads + shared], cos, sin)
    keys, values = make_cache(shared, n + 20, width, n + 20, dtype, device)
    slots = torch.randperm(n + 20, device=device)[:n]
    wanted = [keys.clone(), values.clone()]
    wanted[0][:, slots], wanted[1][:, slots] = turned[0], rows[0, heads + shared :]
    order = torch.randperm(n, device=device)
    tables = torch.cat([cos[0], sin[0]], -1)[order].chunk(2, -1)  # permuted tables, indexed by positions
    for turn in ((cos[0], sin[0], None), (*tables, order.argsort())):
        given = [keys.clone(), values.clone()]
        made = rotate_and_store(qkv, *turn[:2], *given, slots, turn[2])
        assert torch.equal(made, queries[0].transpose(0, 1))
        assert torch.equal(given[0], wanted[0]) and torch.equal(given[1], wanted[1])
    ends = [rotate_and_store(qkv, *tables, keys, values, slots, order * 0 + n - 1 + more) for more in (0, 50)]
    starts = [rotate_and_store(qkv, *tables, keys, values, slots, order * 0 - less) for less in (0, 3)]
    assert torch.equal(*ends) and torch.equal(*starts)  # positions outside the tables use the nearest row


def check_head_norms(n: int, heads: int, shared: int, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Norms of heads in one kernel with the rotation give the bits of separate kernels."""
    torch.manual_seed(n)
    qkv = torch.randn(n, (heads + 2 * shared) * width, device=device).to(dtype)
    cos, sin = torch.randn(2, n, width, device=device).to(dtype)
    q_norm, k_norm = torch.randn(2, width, device=device).to(dtype)
    slots = torch.randperm(n + 5, device=device)[:n]
    for kind in NormKind:
        parts = qkv.unflatten(1, (-1, width)).split([heads, shared, shared], 1)
        q, k = (
            add_norm(part.reshape(-1, width), None, weight, 1e-6, style=NormStyle(kind))[0].view_as(part)
            for part, weight in zip(parts, (q_norm, k_norm), strict=False)
        )
        separate, fused = (make_cache(shared, n + 5, width, 0, dtype, device) for _ in range(2))
        wanted = rotate_and_store(torch.cat([q, k, parts[2]], 1).flatten(1), cos, sin, *separate, slots)
        norms = HeadNorms(q_norm, k_norm, 1e-6, kind)
        made = rotate_and_store(qkv, cos, sin, *fused, slots, norms=norms)
        assert torch.equal(made, wanted)
        for one, other in zip(separate, fused, strict=True):
            assert torch.equal(one[:, slots], other[:, slots])
        alone = rotate_and_store(qkv[-1:], cos[-1:], sin[-1:], *fused, slots[-1:], norms=norms)
        assert torch.equal(alone, made[-1:])


def check_partial_rotation(
    n: int, heads: int, shared: int, width: int, rotated: int, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Against Phi-3, whose heads may be rotated in their first dimensions only."""
    torch.manual_seed(n)
    qkv = torch.randn(n, (heads + 2 * shared) * width, device=device).to(dtype)
    half = torch.randn(2, n, rotated // 2, device=device).to(dtype)
    cos, sin = torch.cat([half, half], -1)
    parts = qkv.unflatten(1, (-1, width)).transpose(0, 1)[None]  # [1, heads, n, d]
    queries, turned = rotate_partly(parts[:, :heads], parts[:, heads : heads + shared], cos[None], sin[None])
    keys, values = make_cache(shared, n + 5, width, 0, dtype, device)
    slots = torch.randperm(n + 5, device=device)[:n]
    made = rotate_and_store(qkv, cos, sin, keys, values, slots)
    assert torch.equal(made, queries[0].transpose(0, 1))
    assert torch.equal(keys[:, slots], turned[0]) and torch.equal(values[:, slots], parts[0, heads + shared :])


def check_enter(n: int, width: int, inner: int, heads: int, shared: int, d: int, device: str = "cpu") -> None:
    """The fused products against separate torch operations; a single row gives the same bits."""
    chance = torch.Generator().manual_seed(n)

    def numbers(*size: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*size, generator=chance)).to(HALF).to(device)

    x, weight = numbers(n, width), numbers(width, scale=0.1) + 1
    slots, capacity = torch.randperm(2 * n, generator=chance)[:n].to(device), 2 * n
    for residual in (None, numbers(n, width)):
        normed, stream = add_norm_reference(x, residual, weight, 1e-5)
        given = (x, residual, weight, 1e-5)
        one_row = (x[:1], None if residual is None else residual[:1], weight, 1e-5)

        plain, more = numbers(48, width, scale=width**-0.5), numbers(48)
        for bias in (None, more):
            made = multiply(x, plain, bias)
            torch.testing.assert_close(made, F.linear(x, plain, bias), atol=0.02, rtol=0.02)
            assert not on_triton(x) or torch.equal(multiply(x[:1], plain, bias), made[:1])

        gate_up = numbers(2 * inner, width, scale=width**-0.5)
        gated, total = norm_gate(*given, gate_up)
        assert (tiling_for(x, gate_up) is not None) == on_triton(x)
        assert torch.equal(total, stream)
        torch.testing.assert_close(gated, gate_mul_reference(F.linear(normed, gate_up)), atol=0.02, rtol=0.02)
        if on_triton(x):
            assert torch.equal(norm_gate(*one_row, gate_up)[0], gated[:1])

        qkv, bias = numbers((heads + 2 * shared) * d, width, scale=width**-0.5), numbers((heads + 2 * shared) * d)
        cos, sin = numbers(n, 2 * d).chunk(2, -1)
        cache = numbers(2, shared, capacity, d)
        other, alone = cache.clone(), cache.clone()
        for more in (None, bias):
            queries, total = norm_rotate(*given, qkv, more, cos, sin, cache[0], cache[1], slots)
            wanted = rotate_and_store_reference(F.linear(normed, qkv, more), cos, sin, other[0], other[1], slots)
            assert torch.equal(total, stream)
            torch.testing.assert_close(queries, wanted, atol=0.04, rtol=0.02)
            torch.testing.assert_close(cache, other, atol=0.04, rtol=0.02)
            if on_triton(x):
                made, _ = norm_rotate(*one_row, qkv, more, cos[:1], sin[:1], alone[0], alone[1], slots[:1])
                assert torch.equal(made, queries[:1])
                assert torch.equal(alone[:, :, slots[0]], cache[:, :, slots[0]])


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """By the Triton kernel if Triton runs, with or without dependent launch."""
    if not on_triton(x):
        return linear(x, weight, bias)
    from windfall.kernels.triton.product import linear as run

    tiling = tiling_for(x, weight)
    assert tiling is not None
    made, out = run(x, weight, bias, tiling), x.new_zeros(len(x), len(weight))
    assert torch.equal(run(x, weight, bias, tiling, out), made) and torch.equal(out, made)
    return made


def random_tables(vocabulary: int, rank: int, parts: int, device: str) -> PairTables | None:
    """Pair scores of this kind, see `PairTables`; 0: none."""
    if not parts:
        return None
    before = torch.randn(vocabulary, parts * rank, device=device).to(HALF)
    after = torch.randn(vocabulary, rank, device=device).to(HALF)
    carried = torch.randn(3 * rank, rank, device=device).to(HALF) / rank**0.5 if parts == 3 else None
    return PairTables(before, after, carried)


def pair_query(tables: PairTables, token: Tensor, state: Tensor | None, carry: Tensor | None) -> tuple[Tensor, Tensor]:
    """The query of a token, and what its path carries then; written out in fp64."""
    before = tables.before[token].double()
    if tables.parts == 1:
        return before if state is None else before * state.double(), before
    assert state is not None
    if tables.parts == 2:
        gate, value = before.chunk(2)
        return (gate + state.double()).sigmoid() * value, before
    assert tables.carried is not None
    joint = before + state.double()
    if carry is not None:
        joint = joint + tables.carried.double() @ carry.double()
    gate, fresh, query = joint.chunk(3)
    kept = 0 if carry is None else gate.sigmoid() * carry.double()
    return query.tanh(), kept + (1 - gate.sigmoid()) * fresh.tanh()


def check_pair_children(
    candidates: int, rank: int, parts: int, hidden: bool, owned: bool, device: str = "cpu", path: bool = True
) -> None:
    """Against the softmax over the whole vocabulary, to whose candidates the pair scores are added.

    path: whether something is carried, if there are three parts.
    """
    torch.manual_seed(candidates + rank)
    vocabulary, requests, depth, nodes = 300, 3, 4, 11
    logits = 3 * torch.randn(requests * depth, vocabulary, device=device)
    logq, tokens = logits.log_softmax(-1).topk(candidates)
    tables, width = random_tables(vocabulary, rank, parts, device), 3 * rank if parts == 3 else rank
    states = torch.randn(requests * depth, width, device=device).to(HALF) if hidden else None
    previous = torch.randint(vocabulary, (nodes,), device=device)
    owners = torch.randint(requests if owned else 1, (nodes,), device=device).int()
    lengths, columns = torch.tensor([5, 90, 33], device=device), torch.randint(-2, depth + 2, (nodes,), device=device)
    warmth = torch.tensor([0.5, 0.0, 2.0], device=device), torch.tensor([0.8, 0.9, 0.7], device=device)
    inside = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, tokens, True)
    outside = logits.log_softmax(-1).masked_fill(inside, 0.0)
    shares = logits.softmax(-1).masked_fill(inside, 0.0)
    levels = Levels(logq, tokens, states, (shares * outside).sum(-1) / shares.sum(-1), depth)
    asked = PairCandidates(levels, previous, columns + lengths[owners.long()] - 2, lengths, -2, tables)
    carried = torch.randn(2 * nodes, rank, device=device)
    above = torch.randint(nodes, (nodes,), device=device) if path else None
    if parts == 3:
        asked = asked._replace(carries=Carries(carried.clone(), above, nodes + torch.arange(nodes, device=device)))
    asked = asked._replace(warmth=warmth, owners=owners) if owned else asked._replace(entropy_levels=levels)
    rows = torch.where((columns >= 0) & (columns < depth), owners * depth + columns, -1)
    assert asked.rows.tolist() == rows.tolist() and (rows < 0).any() and (rows >= 0).any()
    roots = asked._replace(columns=None).children(candidates)[0]
    torch.testing.assert_close(roots, asked._replace(columns=lengths[owners.long()] - 2).children(candidates)[0])
    if asked.carries is not None:
        asked.carries.states.copy_(carried)
    values, names = asked.children(candidates)
    found = carried if asked.carries is None else asked.carries.states
    assert torch.equal(found[:nodes], carried[:nodes])
    entropy = values.new_zeros(nodes) if owned else asked.entropy()
    for node, row in enumerate(rows.tolist()):
        if row < 0:
            assert bool((values[node] == -math.inf).all()) and torch.equal(found[nodes + node], carried[nodes + node])
            continue
        whole = logits[row].double()
        temperature, kappa = (float(each[int(owners[node])]) for each in warmth)
        factor = 1 / (temperature * kappa) if owned and temperature else 1.0
        if tables is not None:
            carry = None if above is None else carried[above[node]]
            query, made = pair_query(tables, previous[node], None if states is None else states[row], carry)
            whole[tokens[row]] += factor * (tables.after[tokens[row]].double() * query).sum(-1)
            if parts == 3:
                torch.testing.assert_close(found[nodes + node].double(), made, atol=1e-4, rtol=1e-4)
        wanted = whole.log_softmax(-1)
        torch.testing.assert_close(values[node].double(), wanted[names[node]], atol=2e-4, rtol=1e-4)
        assert sorted(names[node].tolist()) == sorted(tokens[row].tolist())
        assert values[node].tolist() == sorted(values[node].tolist(), reverse=True)
        if not owned:
            uncertainty = torch.special.entr(wanted.exp()).sum()
            torch.testing.assert_close(entropy[node].double(), uncertainty, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(values, reference(asked, candidates)[0], atol=1e-4, rtol=1e-4)
    assert (
        asked.children(3)[1].tolist() == names[:, :3].tolist()
        and asked.children(candidates + 2)[0].isneginf()[:, -2:].all()
    )


def check_levels(
    rule: Rule, parts: int, noisy: bool, batch: int, width: int = 3, candidates: int = 8, device: str = "cpu"
) -> None:
    """All levels at once are those of one pass after another."""
    torch.manual_seed(7)
    vocabulary, depth, k, passes = 90, 5, 4, 6
    requests, rank = max(batch, 1), 12
    logits = 2 * torch.randn(requests * depth, vocabulary, device=device)
    logq, tokens = logits.log_softmax(-1).topk(candidates)
    tables = random_tables(vocabulary, rank, parts, device)
    states = torch.randn(requests * depth, 3 * rank if parts == 3 else rank, device=device).to(HALF)
    lengths = torch.arange(requests, device=device) + 20
    warmth = (torch.rand(requests, device=device) + 0.5, torch.rand(requests, device=device) + 0.5) if noisy else None
    levels = Levels(logq, tokens, states, depth=depth)
    owners = torch.arange(requests, device=device).int() if batch else None
    roots = torch.randint(vocabulary, (requests,), device=device)
    asked = PairCandidates(levels, roots, None, lengths, -1, tables, warmth, owners)
    slots = 2 + width * (passes + 1)  # of a request: root, staged rows, empty rows
    if parts == 3:
        carries = Carries(torch.zeros(requests * slots, rank, device=device), None, torch.arange(requests) * slots)
        asked = asked._replace(carries=carries._replace(here=carries.here.to(device)))
    terms = random_terms(device) if rule.calibrated else None
    first = torch.zeros((requests, 1) if batch else (1,), dtype=torch.long, device=device)
    tree, rows = empty_trees(device, lengths, roots, passes, width, k, batch)
    nodes, given = first, asked
    for _ in range(passes):  # one more than there are levels
        values, names = given.children(k)
        shape = (*nodes.shape, k)
        grow(tree, nodes, names.view(shape), values.view(shape), rows, rule, terms)
        names_of = None if owners is None else owners.repeat_interleave(width)
        nodes = rows.nodes.clone()
        given = asked.after(rows, names_of)
    other, other_rows = empty_trees(device, lengths, roots, passes, width, k, batch)
    grow_levels(other, first, other_rows, passes, k, rule, asked, terms)
    dead = tree.key == -math.inf
    assert torch.equal(dead, other.key == -math.inf)
    for array in (tree.tokens, other.tokens, tree.logq, other.logq):
        array.masked_fill_(dead, 0)  # arbitrary
    torch.testing.assert_close(rows.summary, other_rows.summary, atol=1e-6, rtol=1e-6)  # sums of another order
    written = [(*each[:6], each.expanded, each.staged) for each in (rows, other_rows)]
    for one, two in zip([*tree, *written[0]], [*other, *written[1]], strict=True):
        assert torch.equal(one, two)
    assert int(tree.depth.max()) >= 3


def empty_trees(
    device: str, lengths: Tensor, roots: Tensor, passes: int, width: int, k: int, batch: int
) -> tuple[TreeArrays, NextPass]:
    """Trees of a root, one for each request, and the rows of their next passes; batch 0: without that dimension."""
    made = []
    for length, root in zip(lengths, roots, strict=True):
        tree, buffer = tree_buffers(
            torch.device(device), 1 + k * (1 + width * passes), passes + 1, passes + 1, width * (passes + 1)
        )
        tree.tokens[0] = root
        made.append((tree, next_rows(width, buffer, length[None])))
    if not batch:
        return made[0]

    def joined(arrays: tuple[Tensor | None, ...]) -> Any:
        if arrays[0] is None:
            return None
        numbers = arrays[0].numel() == 1 and arrays[0].dim() == 1
        return (torch.cat if numbers else torch.stack)(arrays)  # type: ignore[arg-type]

    trees, rows = zip(*made, strict=True)
    return TreeArrays._make(map(joined, zip(*trees, strict=True))), NextPass._make(map(joined, zip(*rows, strict=True)))


def random_terms(device: str) -> Calibration:
    """Terms of a calibrated rule."""
    terms, buffer = term_buffers(torch.device(device))
    for array in buffer.device.values():
        if array.is_floating_point():
            array.copy_(torch.rand_like(array) * 0.1)
    terms.weights[0] = 1.0
    return terms
