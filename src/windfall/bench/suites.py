"""Named benchmarks as plain data: a quick one, and the papers' tables as far as their methods are here.

The drafter is whatever `--drafter` names. At temperature above 0 the papers hide the noise from it: `--uncoupled`.
"""

from __future__ import annotations

from dataclasses import dataclass

from windfall.errors import InputError

SPEC_BENCH = tuple(f"spec-bench-{part}" for part in ("mt", "translation", "summarization", "qa", "math", "rag"))
TALON = ("alpaca", "gsm8k", "humaneval", "mt-bench", "natural-questions", "cnn_dm")
LTD = ("mt-bench", "gsm8k", "alpaca", "natural-questions")
LTD_METHODS = (
    "beam:depth=9:k=10:nodes=60", "ddd-ltd", "svip-ltd", "gammatune-ltd",
    "disco", "specdecpp", "c2t:depth=9", "ltd", "auto",
)  # fmt: skip


@dataclass(frozen=True)
class Suite:
    """What `windfall bench run --suite` runs; options given beside it come first."""

    about: str
    methods: tuple[str, ...]
    tasks: tuple[str, ...]
    temperatures: tuple[float, ...] = (0.0,)
    repeats: int = 3
    limit: int | None = None
    max_new_tokens: int = 128
    prompt_tokens: int = 200
    ignore_eos: bool = False
    warm_up: int = 2


SUITES = {
    "smoke": Suite(
        "one prompt of each kind, a few tokens, greedy and sampled: does everything work, and is every text the same?",
        ("chain", "beam:depth=3:k=3:nodes=10", "auto"),
        ("builtin",),
        (0.0, 1.0),
        repeats=1,
        limit=6,
        max_new_tokens=16,
        warm_up=1,
    ),
    "salf-t1": Suite(
        "SALF & TALF, Table 1: the beam of depth 7 and SALF; its rows differ in how the drafter was trained too",
        ("beam:depth=7:k=10:nodes=60", "optimal", "salf", "auto"),
        ("mt-bench", "humaneval", "gsm8k", "alpaca", "cnn_dm"),
        (0.0, 1.0),
        limit=80,
        max_new_tokens=1024,
    ),
    "salf-t4": Suite(
        "SALF & TALF, Table 4: the threshold",
        tuple(f"salf:th={tenth / 10:g}" for tenth in range(10)),
        ("mt-bench", "humaneval", "gsm8k"),
        limit=80,
        max_new_tokens=1024,
    ),
    "dynatree-t1": Suite(
        "DynaTree, Table 1: chains of 8 and 5, its tuned fixed tree, DynaTree; 10 prompts of 200 tokens, 1500 new ones",
        ("chain:depth=8", "chain:depth=5", "fixed-wikitext2", "dynatree-wikitext2", "dynatree-pg19", "auto"),
        ("wikitext-2", "pg-19"),
        limit=10,
        max_new_tokens=1500,
        ignore_eos=True,
    ),
    "gt-t1": Suite(
        "the GT principle, Table 1: Sequoia and GT's static trees, EAGLE-2 and GT's dynamic ones, on Spec-Bench",
        ("sequoia", "gt-static", "eagle-2", "gt", "auto"),
        SPEC_BENCH,
        repeats=5,
        limit=80,
        max_new_tokens=1024,
    ),
    "gt-t4": Suite(
        "the GT principle, Table 4: the threshold c",
        tuple(f"gt:c={c}" for c in (0.01, 0.05, 0.1, 0.109, 0.11, 0.111, 0.12, 0.15, 0.2, 0.3, 0.4)),
        SPEC_BENCH,
        limit=80,
        max_new_tokens=1024,
    ),
    "talon-t1": Suite(
        "TALON, Table 1: greedy; without Medusa and Hydra, which are drafters",
        ("chain", "eagle-3", "opt-tree", "talon", "auto"),
        TALON,
        limit=80,
        max_new_tokens=1024,
    ),
    "talon-t3": Suite(
        "TALON, Table 3: the same at temperature 1",
        ("chain", "eagle-3", "opt-tree", "talon", "auto"),
        TALON,
        (1.0,),
        limit=80,
        max_new_tokens=1024,
    ),
    "ltd-t1": Suite(
        "Learning to Draft, Table 1: EAGLE-3 as it runs there, its rivals on that beam, LTD; greedy",
        LTD_METHODS,
        LTD,
        limit=80,
        max_new_tokens=1024,
    ),
    "ltd-t5": Suite(
        "Learning to Draft, Table 5: the same at temperature 1",
        LTD_METHODS,
        LTD,
        (1.0,),
        limit=80,
        max_new_tokens=1024,
    ),
}


def find(name: str) -> Suite:
    if name not in SUITES:
        raise InputError(f"there is no suite '{name}'; choose from {', '.join(SUITES)}")
    return SUITES[name]
