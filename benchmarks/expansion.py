"""One expansion step of a draft tree (TALON, Figure 15): EAGLE's two top-k against TALON's gate, no model involved.

python benchmarks/expansion.py [--device cpu] [--k 10] [--mu 0.03] [--json FILE]

Both turn the draft log-probabilities of k beam nodes, [k, V], into the next layer: (parent, token, score) triples.
Distributions are Zipf's, in a different order of tokens for every node; TALON's cut to its budget is left out.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from provenance import publish
from torch import Tensor

VOCABULARIES = {"32k": 32_000, "128k": 128_256, "152k": 151_936}  # Llama 2, Llama 3, Qwen
EXPONENTS = {0.7: "high entropy", 1.35: "natural language", 5.0: "deterministic"}
WARMUP, RUNS = 20, 100
Layer = tuple[Tensor, Tensor, Tensor]


def zipf(k: int, vocabulary: int, exponent: float, device: str) -> tuple[Tensor, Tensor]:
    """Draft log-probabilities [k, V] and the parents' path log-probabilities [k], which are Zipf's too."""
    generator = torch.Generator().manual_seed(0)
    logq = torch.log_softmax(-exponent * torch.arange(1, vocabulary + 1, dtype=torch.float64).log(), 0).float()
    shuffled = torch.stack([logq[torch.randperm(vocabulary, generator=generator)] for _ in range(k)])
    return shuffled.to(device), logq[:k].to(device)


def double_topk(logq: Tensor, score: Tensor, k: int) -> Layer:
    """EAGLE: the k best children of every node, then the k best of those k * k."""
    values, tokens = logq.topk(k, dim=-1)
    best, place = (values + score[:, None]).flatten().topk(k)
    return place // k, tokens.flatten()[place], best


def gate(logq: Tensor, score: Tensor, log_mu: float) -> Layer:
    """TALON: every candidate within mu of the best; a masked compare, no sort."""
    least = (logq.amax(-1) + score).max() + log_mu
    parents, tokens = torch.nonzero(logq >= (least - score)[:, None], as_tuple=True)
    return parents, tokens, logq[parents, tokens] + score[parents]


def seconds(steps: list[Callable[[], Layer]], device: str) -> list[list[float]]:
    """Seconds of each run of each step until its result is available; the steps take turns."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(WARMUP + RUNS):
        for step, own in zip(steps, times, strict=True):
            wait()
            started = time.perf_counter()
            step()
            wait()
            own.append(time.perf_counter() - started)
    return [own[WARMUP:] for own in times]


def measure(name: str, exponent: float, options: argparse.Namespace) -> dict[str, Any]:
    logq, score = zipf(options.k, VOCABULARIES[name], exponent, options.device)
    steps = [lambda: double_topk(logq, score, options.k), lambda: gate(logq, score, math.log(options.mu))]
    eagle, talon = seconds(steps, options.device)
    return {
        "vocabulary": name,
        "exponent": exponent,
        "microseconds_double_topk": 1e6 * statistics.median(eagle),
        "microseconds_gate": 1e6 * statistics.median(talon),
        "mean_microseconds_double_topk": 1e6 * statistics.mean(eagle),  # the paper reports means
        "mean_microseconds_gate": 1e6 * statistics.mean(talon),
        "ratio": statistics.median(eagle) / statistics.median(talon),
        "gate_passes": len(steps[1]()[0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--mu", type=float, default=0.03)
    parser.add_argument("--json")
    options = parser.parse_args()

    rows = []
    print(f"{'vocabulary':>10} {'Zipf':>5} {'top-k twice':>12} {'gate':>9} {'ratio':>6} {'passing':>8}   (median µs)")
    for name in VOCABULARIES:
        for exponent, kind in EXPONENTS.items():
            row = measure(name, exponent, options)
            rows.append(row)
            print(
                f"{name:>10} {exponent:>5} {row['microseconds_double_topk']:>12.1f} {row['microseconds_gate']:>9.1f} "
                f"{row['ratio']:>6.2f} {row['gate_passes']:>8}   {kind}"
            )
    result = {
        "what": "one expansion step: EAGLE's double top-k against TALON's gate (TALON, Figure 15)",
        "device": options.device,
        "settings": {"k": options.k, "mu": options.mu, "warmup": WARMUP, "runs": RUNS},
        "rows": rows,
    }
    publish(result, options.json)


if __name__ == "__main__":
    main()
