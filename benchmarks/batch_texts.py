"""Texts of batches against texts generated alone: batches of several sizes, random arrivals, known beginnings.

python benchmarks/batch_texts.py TASK… [--limit 40] [--policies auto,beam] [--sizes 8,64] [--tokens 128]
                                 [--pages] [--json FILE]

Every prompt is first generated alone by plain decoding, greedily and at temperature 1, each with its own seed. Then the
same requests run in batches, at random times, and once more when the beginnings of all prompts are known. The exit code
is 1 if a text differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from provenance import publish

import windfall
from windfall import registry
from windfall.bench.tasks import load_tasks
from windfall.core.types import GpuOptions
from windfall.render import console

TEMPERATURES = (0.0, 1.0)
MEAN_PAUSE_SECONDS = 0.005  # between random arrivals
Texts = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", help="JSONL files with prompts, or builtin")
    for name in ("target", "drafter", "device", "dtype", "json"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--policies", default="auto,beam")
    parser.add_argument("--sizes", default="8,64", help="requests at once")
    parser.add_argument("--limit", type=int, default=40, help="prompts of each task")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pages", action="store_true", help="keep KV caches in pages, on any device")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    prompts = [prompt.turns[0] for prompt in load_tasks(options.tasks, options.limit)]
    engine = windfall.load(
        options.target,
        options.drafter,
        registry.policy("none"),
        options.device,
        options.dtype,
        gpu_options=GpuOptions(True, pages=True) if options.pages else GpuOptions(),
        max_requests=max(sizes),
    )
    requests = [
        {"prompt": prompt, "temperature": temperature, "seed": seed, "max_new_tokens": options.tokens}
        for temperature in TEMPERATURES
        for seed, prompt in enumerate(prompts)
    ]
    with console.progress("Generating each text alone…") as progress:
        alone = []
        for place, request in enumerate(requests):
            alone.append(engine.generate(**request).token_ids)
            progress((place + 1) / len(requests))
    rows = []
    with console.progress("Generating in batches…") as progress:
        policies = options.policies.split(",")
        for number, policy in enumerate(policies):
            engine.policy = registry.policy(policy)
            ways = [(f"batches of {size}", partial(in_batches, engine, size)) for size in sizes]
            ways += [("random arrivals", partial(arriving, engine)), ("known beginnings", partial(arriving, engine))]
            for place, (way, run) in enumerate(ways):
                rows.append({"policy": policy, "way": way, **compare(run, requests, alone)})
                progress((number + (place + 1) / len(ways)) / len(policies))
    publish(
        {
            "rows": rows,
            "tasks": [Path(task).name for task in options.tasks],
            "tokens": options.tokens,
            "runs_on": engine.batch_fallback or "gpu",
            "device": str(engine.target.device),
            "dtype": str(engine.target.decoder.dtype),
        },
        options.json,
    )
    engine.close()
    sys.exit(any(row["different"] for row in rows))


def compare(
    run: Callable[[list[dict[str, Any]]], Texts], requests: list[dict[str, Any]], alone: Texts
) -> dict[str, Any]:
    """Run all requests; how many texts differ from those generated alone, and the time."""
    start = time.perf_counter()
    texts = run(requests)
    seconds = time.perf_counter() - start
    wrong = [place for place, (one, other) in enumerate(zip(texts, alone, strict=True)) if one != other]
    return {"texts": len(texts), "different": len(wrong), "places": wrong[:8], "seconds": round(seconds, 2)}


def in_batches(engine: windfall.Engine, size: int, requests: list[dict[str, Any]]) -> Texts:
    """Submit `size` requests together, and the next when all of them have ended."""
    texts: Texts = []
    for start in range(0, len(requests), size):
        handles = [engine.submit(**request) for request in requests[start : start + size]]
        texts += [handle.result(600).token_ids for handle in handles]
    return texts


def arriving(engine: windfall.Engine, requests: list[dict[str, Any]]) -> Texts:
    """Submit the requests in random order, with random pauses."""
    chance = random.Random(0)
    handles = {}
    for place in chance.sample(range(len(requests)), len(requests)):
        handles[place] = engine.submit(**requests[place])
        time.sleep(chance.expovariate(1 / MEAN_PAUSE_SECONDS))
    return [handles[place].result(600).token_ids for place in range(len(requests))]


if __name__ == "__main__":
    main()
