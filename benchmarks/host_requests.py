"""Requests that need the host in every cycle: sharing verify passes, and one after the other.

python benchmarks/host_requests.py TASK… [--limit 8] [--concurrency 1,8,64] [--kinds plain,logprobs,…] [--policy auto]
                                   [--tokens 64] [--rounds 3] [--json FILE]

For each kind of request and each number of requests at once, two engines generate the same texts in turns: one lets
them share verify passes on the KV cache in pages, the other decodes one text after the other. `plain` requests draw
their tokens on the device and are there for comparison. One round before the others does not count, and there are no
further ones when they took ten seconds together. The exit code is 1 if a text differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from provenance import publish

import windfall
from windfall import registry
from windfall.bench.gpu_internals import forget_prefixes
from windfall.bench.tasks import load_tasks
from windfall.core.types import GpuOptions
from windfall.render import console

SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 80}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 5},
    "penalties": {"frequency_penalty": 0.3, "presence_penalty": 0.3},
    "schema": {"json_schema": SCHEMA},  # needs xgrammar or llguidance
    "policy": {"policy": "svip"},  # not the engine's: each request decides for itself
}
ENOUGH_SECONDS = 10
WAYS = {"together": True, "in turn": False}  # whether the KV cache is in pages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", help="JSONL files with prompts, or builtin")
    for name in ("target", "drafter", "device", "dtype", "json"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--concurrency", default="1,8,64", help="requests at once")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each task")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="at most")
    options = parser.parse_args()
    prompts = [prompt.turns[0] for prompt in load_tasks(options.tasks, options.limit)]
    sizes, kinds = [int(size) for size in options.concurrency.split(",")], options.kinds.split(",")
    graphs = None if options.device != "cpu" else True  # the same path on a CPU, without graphs
    engines = {
        way: windfall.load(
            options.target,
            options.drafter,
            registry.policy(options.policy),
            options.device,
            options.dtype,
            gpu_options=GpuOptions(graphs, pages=pages),
            max_requests=max(sizes),
        )
        for way, pages in WAYS.items()
    }
    for engine in engines.values():
        engine.prepare((0.0,))
    rows, points = [], [(kind, size) for kind in kinds for size in sizes]
    with console.progress("Generating…") as progress:
        for place, (kind, size) in enumerate(points):
            rows.append({"kind": kind, "requests": size, **compare(engines, prompts, KINDS[kind], size, options)})
            progress((place + 1) / len(points))
    first = engines["together"]
    settings = {name: getattr(options, name) for name in ("policy", "limit", "tokens", "rounds")}
    publish(
        {
            "rows": rows,
            "settings": {**settings, "tasks": [Path(task).name for task in options.tasks]},
            "target": first.target.name,
            "device": str(first.target.device),
            "dtype": str(first.target.decoder.dtype),
        },
        options.json,
    )
    for engine in engines.values():
        engine.close()
    sys.exit(any(row["different"] for row in rows))


def compare(
    engines: Mapping[str, windfall.Engine], prompts: list[str], how: dict[str, Any], size: int, options: Any
) -> dict[str, Any]:
    """Tokens per second of each engine with this number of requests at once, and how many texts differ."""
    requests = [
        {"prompt": prompts[place % len(prompts)], "max_new_tokens": options.tokens, "seed": place, **how}
        for place in range(size)
    ]
    speeds: dict[str, list[float]] = {way: [] for way in engines}
    texts: dict[str, list[list[int]]] = {}
    spent = 0.0
    for number in range(options.rounds + 1):  # the first captures graphs
        for way, engine in engines.items():
            forget_prefixes(engine)
            start = time.perf_counter()
            handles = [engine.submit(**request) for request in requests]
            texts[way] = [handle.result(600).token_ids for handle in handles]
            if number:
                seconds = time.perf_counter() - start
                speeds[way].append(sum(map(len, texts[way])) / seconds)
                spent += seconds
        if spent > ENOUGH_SECONDS:
            break
    different = sum(one != other for one, other in zip(*texts.values(), strict=True))
    return {"tokens_per_second": {way: median(own) for way, own in speeds.items()}, "different": different}


if __name__ == "__main__":
    main()
