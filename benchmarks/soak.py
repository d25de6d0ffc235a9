"""Many requests with random lengths, arrivals, cancels, deadlines and preemptions; every text must be right.

python benchmarks/soak.py [--requests 1000] [--policy auto] [--max-requests 16] [--kv-memory 60MB]
                          [--pages] [--json FILE]

The texts of all cases are first generated alone, by plain decoding. Then requests for random cases arrive at random
times. A text that ends by itself must be the one generated alone; one that is cancelled or late must be its beginning.
At the end all pages must be free, and in a long run the memory must not have grown in the second half. The exit code is
1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections import Counter
from typing import Any, NamedTuple

import torch
from provenance import publish
from same_text import long_prompt

import windfall
from windfall import registry
from windfall.core.types import GpuOptions
from windfall.engine.handle import CANCELLED, DEADLINE, Handle
from windfall.render import console

SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 40},
    {"repetition_penalty": 1.1},
]
CANCELLED_SHARE, LATE_SHARE = 0.2, 0.08  # of the requests; some have ended before they are cancelled
LONG_RUN = 500  # requests from which the memory must be flat; before, caches still fill
MEMORY_SLACK = 0.03  # share by which the memory may grow in the second half


class Case(NamedTuple):
    """A request and its text."""

    prompt: list[int]
    sampling: dict[str, Any]
    text: list[int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "drafter", "device", "dtype", "kv-memory", "json"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--cases", type=int, default=60, help="different requests")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--max-requests", type=int, default=16)
    parser.add_argument("--longest", type=int, default=600, help="tokens of the longest prompt")
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of a text")
    parser.add_argument("--pages", action="store_true", help="keep KV caches in pages, on any device")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    engine = windfall.load(
        options.target,
        options.drafter,
        registry.policy(options.policy),
        options.device,
        options.dtype,
        gpu_options=GpuOptions(options.pages or None, pages=options.pages),
        max_requests=options.max_requests,
        kv_memory=options.kv_memory,
    )
    start = time.perf_counter()
    cases = make_cases(engine, options, chance)
    alone = time.perf_counter() - start
    start = time.perf_counter()
    outcome = soak(engine, cases, options, chance)
    seconds = time.perf_counter() - start
    free = pages_are_free(engine)
    memory = outcome.pop("memory")
    grown = memory[-1] / memory[len(memory) // 2] - 1
    flat = grown <= MEMORY_SLACK or options.requests < LONG_RUN
    right = not outcome["wrong"] and free is not False and flat
    publish(
        {
            "right": right,
            **outcome,
            "pages_free": free,
            "memory_bytes": memory,
            "memory_growth": round(grown, 4),
            "runs_on": engine.batch_fallback or "gpu",
            "cases": len(cases),
            "seconds": round(seconds, 1),
            "seconds_alone": round(alone, 1),
            "policy": options.policy,
            "max_requests": options.max_requests,
            "kv_memory": options.kv_memory,
            "device": str(engine.target.device),
            "dtype": str(engine.target.decoder.dtype),
        },
        options.json,
    )
    engine.close()
    sys.exit(not right)


def make_cases(engine: windfall.Engine, options: argparse.Namespace, chance: random.Random) -> list[Case]:
    """Prompts of random lengths, some with the same beginning, and their texts by plain decoding."""
    log = long_prompt(engine, 4 * options.longest)
    policy, cases = engine.policy, []
    engine.policy = registry.policy("none")
    with console.progress("Generating each text alone…") as progress:
        for number in range(options.cases):
            length = chance.choice([2, 20, 64, 65, 130, chance.randint(2, options.longest)])
            begin = 0 if number % 3 == 0 else chance.randrange(len(log) // 2)
            prompt = log[begin : begin + min(length, options.longest)]
            sampling = {**chance.choice(SAMPLING), "seed": number, "eos": ()}
            sampling["max_new_tokens"] = chance.randint(1, options.tokens)
            cases.append(Case(prompt, sampling, engine.generate(prompt, **sampling).token_ids))
            progress((number + 1) / options.cases)
    engine.policy = policy
    return cases


def soak(
    engine: windfall.Engine, cases: list[Case], options: argparse.Namespace, chance: random.Random
) -> dict[str, Any]:
    """Submit all requests; what became of them."""
    flying: list[tuple[Case, Handle]] = []
    ends: Counter[str] = Counter()
    wrong: list[str] = []
    memory: list[int] = []
    with console.progress("Soaking…") as progress:
        for number in range(options.requests):
            case = chance.choice(cases)
            deadline = chance.choice([0.01, 0.1, 0.5]) if chance.random() < LATE_SHARE else None
            handle = engine.submit(case.prompt, deadline=deadline, **case.sampling)
            flying.append((case, handle))
            if chance.random() < CANCELLED_SHARE:
                chance.choice(flying)[1].cancel()
            while len(flying) > 3 * options.max_requests or (number == options.requests - 1 and flying):
                case, handle = flying.pop(chance.randrange(len(flying)))
                made = handle.result(600)
                ends[made.finish_reason or ""] += 1
                early = made.finish_reason in (CANCELLED, DEADLINE)
                wanted = case.text[: len(made.token_ids)] if early else case.text
                if made.token_ids != wanted:
                    wrong.append(f"request {handle.id}: {len(made.token_ids)} tokens, {case.sampling}")
            if chance.random() < 0.2:
                time.sleep(chance.random() / 100)
            if (number + 1) % max(options.requests // 16, 1) == 0:
                memory.append(used_memory(engine.target.device))
            progress((number + 1) / options.requests)
    return {
        "requests": options.requests,
        "ends": dict(ends),
        "preempted": engine.counters.preemptions,
        "wrong": wrong,
        "memory": memory,
    }


def used_memory(device: torch.device) -> int:
    """Bytes: those that torch holds on a GPU, else the largest that the process ever had."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def pages_are_free(engine: windfall.Engine) -> bool | None:
    """Whether no request holds a page; None if requests do not run in pages."""
    target = None if (paged := engine._paged()) is None else paged.target  # what users need not see
    return None if target is None else target.cache.pool.available == target.cache.pool.pages


if __name__ == "__main__":
    main()
