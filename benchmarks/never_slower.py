"""Is `auto` ever slower than plain decoding? Short generations of both, taking turns, on prompts of three kinds.

    python benchmarks/never_slower.py [--rounds 16] [--tokens 64] [--policy auto] [--drafter …] [--json FILE]

The result is the median of the ratios of neighbouring runs, because the speed of a machine drifts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

from provenance import publish

import windfall
from windfall import registry
from windfall.engine import loading

PROMPTS = {
    "code": ("Write a Python class Stack with push, pop and peek, each with a docstring, then show its use.", {}),
    "story": ("Tell me a story about a fox who finds a lantern in the forest.", {}),
    "random words": (
        "apple zinc marmot quilt seven turbine velvet ogre plinth cactus harbour nimbus",
        {"raw": True, "temperature": 1.2, "seed": 0},
    ),
    "repetitive": ("Count from one to fifty in words, one per line.", {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "drafter", "device", "dtype", "weights", "json"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    engine = windfall.load(
        options.target, options.drafter, options.policy, options.device, options.dtype, weights=options.weights
    )
    chosen, plain, rows = loading.as_policy(options.policy), registry.policy("none"), {}
    for name, (prompt, sampling) in PROMPTS.items():
        ratios, tau, share, same = [], [], [], True
        plain_seconds, chosen_seconds = [], []
        for round_ in range(options.rounds + 1):
            runs = {}
            for kind in (("plain", "chosen"), ("chosen", "plain"))[round_ % 2]:
                engine.policy = plain if kind == "plain" else chosen
                runs[kind] = engine.generate(prompt, max_new_tokens=options.tokens, **sampling)
            same = same and runs["plain"].token_ids == runs["chosen"].token_ids
            if round_:  # the first is the warm-up
                before, after = runs["plain"].stats, runs["chosen"].stats
                ratios.append(before.seconds / after.seconds)
                plain_seconds.append(before.seconds)
                chosen_seconds.append(after.seconds)
                tau.append(after.tau)
                share.append(after.split.policy / after.seconds)
        quarters = statistics.quantiles(ratios, n=4)
        rows[name] = {
            "speedup": statistics.median(ratios),
            "quartiles": [quarters[0], quarters[2]],
            "speedup_of_totals": sum(plain_seconds) / sum(chosen_seconds),
            "tau": statistics.mean(tau),
            "policy_share": statistics.median(share),
            "same_tokens": same,
        }
        print(name, json.dumps(rows[name]), file=sys.stderr, flush=True)
    result = {
        "what": f"{options.policy} against plain decoding, paired runs taking turns",
        "target": engine.target.name,
        "drafter": options.drafter or loading.default_drafter(engine.target),
        "dtype": str(engine.target.decoder.dtype),
        "device": str(engine.target.device),
        "exact_passes": engine.exact_passes,
        "rounds": options.rounds,
        "tokens": options.tokens,
        "prompts": rows,
    }
    publish(result, options.json)


if __name__ == "__main__":
    main()
