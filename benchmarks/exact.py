"""Texts of exact and of fast passes against plain decoding in half precision, and what exactness costs.

python benchmarks/exact.py TASK… [--limit 40] [--policies auto,beam,…] [--tokens 128] [--modes exact,fast]
                           [--widen SHAPE] [--json FILE]

The engines run in turn over the same prompts, after a warm-up over all of them: policies that adapt need kernels and
graphs of many sizes. The exit code is 1 if a text of exact passes differs from plain decoding's. --texts leaves out
tokens/s, for a machine that does other work at the same time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from provenance import publish

import windfall
from windfall import registry
from windfall.bench.tasks import load_tasks
from windfall.bench.widen import widen_pair
from windfall.drafters.head_drafter import HeadDrafter
from windfall.engine.loading import as_drafter
from windfall.model.target import Target
from windfall.render import console

POLICIES = "auto,beam,salf,talon,ltd"
TEMPERATURES = (0.0, 1.0)
MODES = {"fast": False, "exact": True}
WARM_UP = 3  # prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", help="JSONL files with prompts, or builtin")
    for name in ("target", "drafter", "device", "json"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=int, default=40, help="prompts of each task")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--widen", help="zero-pad the models to a larger pair's shape, e.g. llama-3.1-8b; for timing")
    parser.add_argument("--modes", default="exact,fast")
    parser.add_argument("--texts", action="store_true", help="compare texts only, without tokens/s")
    options = parser.parse_args()
    prompts = [prompt.turns[0] for prompt in load_tasks(options.tasks, options.limit)]
    given: dict[str, Any] = {"device": options.device, "dtype": options.dtype}
    models = widened(options, given) if options.widen else lambda: (options.target, options.drafter, given)
    engines = {}
    for mode in options.modes.split(","):
        target, drafter, how = models()
        engines[mode] = windfall.load(target, drafter, exact=MODES[mode], **how)
    for engine in engines.values():
        run(engine, prompts, 0.0, 1)  # captures the graphs of all prompt lengths
    policies = ["none", *options.policies.split(",")]
    jobs = [(t, policy, mode) for t in TEMPERATURES for policy in policies for mode in engines]
    texts: dict[tuple[Any, ...], list[list[int]]] = {}
    rates: dict[tuple[Any, ...], Rate] = {}
    with console.progress("Generating…") as progress:
        for place, job in enumerate(jobs):
            temperature, policy, mode = job
            engine = engines[mode]
            engine.policy = registry.policy(policy)
            run(engine, prompts[:WARM_UP], temperature, options.tokens)
            texts[job], rates[job] = run(engine, prompts, temperature, options.tokens)
            progress((place + 1) / len(jobs))
    rows = [
        {
            "temperature": temperature,
            "policy": policy,
            "mode": mode,
            **({} if options.texts else speed(rates, temperature, policy, mode)),
            "texts": len(prompts),
            "different": sum(map(list.__ne__, texts[temperature, policy, mode], texts[temperature, "none", mode])),
        }
        for temperature, policy, mode in jobs
    ]
    tasks = [Path(task).name for task in options.tasks]
    device = str(next(iter(engines.values())).target.device)
    publish(
        {
            "rows": rows,
            "tasks": tasks,
            "dtype": options.dtype,
            "tokens": options.tokens,
            "widened_to": options.widen,
            "device": device,
            "exact_passes": {mode: engine.exact_passes for mode, engine in engines.items()},
        },
        options.json,
    )
    sys.exit(any(row["different"] for row in rows if row["mode"] == "exact"))


def widened(options: argparse.Namespace, given: dict[str, Any]) -> Callable[[], tuple[Any, Any, dict[str, Any]]]:
    """Makes targets and drafters that share one pair of models, zero-padded to a larger pair's shape."""
    engine = windfall.load(options.target, options.drafter, **given)
    assert isinstance(engine.drafter, HeadDrafter), "--widen needs a draft head"
    pair = widen_pair(engine.target.model, engine.drafter.head, options.widen)
    return lambda: (Target(pair.model, engine.target.tokenizer), as_drafter(pair.head), {})


class Rate(NamedTuple):
    """What a run took: tokens per second with prefill, tokens per verify pass, and milliseconds for each pass."""

    tokens_per_second: float
    tau: float
    cycle_ms: float


def speed(rates: dict[tuple[Any, ...], Rate], temperature: float, policy: str, mode: str) -> dict[str, float]:
    """The rate, and its ratio to that of fast passes if these were measured.

    Exact and fast passes write different texts, with a different tau. The ratio of cycles does not depend on it.
    """
    own, fast = rates[temperature, policy, mode], rates.get((temperature, policy, "fast"))
    ratios = {}
    if fast is not None:
        ratios = {
            "of_fast": own.tokens_per_second / fast.tokens_per_second,
            "cycle_of_fast": fast.cycle_ms / own.cycle_ms,
        }
    return {**own._asdict(), **ratios}


def run(engine: windfall.Engine, prompts: list[str], temperature: float, tokens: int) -> tuple[list[list[int]], Rate]:
    """The texts of these prompts, each with its own seed, and the rate."""
    texts, seconds, cycles = [], 0.0, 0
    for seed, prompt in enumerate(prompts):
        start = time.perf_counter()
        text = engine.generate(prompt, max_new_tokens=tokens, temperature=temperature, seed=seed)
        seconds += time.perf_counter() - start
        cycles += len(text.steps)
        texts.append(text.token_ids)
    made = sum(map(len, texts))
    return texts, Rate(made / seconds, made / cycles, 1000 * seconds / cycles)


if __name__ == "__main__":
    main()
