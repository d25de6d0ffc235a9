"""Tokens per second while other programs use the CPU, by how long torch's threads spin.

python benchmarks/busy_cpu.py [--spins 0,2000,300000] [--busy 0,1] [--tokens 64] [--rounds 3] [--json FILE]

A thread that waits for another one spins GOMP_SPINCOUNT times before it sleeps; windfall's own setting is 2,000 on
x86, and libgomp's is 300,000. `--busy` are the numbers of other programs, which compute all the time. Every way runs in
a process of its own, in turn; results are the medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from provenance import publish

METHODS = ("none", "auto")
PROMPT = "Write a short story about a fox."
MEASURE = """
import json, sys, time
import windfall
from windfall import registry
engine, speeds = windfall.load(device="cpu"), {}
for method in json.loads(sys.argv[1]):
    engine.policy = registry.policy(method)
    for tokens in (8, int(sys.argv[2])):  # the first run does not count
        started = time.perf_counter()
        made = engine.generate(sys.argv[3], max_new_tokens=tokens, eos=())
    speeds[method] = len(made.token_ids) / (time.perf_counter() - started)
print(json.dumps(speeds))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spins", default="0,2000,300000", help="values of GOMP_SPINCOUNT")
    parser.add_argument("--busy", default="0,1", help="numbers of other programs")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    options = parser.parse_args()
    ways = [(int(busy), spins) for busy in options.busy.split(",") for spins in options.spins.split(",")]
    found: dict[tuple[int, str], list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for busy, spins in ways:
            with other_programs(busy):
                found[busy, spins].append(measure(spins, options.tokens))
    rows: list[dict[str, Any]] = [
        {"busy": busy, "spins": int(spins), **{name: median(run[name] for run in runs) for name in METHODS}}
        for (busy, spins), runs in found.items()
    ]
    publish({"rows": rows, "tokens": options.tokens, "rounds": options.rounds, "cores": os.cpu_count()}, options.json)


def measure(spins: str, tokens: int) -> dict[str, float]:
    """Tokens per second of each method."""
    command = [sys.executable, "-c", MEASURE, json.dumps(METHODS), str(tokens), PROMPT]
    environment = {**os.environ, "GOMP_SPINCOUNT": spins}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


@contextmanager
def other_programs(count: int) -> Iterator[None]:
    """This number of programs that compute all the time."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
