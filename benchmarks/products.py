"""Matrix products of fixed order against cuBLAS, for the layers of known models and many numbers of rows.

python benchmarks/products.py [NAME…] [--rows 1,8,…] [--tiles] [--json FILE]

Without NAME: all models. A graph holds the product of each layer of a model once, with weights of their own, so that
weights come from memory as in a pass. The times are medians over replays, in microseconds for one product; both ways
run in turn. --tiles also times other tiles, with and without programs for single segments of K, and lists the fastest,
for changes to `choose_tile` and `splits`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from statistics import median
from typing import Any

import torch
from provenance import publish
from torch import Tensor
from torch.nn import functional as F

from windfall.kernels.backend import shared_memory
from windfall.kernels.triton import matmul as kernel
from windfall.render import console

# outputs and inputs of each product; the vocabulary is one product, the others are one for each layer
MODELS: dict[str, dict[str, tuple[int, int]]] = {
    "SmolLM2-135M": {
        "qkv": (960, 576),
        "o": (576, 576),
        "gate and up": (3072, 576),
        "down": (576, 1536),
        "vocabulary": (49_152, 576),
    },
    "Qwen2.5-1.5B": {
        "qkv": (2048, 1536),
        "o": (1536, 1536),
        "gate and up": (17_920, 1536),
        "down": (1536, 8960),
        "vocabulary": (151_936, 1536),
    },
    "Llama-3.1-8B": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate and up": (28_672, 4096),
        "down": (4096, 14_336),
        "vocabulary": (128_256, 4096),
    },
}
OTHER_MODELS = {  # only if they are named
    "gpt-oss-20b": {"qkv": (5120, 2880), "o": (2880, 4096), "vocabulary": (201_088, 2880)},
    "Gemma-3-4B": {"qkv": (4096, 2560), "o": (2560, 2048), "gate and up": (20_480, 2560), "down": (2560, 10_240)},
}
ROWS = "1,2,4,8,16,24,32,48,64,96,128,192,256,320"
GRAPH_BYTES = 2**29  # of weights in a graph: far more than the caches hold
MAX_PRODUCTS = 64  # in a graph
REPLAYS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MODELS | OTHER_MODELS)}")
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    rows = [int(each) for each in options.rows.split(",")]
    known = MODELS | OTHER_MODELS
    jobs = [(name, kind) for name in options.names or MODELS for kind in known[name]]
    found = []
    with console.progress("Timing…") as progress:
        for place, (name, kind) in enumerate(jobs):
            found.append({"model": name, "product": kind, **measure(*known[name][kind], rows, options.tiles)})
            progress((place + 1) / len(jobs))
    publish({"products": found, "dtype": "bfloat16"}, options.json)


@torch.inference_mode()
def measure(outputs: int, inputs: int, rows: list[int], tiles: bool) -> dict[str, Any]:
    """Microseconds of both ways by the number of rows, and their ratio; with `tiles`, the fastest tiles."""
    count = max(1, min(MAX_PRODUCTS, GRAPH_BYTES // (2 * outputs * inputs)))
    weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"windfall": fixed_order, "cublas": F.linear}
    times: dict[str, dict[str, float]] = {way: {} for way in ways}
    fastest: dict[str, Any] = {}
    for size in rows:
        x = torch.randn(size, inputs, device="cuda", dtype=torch.bfloat16)
        graphs = {way: captured(call, x, weights) for way, call in ways.items()}
        samples: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(REPLAYS):
            for way, graph in graphs.items():
                samples[way].append(replay_time(graph) / count)
        for way, seconds in samples.items():
            times[way][str(size)] = round(median(seconds), 3)
        if tiles:
            fastest[str(size)] = fastest_tiles(x, weights)
    ratio = {size: round(times["windfall"][size] / times["cublas"][size], 3) for size in times["cublas"]}
    return {"outputs": outputs, "inputs": inputs, "us": times, "ratio": ratio, **({"tiles": fastest} if tiles else {})}


def fastest_tiles(x: Tensor, weights: list[Tensor]) -> list[tuple[float, tuple[Any, ...]]]:
    """The three fastest tiles, each after its time and before whether segments have programs of their own."""
    found, chosen, splits = [], kernel.choose_tile, kernel.splits
    segments, _ = kernel.segments_of(len(weights[0]), x.shape[1])
    for tile, split in product(candidates(*x.shape), (False, True) if segments > 1 else (False,)):
        if 2 * tile.stages * tile.step * (tile.outputs + tile.height) > shared_memory(x.device):
            continue
        kernel.choose_tile = lambda *given, tile=tile: tile
        kernel.splits = lambda *given, split=split: split
        graph = captured(fixed_order, x, weights)
        found.append((round(median(replay_time(graph) for _ in range(5)) / len(weights), 3), (*tile, split)))
    kernel.choose_tile, kernel.splits = chosen, splits
    return sorted(found)[:3]


def candidates(rows: int, k: int) -> list[kernel.Tile]:
    """Tiles for this number of rows."""
    shapes = ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 8), (128, 256, 8), (256, 64, 8), (256, 128, 8))
    few = ((32, 16, 2), (32, 16, 4), (64, 16, 4), (128, 16, 4))
    tall = [
        kernel.Tile(outputs, height, 64, stages, warps, True, more)
        for outputs, height, more, warps in (
            (64, 64, 32, 4),
            (128, 64, 32, 4),
            (64, 128, 32, 4),
            (64, 128, 64, 4),
            (128, 128, 32, 8),
            (128, 128, 64, 8),
            (256, 128, 32, 8),
            (256, 128, 64, 8),
            (128, 256, 64, 8),
        )
        for stages in (4, 5)
        if rows > 64
    ]
    return tall + [
        kernel.Tile(outputs, height, step, stages, warps, descriptors)
        for outputs, height, warps in (few if rows <= 16 else shapes)
        for step in (64, 128)
        for stages in ((4, 6, 8) if rows <= 16 else (3, 4))
        for descriptors in ((False, True) if rows <= 16 else (True,))
        if k % step == 0
    ]


def fixed_order(x: Tensor, weight: Tensor) -> Tensor:
    return kernel.matmul(x, weight, None)


def captured(call: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: list[Tensor]) -> torch.cuda.CUDAGraph:
    """A graph of one product with each of the weights."""
    call(x, weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            call(x, weight)
    return graph


def replay_time(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of the second of two replays."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000


if __name__ == "__main__":
    main()
