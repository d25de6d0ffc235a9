"""The loss of the bandit against its best arm, in the simulated worlds of its tests, over many seeds.

    python benchmarks/bandit.py [--json FILE]

Takes a few minutes. docs/learned.md says what the worlds are, and what the bound is.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from provenance import publish

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from helpers.bandit import known_worlds, random_worlds

PARTS = {"known": range(5000, 5300), "slow": range(5000, 6500), "fast": range(5000, 5300)}  # seeds
SHARE = 50  # seeds of a piece of work


def losses(part: str, seeds: range) -> list[tuple[float, float]]:
    """Loss and bound of each stretch; where another arm gets fast, of those after that."""
    if part == "known":
        return known_worlds(seeds)
    found = random_worlds(seeds, part)
    return found if part == "slow" else found[1::2]


def summary(found: list[tuple[float, float]]) -> dict[str, float]:
    every = [loss for loss, _ in found]
    return {
        "stretches": len(every),
        "mean": sum(every) / len(every),
        "over 3%": sum(loss > 0.03 for loss in every),
        "over the bound": sum(loss > most for loss, most in found),
        "worst": max(every),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    options = parser.parse_args()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        work = {
            part: [pool.submit(losses, part, seeds[at : at + SHARE]) for at in range(0, len(seeds), SHARE)]
            for part, seeds in PARTS.items()
        }
        table = {part: summary([row for piece in pieces for row in piece.result()]) for part, pieces in work.items()}
    publish({"what": "share below the best arm, by simulated worlds", "losses": table}, options.json)


if __name__ == "__main__":
    main()
