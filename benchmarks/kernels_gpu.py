"""Each kernel of windfall.kernels against what torch offers for the same, both inside CUDA graphs.

    python benchmarks/kernels_gpu.py [--only attention] [--replays 50] [--json FILE]

A graph holds many calls over several sets of inputs, as the layers of a model would; the median over its replays,
divided by the calls, is a call's time without the launch of the graph. `share` is the share of an H200's bandwidth that
our kernel reaches.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from provenance import publish
from torch import Tensor
from torch.nn import functional as F

from windfall.kernels import add_norm, draw, gate_mul, rotate_and_store, top_children, tree_attention
from windfall.kernels.attention import visible
from windfall.kernels.expert_weights import Experts
from windfall.kernels.experts import clamped_swiglu, experts
from windfall.kernels.norm import add_norm_reference, gate_mul_reference, rotate_and_store_reference

CALLS = 24  # of one graph
SETS = 6  # of inputs
MODELS = {"135M": (9, 3, 64, 576, 1536, 49_152), "8B": (32, 8, 128, 4096, 14_336, 128_256)}
CONTEXTS = ((300, 512), (900, 1024), (3900, 4096), (16_000, 16_384), (32_000, 32_768))
ROWS = (1, 10, 64)
EXPERTS = (2880, 2880, 32, 4)  # hidden and inner size, experts and chosen experts of gpt-oss-20b
EXPERT_ROWS = (1, 8, 32, 64)
BANDWIDTH = 4.8e12  # bytes per second of an H200, for the share that a call reaches


class Case(NamedTuple):
    """One question: ways to compute the same, each called with the number of a set of inputs."""

    name: str
    ways: dict[str, Callable[[int], object]]
    bytes: int = 0  # that must be read, for the floor


def seconds(call: Callable[[int], object], replays: int) -> float:
    """Median time of a call inside a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for number in range(SETS):
            call(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            call(number % SETS)
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / CALLS)
    return statistics.median(times)


