"""Attention of batches: microseconds by requests, rows and lengths, for several ways to divide the work.

python benchmarks/attention.py [SHAPE…] [--requests 1,8,64] [--rows 1,4] [--length 300] [--json FILE]

Without SHAPE: all shapes. The rows of a request are a tree of up to seven levels. The texts have lengths between
half and one and a half of `--length`. A graph holds the attention of several layers with caches of their own. The floor
is the number of bytes of keys and values, divided by the memory's bandwidth.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

import torch
from provenance import publish
from torch import Tensor

from windfall.bench.speed.passes import bandwidth, timed
from windfall.kernels import path_attention
from windfall.kernels.pages import PAGE_TOKENS, Pages, max_tiles, pages_for, tile_rows, tiles_of
from windfall.kernels.triton import path_attention as kernel
from windfall.render import console

SHAPES = {"SmolLM2-135M": (9, 3, 64), "Qwen2.5-1.5B": (12, 2, 128), "Llama-3.1-8B": (32, 8, 128)}  # heads, of keys, d
WAYS: dict[str, dict[str, int]] = {  # what differs from the defaults of the kernel
    "default": {},
    "merge more parts at a time": {"BATCH_MERGED": 8192},
    "264 programs for tiles": {"BATCH_TILE_PROGRAMS": 264, "BATCH_TREE_PROGRAMS": 264},
    "528 programs for tiles": {"BATCH_TILE_PROGRAMS": 528, "BATCH_TREE_PROGRAMS": 528},
    "1056 programs for tiles": {"BATCH_TILE_PROGRAMS": 1056, "BATCH_TREE_PROGRAMS": 1056},
    "264 programs for rows": {"BATCH_ROW_PROGRAMS": 264},
    "1056 programs for rows": {"BATCH_ROW_PROGRAMS": 1056},
    "3 stages": {"STAGES": 3},
    "rows apart": {"FUSED_ROWS": False},
}
LONE_WAYS: dict[str, dict[str, int]] = {  # of one request, whose keys are not in pages
    "default": {},
    "merge fewer parts at a time": {"MERGED": 2048},
    "3 stages": {"STAGES": 3},
    "198 programs": {"MAX_PROGRAMS": 198},
    "264 programs": {"MAX_PROGRAMS": 264},
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
    pages, reach, lineage, capacity, total = made
    caches = [torch.randn(2, shared, capacity, width, device="cuda").bfloat16() for _ in range(LAYERS)]
    queries = torch.randn(requests * rows, heads, width, device="cuda").bfloat16()
    times, lone = {}, requests == 1
    for way, changes in (LONE_WAYS if lone else WAYS).items():
        before = {name: getattr(kernel, name) for name in changes}
        for name, value in changes.items():
            setattr(kernel, name, value)
        times[way] = graph_time(queries, caches, reach, lineage, None if lone else pages, pages.lengths)
        for name, value in before.items():
            setattr(kernel, name, value)
    floor = round(1e6 * total * shared * width * 4 / speed, 1)
    return {"shape": shape, "requests": requests, "rows": rows, "us": times, "floor_us": floor}


def batch(requests: int, rows: int, length: int, group: int) -> tuple[Pages, Tensor, Tensor | None, int, int]:
    """Pages, reach and lineage of a batch; the slots of its cache; and the keys of all texts together."""
    shares = torch.linspace(0.5, 1.5, requests) if requests > 1 else torch.ones(1)
    lengths = (length * shares).long().cuda()
    wide = pages_for(int(lengths.max()) + rows)
    tables = (1 + torch.randperm(requests * wide).view(requests, wide)).int().cuda()
    staging = (requests * wide + 1) * PAGE_TOKENS
    owners = torch.arange(requests, device="cuda").repeat_interleave(rows)
    tiles = tiles_of(owners, tile_rows(group), max_tiles(len(owners), requests + 1, tile_rows(group)))
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
    pages = Pages(owners.int(), lengths if rows > 1 else lengths - 1, tables, tiles)
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
