"""Attention of batches: microseconds by requests, rows and lengths, for several ways to divide the work.

python benchmarks/attention.py [SHAPE…] [--requests 1,8,64] [--rows 1,4] [--length 300] [--json FILE]

Without SHAPE: all shapes. The rows of a request are a tree of up to seven levels. The texts have lengths between
half and one and a half of `--length`. A graph holds the attention of several layers with caches of their own. The floor
is the number of bytes of keys and values, divided by the memory's bandwidth.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from provenance import publish
from torch import Tensor

from windfall.bench.speed.passes import bandwidth, timed
from windfall.kernels import pages as tiling
from windfall.kernels import path_attention
from windfall.kernels.pages import PAGE_TOKENS, Pages, max_tiles, pages_for, tile_rows, tiles_of
from windfall.kernels.triton import path_attention as kernel
from windfall.render import console

SHAPES = {"SmolLM2-135M": (9, 3, 64), "Qwen2.5-1.5B": (12, 2, 128), "Llama-3.1-8B": (32, 8, 128)}  # heads, of keys, d
WAYS: dict[str, dict[str, int]] = {  # what differs from the defaults of the kernel
    "default": {},
    "merge more parts at a time": {"BATCH_MERGED": 8192},
    "264 programs for tiles": {"BATCH_TILE_PROGRAMS": 264},
    "1056 programs for tiles": {"BATCH_TILE_PROGRAMS": 1056},
    "264 programs for rows": {"BATCH_ROW_PROGRAMS": 264},
    "1056 programs for rows": {"BATCH_ROW_PROGRAMS": 1056},
    "2 stages": {"BATCH_STAGES": 2},
    "5 stages": {"BATCH_STAGES": 5},
    "three programs at a time": {"MANY_PROGRAMS": 10**6},
    "4 parts for a program": {"PARTS_PER_SHARE": 4},
    "16 parts for a program": {"PARTS_PER_SHARE": 16},
    "rows apart": {"FUSED_ROWS": False},
    "rows together in all programs": {"FUSED_SHARES": True},
    "2 warps": {"WARPS": 2},
    "1 warp": {"WARPS": 1},
    "up to 32 queries in a tile": {"MOST_TILE_QUERIES": 32},
    "up to 64 queries in a tile": {"MOST_TILE_QUERIES": 64},
    "up to 64 queries in a tile, rows apart": {"MOST_TILE_QUERIES": 64, "FUSED_ROWS": False},
    "up to 64 queries in a tile, rows together": {"MOST_TILE_QUERIES": 64, "FUSED_SHARES": True},
}
LONE_WAYS: dict[str, dict[str, int]] = {  # of one request, whose keys are not in pages
    "default": {},
    "merge fewer parts at a time": {"MERGED": 2048},
    "3 stages": {"STAGES": 3},
    "198 programs": {"MAX_PROGRAMS": 198},
    "264 programs": {"MAX_PROGRAMS": 264},
    "rows together": {"FUSED_ALONE": True},
    "rows together, 264 programs": {"FUSED_ALONE": True, "MAX_PROGRAMS": 264},
    "rows together, 528 programs": {"FUSED_ALONE": True, "MAX_PROGRAMS": 528},
    "2 warps": {"WARPS": 2},
    "1 warp": {"WARPS": 1},
    "32 queries in a tile": {"TALLEST_ALONE": 32},
    "64 queries in a tile": {"TALLEST_ALONE": 64},
    "64 queries in a tile, 264 programs": {"TALLEST_ALONE": 64, "MAX_PROGRAMS": 264},
    "64 queries in a tile, rows together": {"TALLEST_ALONE": 64, "FUSED_ALONE": True, "MAX_PROGRAMS": 264},
}
LEVELS = 7  # of a request's tree
LAYERS = 8
REPLAYS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--requests", default="1,8,64", help="at once; 1: keys are not in pages")
    parser.add_argument("--rows", default="1,4", help="of a request; 1: plain decoding")
    parser.add_argument("--length", type=int, default=300)
    parser.add_argument("--json")
    options = parser.parse_args()
    requests, rows = ([int(each) for each in text.split(",")] for text in (options.requests, options.rows))
    jobs = [(shape, count, each) for shape in options.shapes or SHAPES for count in requests for each in rows]
    speed, found = bandwidth(torch.device("cuda")), []
    with console.progress("Timing…") as progress:
        for place, (shape, count, each) in enumerate(jobs):
            found.append(measure(shape, count, each, options.length, speed))
            progress((place + 1) / len(jobs))
    publish({"rows": found, "length": options.length, "dtype": "bfloat16"}, options.json)


@torch.inference_mode()
def measure(shape: str, requests: int, rows: int, length: int, speed: float) -> dict[str, Any]:
    """Microseconds of one layer's attention in each way, and the floor."""
    heads, shared, width = SHAPES[shape]
    made = batch(requests, rows, length, heads // shared)
    caches = [torch.randn(2, shared, made[3], width, device="cuda").bfloat16() for _ in range(LAYERS)]
    queries = torch.randn(requests * rows, heads, width, device="cuda").bfloat16()
    times, lone = {}, requests == 1
    for way, changes in (LONE_WAYS if lone else WAYS).items():
        with changed(changes):
            pages, reach, lineage, *_ = batch(requests, rows, length, heads // shared)
            times[way] = graph_time(queries, caches, reach, lineage, None if lone else pages, pages.lengths)
    floor = round(1e6 * made[4] * shared * width * 4 / speed, 1)
    return {"shape": shape, "requests": requests, "rows": rows, "us": times, "floor_us": floor}


@contextmanager
def changed(constants: dict[str, int]) -> Iterator[None]:
    """Other values for constants of the kernel, or of the tiles of several requests."""
    there = {name: kernel if hasattr(kernel, name) else tiling for name in constants}
    before = {name: getattr(module, name) for name, module in there.items()}
    try:
        for name, module in there.items():
            setattr(module, name, constants[name])
        yield
    finally:
        for name, module in there.items():
            setattr(module, name, before[name])


def batch(requests: int, rows: int, length: int, group: int) -> tuple[Pages, Tensor, Tensor | None, int, int]:
    """Pages, reach and lineage of a batch; the slots of its cache; and the keys of all texts together."""
    shares = torch.linspace(0.5, 1.5, requests) if requests > 1 else torch.ones(1)
    lengths = (length * shares).long().cuda()
    wide = pages_for(int(lengths.max()) + rows)
    tables = (1 + torch.randperm(requests * wide).view(requests, wide)).int().cuda()
    staging = (requests * wide + 1) * PAGE_TOKENS
    owners = torch.arange(requests, device="cuda").repeat_interleave(rows)
    most = tile_rows(group, rows)
    tiles = tiles_of(owners, most, max_tiles(len(owners), requests + 1, most))
    levels = min(rows, LEVELS)
    depth = (torch.arange(rows, device="cuda") * levels // rows).repeat(requests)
    lineage = None
    if rows > 1:  # a row's path: the first row of each level above it, then itself
        own = staging + torch.arange(requests * rows, device="cuda").view(requests, rows)
        firsts = -(-torch.arange(levels, device="cuda") * rows // levels)
        lineage = own[:, firsts].repeat_interleave(rows, 0)
        lineage.scatter_(1, depth[:, None], own.flatten()[:, None])
        lineage = lineage.int()
    reach = lengths[owners] + depth + (rows > 1)
    pages = Pages(owners.int(), lengths if rows > 1 else lengths - 1, tables, tiles, most)
    return pages, reach, lineage, staging + requests * rows, int(lengths.sum())


def graph_time(
    queries: Tensor, caches: list[Tensor], reach: Tensor, lineage: Tensor | None, pages: Pages | None, length: Tensor
) -> float:
    """Microseconds of one layer, from replays of a graph of all of them."""
    path_attention(queries, *caches[0], length, reach, lineage, pages=pages)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for cache in caches:
            path_attention(queries, *cache, length, reach, lineage, pages=pages)
    seconds = median(timed(torch.device("cuda"), graph.replay) for _ in range(REPLAYS))
    return round(1e6 * seconds / len(caches), 2)


if __name__ == "__main__":
    main()
