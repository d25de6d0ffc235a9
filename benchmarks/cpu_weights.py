"""How fast does a CPU decode with each kind of packed weights? Plain decoding, `auto` and transformers, in turns.

    python benchmarks/cpu_weights.py [--weights full,bf16,int8,file] [--rounds 5] [--tokens 64] [--json FILE]

The result is the median of the rounds; in each round, everything runs once, because the speed of a machine drifts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from provenance import publish

import windfall
from windfall import registry
from windfall.checkpoints.find import load_model
from windfall.kernels.packed import packed_formats

PROMPT = "Write a Python class Stack with push, pop and peek, each with a docstring, then show how it is used."


def megabytes(model: Any) -> float:
    """The size of all weights and buffers."""
    return sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers())) / 1e6


def by_windfall(engine: windfall.Engine, policy: str, tokens: int) -> tuple[list[int], float]:
    engine.policy = registry.policy(policy)
    started = time.perf_counter()
    found = engine.generate(PROMPT, max_new_tokens=tokens)
    return found.token_ids, time.perf_counter() - started


def by_transformers(model: Any, prompt: list[int], tokens: int) -> tuple[list[int], float]:
    """`generate` of the model as transformers loads it."""
    ids = torch.tensor([prompt])
    started = time.perf_counter()
    with torch.inference_mode():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return found[0, ids.shape[1] :].tolist(), time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "drafter", "json"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--weights", default="full,bf16,int8,file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    engines, runs = {}, dict[tuple[str, str], Callable[[], tuple[list[int], float]]]()
    model = load_model(options.target, device="cpu").model
    for weights in options.weights.split(","):
        engine = engines[weights] = windfall.load(options.target, options.drafter, device="cpu", weights=weights)
        if not runs:
            runs["full", "transformers"] = partial(by_transformers, model, engine.encode(PROMPT), options.tokens)
        for policy in ("none", "auto"):
            runs[weights, policy] = partial(by_windfall, engine, policy, options.tokens)
    speeds: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    texts: dict[tuple[str, str], list[int]] = {}
    for round_ in range(options.rounds + 1):
        for key, run in runs.items():
            texts[key], seconds = run()
            if round_:  # the first is the warm-up
                speeds[key].append(len(texts[key]) / seconds)
        print(f"round {round_} of {options.rounds}", file=sys.stderr, flush=True)
    rows = {
        weights: {
            "formats": packed_formats(engine.target.model) or [str(engine.target.decoder.dtype).removeprefix("torch.")],
            "MB": round(megabytes(engine.target.model), 1),
            "tokens_per_second": {
                how: round(statistics.median(found), 2) for (kind, how), found in speeds.items() if kind == weights
            },
            "same_text_with_drafts": texts[weights, "auto"] == texts[weights, "none"],
            "text_of_transformers": texts[weights, "none"] == texts["full", "transformers"],
        }
        for weights, engine in engines.items()
    }
    result = {"what": "tokens per second by kind of weights, prefill included, in turns", "weights": rows}
    publish(result | {"rounds": options.rounds, "tokens": options.tokens}, options.json)


if __name__ == "__main__":
    main()
