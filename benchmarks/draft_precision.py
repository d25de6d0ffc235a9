"""The cost of a draft pass of the embedded model's head on this CPU, by nodes and by the precision of its weights.

    python benchmarks/draft_precision.py [--rounds 5] [--seconds 3] [--json FILE]

Both precisions take turns, and the fastest round of each size counts, so that other load affects both alike.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

from provenance import publish

from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.engine.engine import Engine
from windfall.engine.loading import as_policy, as_target
from windfall.engine.profiling import measure

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json")
    options = parser.parse_args()
    target = as_target(None, device="cpu")
    drafters = {name: FeatureHeadDrafter(weights=name) for name in ("full", "int8")}
    engines = {name: Engine(target, drafter, as_policy("none")) for name, drafter in drafters.items()}
    taken: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in engines}
    for _ in range(options.rounds):
        for name, engine in engines.items():
            drafts = measure(engine, widths=WIDTHS, rows=(1,), lengths=(64,), seconds=options.seconds).costs.drafts
            for width, seconds in zip(drafts.sizes, drafts.seconds, strict=True):
                taken[name][width].append(1e3 * seconds)
    table = {
        name: {str(width): round(min(every), 3) for width, every in sorted(own.items())} for name, own in taken.items()
    }
    publish({"what": "milliseconds of a draft pass, by nodes", "ms": table}, options.json)


if __name__ == "__main__":
    main()
