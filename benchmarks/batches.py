"""Modelled throughput of batches that share a budget, in the simulation of the tests: every method, load and mix.

    python benchmarks/batches.py [--mix MIX] [--requests 1,8,64] [--json FILE]

No model runs. Texts have known acceptance, and passes cost what two cost curves say: a small model that is bound by
launch latency, and an 8B model whose passes are flat up to 64 rows and linear beyond. Takes a few minutes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from provenance import publish

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from helpers.batches import CURVES, METHODS, MIXES, speeds

TOKENS, LEAST_TOKENS = 4000, 400  # of all requests, and of each at least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", choices=MIXES, help="only this mix of texts")
    parser.add_argument("--requests", default="1,4,8,32,64,128", help="numbers of requests")
    parser.add_argument("--json", help="write the result to this file")
    asked = parser.parse_args()
    found = []
    print("| costs | texts | requests |", " | ".join(METHODS), "| auto over the best |")
    print("|---" * (len(METHODS) + 4) + "|")
    for curve in CURVES:
        for mix in [asked.mix] if asked.mix else MIXES:
            for requests in map(int, asked.requests.split(",")):
                speed = speeds(curve, mix, requests, max(TOKENS // requests, LEAST_TOKENS))
                over_plain = {method: each / speed["plain"] for method, each in speed.items()}
                lead = over_plain["auto"] / max(each for method, each in over_plain.items() if method != "auto")
                found.append({"costs": curve, "texts": mix, "requests": requests, "over_plain": over_plain})
                cells = " | ".join(f"{each:.2f}" for each in over_plain.values())
                print(f"| {curve} | {mix} | {requests} | {cells} | {lead:.2f} |", flush=True)
    if asked.json:
        publish({"rows": found}, asked.json)


if __name__ == "__main__":
    main()
