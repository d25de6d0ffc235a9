"""Tokens per target pass if the drafter sees the sampling noise (coupled) and if not, on the same prompts and seeds.

    python benchmarks/coupling.py --prompts FILE.jsonl [--drafter self] [--drafter-set skip=3,5,17]
        [--policies beam,auto] [--temperatures 0.7,1.0] [--count 16] [--tokens 128]
        [--json FILE] [--device …] [--dtype …]

Prompts are JSONL lines with "turns" (the first is used) or "text". All prompts are decoded together.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from provenance import publish

from windfall.core.options import split_settings
from windfall.engine import loading
from windfall.engine.engine import Engine, Generation


def read_prompts(files: list[str], count: int) -> list[str]:
    prompts = []
    for file in files:
        lines = Path(file).read_text("utf-8").splitlines()[:count]
        prompts += [row["turns"][0] if "turns" in row else row["text"] for row in map(json.loads, lines)]
    return prompts


def tau(generations: list[Generation]) -> float:
    return sum(g.stats.tokens for g in generations) / sum(g.stats.cycles for g in generations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "device", "dtype", "json"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--drafter", default="self")
    parser.add_argument("--drafter-set", nargs="*", default=[])
    parser.add_argument("--policies", default="beam,auto")
    parser.add_argument("--temperatures", default="0.7,1.0")
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()

    target = loading.as_target(options.target, device=options.device, dtype=options.dtype)
    prompts, rows = read_prompts(options.prompts, options.count), []
    texts: dict[float, list[list[int]]] = {}
    temperatures = [0.0, *map(float, options.temperatures.split(","))]
    for policy in options.policies.split(","):
        for temperature in temperatures:
            row: dict[str, Any] = {"policy": policy, "temperature": temperature}
            for coupled in (False, True) if temperature else (True,):
                drafter = loading.as_drafter(options.drafter, **split_settings(options.drafter_set))
                engine = Engine(target, drafter, loading.as_policy(policy), coupled)
                made = engine.generate_batch(prompts, max_new_tokens=options.tokens, temperature=temperature, seed=1)
                ids = [generation.token_ids for generation in made]
                wanted = texts.setdefault(temperature, ids)
                key = ("coupled" if coupled else "uncoupled") if temperature else "greedy"
                row[key] = tau(made)
                row[f"kappa_{key}"] = next(iter(engine.calibrators.values())).kappa
                row["texts_equal"] = row.get("texts_equal", 0) + sum(a == b for a, b in zip(ids, wanted, strict=True))
                row["texts"] = row.get("texts", 0) + len(ids)
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    result = {
        "what": "tokens per target pass, drafter with and without the noise of the draws",
        "target": target.name,
        "drafter": [options.drafter, *options.drafter_set],
        "prompts": len(prompts),
        "tokens": options.tokens,
        "dtype": str(target.decoder.dtype),
        "device": str(target.device),
        "rows": rows,
    }
    publish(result, options.json)


if __name__ == "__main__":
    main()
