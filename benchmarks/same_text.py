"""Same seed, same text: every policy against plain decoding over prompts of many kinds, some near the context's end.

python benchmarks/same_text.py [--device …] [--dtype float32] [--policies auto,beam,…] [--tokens 48] [--json FILE]

The exit code is 1 if a text differs.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from provenance import publish

import windfall
from windfall import registry
from windfall.render import console

POLICIES = "auto,beam,salf,talon,dynatree,gt,ltd"
TEMPERATURES = (0.0, 0.9)
SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition_penalty 1.1": {"repetition_penalty": 1.1},
    "top_p 0.9": {"top_p": 0.9},
}
PROMPTS = {
    "code": "Write a Python function that merges two sorted lists without using sort().",
    "code to continue": "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot =",
    "list": "List fifteen things to pack for a week of hiking, one a line, with a dash before each.",
    "German": "Erkläre in drei Sätzen, warum der Himmel blau ist.",
    "French and Spanish": "Traduis en espagnol : « Le train part à huit heures et quart, mais il a du retard. »",
    "Chinese and Japanese": "请用三句话介绍一下长城。次に、同じことを日本語で書いてください。",
    "emoji": "Retell 🐢🏁🐇😴🏆 as a story in five sentences, and put an emoji 🙂 after each of them.",
    "maths": "Solve 3x² − 12x + 9 = 0 step by step, and check both roots.",
    "JSON": 'Return a JSON object with the keys "name", "age" and "languages" for a fictional programmer. JSON only.',
    "table": "Make a Markdown table of the planets with their diameter in kilometres and their number of moons.",
}
LINE = "Entry {n}: on day {n} the keeper noted wind {a}, waves {b} and {c} ships, and trimmed the lamp twice.\n"


def long_prompt(engine: windfall.Engine, tokens: int) -> list[int]:
    """A log of this many tokens."""
    lines = [LINE.format(n=n, a=n * 7 % 12, b=n * 5 % 9, c=n * 3 % 17) for n in range(1, tokens // 8)]
    return engine.tokenize("".join(lines), raw=True)[:tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default=POLICIES)
    for name in ("target", "drafter", "device", "json"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--context", type=int, help="take the context to end here")
    options = parser.parse_args()

    engine = windfall.load(options.target, options.drafter, device=options.device, dtype=options.dtype)
    if options.context:
        engine.target.decoder.config.max_position_embeddings = options.context
    prompts: dict[str, Any] = {
        **PROMPTS,
        "across 2,048 tokens": long_prompt(engine, 2048 - options.tokens // 2),
        "to the context's end": long_prompt(engine, (options.context or engine.target.context) - options.tokens // 2),
    }
    policies = options.policies.split(",")
    jobs = [(t, s, p) for t in TEMPERATURES for s in SAMPLING for p in prompts]
    texts, different = 0, []
    with console.progress("Comparing texts…") as progress:
        for place, (temperature, sampling, name) in enumerate(jobs):
            how = {"temperature": temperature, **SAMPLING[sampling], "max_new_tokens": options.tokens, "seed": place}
            plain: list[int] = []
            for policy in ("none", *policies):
                engine.policy = registry.policy(policy)
                found = engine.generate(prompts[name], **how).token_ids
                if policy == "none":
                    plain = found
                elif found != plain:
                    different.append(f"{policy}, {name}, temperature {temperature}, {sampling}")
                texts += policy != "none"
            progress((place + 1) / len(jobs))
    publish(
        {
            "texts": texts,
            "different": different,
            "policies": policies,
            "temperatures": TEMPERATURES,
            "sampling": list(SAMPLING),
            "prompts": {name: len(engine.encode(prompt)) for name, prompt in prompts.items()},
            "context": engine.target.context,
            "device": str(engine.target.device),
            "exact_passes": engine.exact_passes,
            "dtype": str(engine.target.decoder.dtype),
            "tokens": options.tokens,
        },
        options.json,
    )
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
