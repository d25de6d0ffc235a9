"""Named benchmarks as plain data: a quick one, and the papers' tables as far as their methods are here.

The drafter is whatever `--drafter` names. At temperature above 0 the papers hide the noise from it: `--uncoupled`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from windfall.bench.papers.published import GT_COSTS
from windfall.core.errors import InputError

SPEC_BENCH = tuple(f"spec-bench-{part}" for part in ("mt", "translation", "summarization", "qa", "math", "rag"))
TALON = ("alpaca", "gsm8k", "humaneval", "mt-bench", "natural-questions", "cnn_dm")
LTD = ("mt-bench", "gsm8k", "alpaca", "natural-questions")
BEAM = "beam:depth=7:k=10:nodes=60"
SALF = ("mt-bench", "humaneval", "gsm8k", "alpaca", "cnn_dm")
DYNATREE = ("chain:depth=8", "chain:depth=5", "fixed-wikitext2", "dynatree-wikitext2", "dynatree-pg19")
LTD_BEAM = "beam:depth=9:k=10:nodes=60"  # EAGLE-3 as it runs there
LTD_METHODS = (
    LTD_BEAM, "ddd-ltd", "svip-ltd", "gammatune-ltd",
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
    memory: bool = False  # whether each method's peak memory is measured apart


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
        (BEAM, "optimal", "salf", "auto"),
        SALF,
        (0.0, 1.0),
        limit=80,
        max_new_tokens=1024,
    ),
    "salf-t2": Suite(
        "SALF & TALF, Table 2: three trees; for several heads --methods eagle/beam:depth=7:k=10:nodes=60,hass/beam…",
        (BEAM, "optimal", "salf"),
        SALF,
        limit=80,
        max_new_tokens=1024,
    ),
    "salf-t3": Suite(
        "SALF & TALF, Table 3: heads trained on wider trees: --methods hass/optimal,talf-1/optimal,talf-4/optimal",
        ("optimal",),
        SALF[:3],
        limit=80,
        max_new_tokens=1024,
    ),
    "salf-t4": Suite(
        "SALF & TALF, Table 4: the threshold",
        tuple(f"salf:th={tenth / 10:g}" for tenth in range(10)),
        SALF[:3],
        limit=80,
        max_new_tokens=1024,
    ),
    "dynatree-t1": Suite(
        "DynaTree, Tables 1 to 3: chains of 8 and 5, its tuned fixed tree, DynaTree; 10 texts of 200 tokens, 1500 new",
        (*DYNATREE, "auto"),
        ("wikitext-2", "pg-19"),
        limit=10,
        max_new_tokens=1500,
        ignore_eos=True,
    ),
    "dynatree-t4": Suite(
        "DynaTree, Table 4: what each part brings to a fixed tree of depth 5 and breadth 2",
        ("fixed-tree:depth=5:breadth=2", "dynatree:history=none", "dynatree:history=paper"),
        ("wikitext-2",),
        limit=10,
        max_new_tokens=1500,
        ignore_eos=True,
    ),
    "dynatree-t5": Suite(
        "DynaTree, Table 5: peak memory of a GPU, each method apart",
        DYNATREE,
        ("wikitext-2", "pg-19"),
        limit=10,
        max_new_tokens=1500,
        ignore_eos=True,
        memory=True,
    ),
    "gt-t1": Suite(
        "the GT principle, Table 1: Sequoia and GT's static trees, EAGLE-2 and GT's dynamic ones, on Spec-Bench",
        ("sequoia", "gt-static", "eagle-2", "gt", "auto"),
        SPEC_BENCH,
        repeats=5,
        limit=80,
        max_new_tokens=1024,
    ),
    "gt-t3": Suite(
        "the GT principle, Table 3: speed-up for a gigabyte of a GPU's memory, each method apart",
        ("eagle-2", "gt"),
        SPEC_BENCH,
        repeats=5,
        limit=80,
        max_new_tokens=1024,
        memory=True,
    ),
    "gt-t4": Suite(
        "the GT principle, Table 4: the threshold c",
        tuple(f"gt:c={c}" for c, _, _ in GT_COSTS),
        ("mt-bench",),
        limit=80,
        max_new_tokens=1024,
    ),
    "gt-t6": Suite(
        "the GT principle, Table 6: EAGLE's static tree and GT's, EAGLE-3's beam of 6 and GT's; no Medusa, no Hydra",
        ("eagle-1", "gt-static", "eagle-2", "gt"),
        SPEC_BENCH,
        repeats=5,
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
    "ltd-t2": Suite(
        "Learning to Draft, Table 2: size policies trained for length, time, throughput: --methods ltd:path=DIR,…",
        ("ltd",),
        LTD,
        limit=80,
        max_new_tokens=1024,
    ),
    "ltd-t4": Suite(
        "Learning to Draft, Table 4: LTD without a part: --methods +ltd:path=DIR,…",
        (LTD_BEAM, "ltd"),
        LTD,
        limit=80,
        max_new_tokens=1024,
    ),
    "ltd-t9": Suite(
        "Learning to Draft, Table 9: how much of the time the policies take",
        ("ltd",),
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


def join(names: Sequence[str]) -> Suite:
    """Several suites as one, with everything that any of them has; what their texts are must be the same."""
    found = [find(name) for name in names]
    for option in ("ignore_eos", "prompt_tokens"):
        if len({getattr(suite, option) for suite in found}) > 1:
            raise InputError(f"{names[0]} and the other suites differ in {option}; run those that differ by themselves")
    limits = [suite.limit for suite in found]
    return Suite(
        "; ".join(suite.about for suite in found),
        _union(suite.methods for suite in found),
        _union(suite.tasks for suite in found),
        tuple(sorted({heat for suite in found for heat in suite.temperatures})),
        max(suite.repeats for suite in found),
        None if None in limits else max(limit for limit in limits if limit is not None),
        max(suite.max_new_tokens for suite in found),
        found[0].prompt_tokens,
        found[0].ignore_eos,
        max(suite.warm_up for suite in found),
        any(suite.memory for suite in found),
    )


def _union(lists: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in lists for name in names))