def half(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def attention(model: str, n: int, length: int, capacity: int) -> Case:
    from windfall.kernels.triton.attention import Tile, attend

    heads, shared, width = MODELS[model][:3]
    keys, values = half(SETS, shared, capacity, width), half(SETS, shared, capacity, width)
    queries, out = half(n, heads, width), half(n, heads, width)
    mask, committed = torch.ones(n, n, device="cuda").tril() > 0, torch.tensor([length], device="cuda")
    seen, end = visible(committed, mask, capacity)[None, None], length + n

    def torch_over(end: int) -> Callable[[int], object]:
        rows, mask = queries.transpose(0, 1)[None], seen[..., :end]
        return lambda i: F.scaled_dot_product_attention(
            rows, *(x[i][None, :, :end].repeat_interleave(heads // shared, 1) for x in (keys, values)), mask
        )

    def ours(shape: Tile | None, size: int | None) -> Callable[[int], object]:
        return lambda i: attend(queries, keys[i], values[i], committed, mask, width**-0.5, out, shape, size)

    return Case(
        f"attention {model}, {n} rows, {length} of {capacity}",
        {
            "ours": lambda i: tree_attention(queries, keys[i], values[i], committed, mask),
            "ours, 64 rows a tile": ours(Tile(64, 64, 4, 3), None),
            **{f"ours, splits of {size}": ours(None, size) for size in (128, 256, 512, 1024) if size <= capacity},
            "torch, whole capacity": torch_over(capacity),
            "torch, known length": torch_over(end),
        },
        bytes=2 * 2 * shared * end * width,
    )


def draws(model: str, n: int, greedy: bool) -> Case:
    from windfall.kernels.draw import reference

    seed, heat = torch.tensor([7], device="cuda"), torch.ones(1, device="cuda")
    logits, positions = half(SETS, n, MODELS[model][-1]), torch.arange(n, device="cuda")
    return Case(
        f"draw {model}, {n} rows, {'greedy' if greedy else 'sampled'}",
        {
            "ours": lambda i: draw(logits[i], positions, seed, heat, greedy),
            "torch": lambda i: reference(logits[i], positions, seed, heat, greedy),
        },
        bytes=2 * n * MODELS[model][-1],
    )


def top(columns: int, w: int, k: int, coupled: bool) -> Case:
    from windfall.kernels.draw import gumbel

    seed, heat = torch.tensor([7], device="cuda"), torch.ones(1, device="cuda")
    logits, positions = half(SETS, w, columns), torch.arange(w, device="cuda")
    dice = (positions, seed, heat, heat) if coupled else ()

    def plain(i: int) -> object:
        scores = logits[i].float()
        if coupled:
            scores = (scores / heat + gumbel(seed, positions, torch.arange(columns, device="cuda"))) / heat
        return scores.log_softmax(-1).topk(k)

    return Case(
        f"top {k} of {columns}, {w} rows, {'coupled' if coupled else 'uncoupled'}",
        {"ours": lambda i: top_children(logits[i], k, *dice), "torch": plain},
        bytes=2 * w * columns,
    )


def add_norms(model: str, n: int) -> Case:
    hidden = MODELS[model][3]
    x, residual, weight = half(SETS, n, hidden), half(SETS, n, hidden), half(hidden)
    return Case(
        f"add_norm {model}, {n} rows",
        {
            "ours": lambda i: add_norm(x[i], residual[i], weight, 1e-5),
            "torch": lambda i: add_norm_reference(x[i], residual[i], weight, 1e-5),
        },
    )


def gates(model: str, n: int) -> Case:
    gate_up = half(SETS, n, 2 * MODELS[model][4])
    return Case(
        f"gate_mul {model}, {n} rows",
        {"ours": lambda i: gate_mul(gate_up[i]), "torch": lambda i: gate_mul_reference(gate_up[i])},
    )


def rotations(model: str, n: int) -> Case:
    heads, shared, width = MODELS[model][:3]
    qkv, turn, slots = half(SETS, n, (heads + 2 * shared) * width), half(2, n, width), torch.arange(n, device="cuda")
    keys, values = half(SETS, shared, 4096, width), half(SETS, shared, 4096, width)
    return Case(
        f"rotate_and_store {model}, {n} rows",
        {
            "ours": lambda i: rotate_and_store(qkv[i], *turn, keys[i], values[i], slots),
            "torch": lambda i: rotate_and_store_reference(qkv[i], *turn, keys[i], values[i], slots),
        },
    )


@functools.cache
def expert_layers() -> list[tuple[Tensor, Tensor, Experts]]:
    """The weight and bias of the router, and the experts, of some layers."""
    hidden, inner, count, top_k = EXPERTS
    shapes = ((count, hidden, 2 * inner), (count, 2 * inner), (count, inner, hidden), (count, hidden))

    def numbers(*shape: int) -> Tensor:
        return half(*shape) / hidden**0.5

    return [
        (numbers(count, hidden), numbers(count), Experts(*(numbers(*shape) for shape in shapes), top_k))
        for _ in range(SETS)
    ]


def mixtures(n: int) -> Case:
    """The floor is the weights of the chosen experts."""
    from windfall.kernels.triton.experts import Tile, mixture

    hidden, inner, count, top_k = EXPERTS
    layers, x = expert_layers(), half(SETS, n, hidden)
    logits = [F.linear(x[i], *layers[i][:2]) for i in range(SETS)]
    plans = []  # of each set: its experts, with the rows and shares of each
    for each in logits:
        values, indices = each.topk(top_k)
        shares = values.softmax(-1)
        picks = {expert: (indices == expert).nonzero(as_tuple=True) for expert in indices.unique().tolist()}
        plans.append([(expert, rows, shares[rows, slots, None]) for expert, (rows, slots) in picks.items()])

    used = sum(map(len, plans)) / SETS

    def known(i: int) -> object:
        gate_up, gate_up_bias, down, down_bias, _, alpha, limit = layers[i][2]
        out = torch.zeros_like(x[i])
        for expert, rows, shares in plans[i]:
            made = clamped_swiglu(x[i][rows] @ gate_up[expert] + gate_up_bias[expert], alpha, limit)
            out.index_add_(0, rows, (made @ down[expert] + down_bias[expert]) * shares)
        return out

    def tiled(tile: Tile | None) -> Callable[[int], object]:
        return lambda i: mixture(x[i], logits[i], layers[i][2], tile)

    return Case(
        f"experts gpt-oss-20b, {n} rows, {used:.1f} of {count} experts",
        {
            "ours": lambda i: experts(x[i], *layers[i]),
            "ours, exact": lambda i: experts(x[i], *layers[i], True),
            "ours, logits known": tiled(None),
            "ours, logits known, 32 columns": tiled(Tile(16, 32, 7, 7, 4)),
            "ours, logits known, 128 columns": tiled(Tile(16, 128, 4, 4, 4)),
            "ours, logits known, fewer stages": tiled(Tile(16, 64, 4, 4, 4)),
            "ours, logits known, more stages": tiled(Tile(16, 64, 7, 9, 4)),
            "torch, experts known": known,
        },
        bytes=round(2 * 3 * hidden * inner * used),
    )


def cases(kind: str) -> Iterator[Case]:
    if kind == "attention":
        return (attention(model, n, *context) for model in MODELS for context in CONTEXTS for n in ROWS)
    if kind == "draw":
        return itertools.starmap(draws, itertools.product(MODELS, ROWS, (True, False)))
    if kind == "top":
        return itertools.starmap(top, itertools.product((16_384, 49_152, 151_936), ROWS, (4, 10), (False, True)))
    if kind == "experts":
        return map(mixtures, EXPERT_ROWS)
    return (make(model, n) for make in (add_norms, gates, rotations) for model in MODELS for n in ROWS)


def share(size: int, microseconds: float) -> float:
    """Of the bandwidth, when this many bytes are read in this time."""
    return round(size / (1e-6 * microseconds) / BANDWIDTH, 3)


KINDS = ("attention", "draw", "top", "norm", "experts")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=KINDS, action="append")
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kernels_gpu.py needs a CUDA device")
    table = {}
    for kind in options.only or KINDS:
        for case in cases(kind):
            own = {way: round(1e6 * seconds(call, options.replays), 2) for way, call in case.ways.items()}
            floor = {"bytes": case.bytes, "share": share(case.bytes, own["ours"])} if case.bytes else {}
            table[case.name] = {**own, **floor}
            print(case.name, table[case.name], file=sys.stderr, flush=True)
    what = "microseconds of one call inside a CUDA graph, median; share of the bandwidth"
    publish({"what": what, "us": table}, options.json)


if __name__ == "__main__":
    main()
