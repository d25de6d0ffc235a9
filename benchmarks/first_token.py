"""Milliseconds from a call to its first tokens, by the length of the prompt and by policy.

python benchmarks/first_token.py [--lengths 40,80,…] [--policies none,beam,auto] [--rounds 9] [--json FILE]

A text begins with the end of its first cycle. Every prompt is different, so that no cache knows it. Medians.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

from provenance import publish
from same_text import long_prompt

import windfall
from windfall import registry
from windfall.render import console

LENGTHS = "40,80,160,320,640,1200,2000"
WARM_UP = 2  # calls of each length
TOKENS = 24  # of an answer: a few cycles, so that the next call does not wait for the end of a cycle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "drafter", "device", "dtype", "json"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--lengths", default=LENGTHS)
    parser.add_argument("--policies", default="none,beam,auto")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    lengths = [int(each) for each in options.lengths.split(",")]
    engine = windfall.load(options.target, options.drafter, device=options.device, dtype=options.dtype)
    log = long_prompt(engine, max(lengths) + options.rounds + WARM_UP)
    jobs = [(policy, length) for policy in options.policies.split(",") for length in lengths]
    found: dict[str, dict[str, float]] = {}
    with console.progress("Timing…") as progress:
        for place, (policy, length) in enumerate(jobs):
            engine.policy = registry.policy(policy)
            times = [first_token(engine, log[start : start + length]) for start in range(options.rounds + WARM_UP)]
            found.setdefault(policy, {})[str(length)] = round(median(times[WARM_UP:]), 3)
            progress((place + 1) / len(jobs))
    about = {"device": str(engine.target.device), "dtype": str(engine.target.decoder.dtype), "rounds": options.rounds}
    publish({"milliseconds": found, **about}, options.json)


def first_token(engine: Any, prompt: list[int]) -> float:
    """Milliseconds from the call to the end of the first cycle."""
    return float(engine.generate(prompt, max_new_tokens=TOKENS, eos=()).stats.ttft) * 1000


if __name__ == "__main__":
    main()
