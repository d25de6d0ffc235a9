"""The papers' tables that are measured here too: which of our methods stands for which of theirs, and what is compared.

Numbers that are speed-ups and tokens per pass are in `papers`; those of other tables are here, under their exhibit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from windfall.bench import results
from windfall.bench.papers import published
from windfall.bench.reading import Record

ALL = "all tasks"
MEGABYTE = 2.0**20
Records = Sequence[Record]


class Figure(NamedTuple):
    """One number of a cell: from the records of a method and those of plain decoding on the same prompts."""

    name: str
    of: Callable[[Records, Records], float | None]
    digits: int = 2


class Line(NamedTuple):
    """A method as a table calls it, and the pattern of our labels that stand for it; `at` has those of single tasks."""

    name: str
    ours: str = ""
    at: Mapping[str, str] = {}


@dataclass(frozen=True)
class Exhibit:
    """A table: methods down, tasks across, one or more figures in each cell."""

    key: str
    suite: str  # that measures it
    paper: str
    table: str
    title: str
    tasks: tuple[str, ...]
    lines: tuple[Line, ...]
    figures: tuple[Figure, ...]
    temperatures: tuple[float, ...] = (0.0,)
    rows: str = ""  # published: `model | method | cells`, a cell's figures parted by slashes; none: those in `papers`
    by: tuple[int, ...] = (0,)  # the figures that rank the methods
    sweep: bool = False  # whether the methods are values of one option
    pooled: tuple[str, ...] = ()  # what all tasks are, in a table of a single column
    absent: str = ""  # what the paper has and this page has not
    remarks: tuple[str, ...] = field(default=())  # on how figures are meant here


# ---- figures


def _speedup(own: Records, plain: Records) -> float | None:
    found = results.speedup(own, plain)
    return None if found is None else found.value


def _milliseconds(value: float | None) -> float | None:
    return None if value is None else 1000 * value


def _change(own: Records, plain: Records) -> float | None:
    peak, other = results.peak_memory(own), results.peak_memory(plain)
    return 100 * (peak / other - 1) if peak and other else None


def _peak(unit: float) -> Callable[[Records, Records], float | None]:
    def of(own: Records, plain: Records) -> float | None:
        peak = results.peak_memory(own)
        return None if peak is None else peak / unit

    return of


def _accept(own: Records, plain: Records) -> float | None:
    share = results.dynatree_accept(own)
    return None if share is None else 100 * share


def _policy(own: Records, plain: Records) -> float | None:
    taken = [turn.split["policy"] for record in own for turn in record.turns if turn.split]
    return 1000 * sum(taken) / len(own) if taken else None


def _latency(own: Records, plain: Records) -> float | None:
    times = [record.seconds for record in own if record.seconds is not None]
    return fmean(times) if times else None


def _overhead(own: Records, plain: Records) -> float | None:
    shares = results.time_split(own)
    return None if shares is None else 100 * shares["policy"]


SPEEDUP = Figure("speed-up", _speedup)
TAU = Figure("tau", lambda own, plain: results.tau(own))
RATE = Figure("tokens/s", lambda own, plain: results.tokens_per_second(own), 1)
TTFT = Figure("ms to the first token", lambda own, plain: _milliseconds(results.ttft(own)))
TPOT = Figure("ms for each further one", lambda own, plain: _milliseconds(results.tpot(own)))
ACCEPT = Figure("accepted %", _accept, 1)
TAU_OF_TEXTS = Figure("mean of each text's tau", lambda own, plain: results.tau(own, "samples"))
ROUNDS = Figure("target passes of a text", lambda own, plain: fmean(record.cycles for record in own), 0)
PEAK = Figure("peak MB", _peak(MEGABYTE), 1)
CHANGE = Figure("change %", _change)
GIGABYTES = Figure("peak GB", _peak(results.GIGABYTE), 3)
RATIO = Figure("R: speed-up for a GB", results.memory_to_speed, 3)
POLICY = Figure("policy, ms of a conversation", _policy, 1)
LATENCY = Figure("seconds of it", _latency)
OVERHEAD = Figure("policy %", _overhead)


# ---- the tables

BOTH = (SPEEDUP, TAU)
SALF = ("MT-bench", "HumanEval", "GSM8K", "Alpaca", "CNN/DM")
GT = ("MT-bench", "translation", "CNN/DM", "QA", "GSM8K", "RAG")
TALON = ("Alpaca", "GSM8K", "HumanEval", "MT-bench", "QA", "CNN/DM")
LTD = ("MT-bench", "GSM8K", "Alpaca", "QA")
TEXTS = ("WikiText-2", "PG-19")
AUTO = Line("auto", "auto")
CHAIN = Line("linear", "chain:depth=8", {"PG-19": "chain:depth=5"})
FIXED = Line("fixed tree", "fixed-wikitext2")
DYNATREE = Line("DynaTree", "dynatree-wikitext2", {"PG-19": "dynatree-pg19"})
TALONS = (
    Line("EAGLE-3", "eagle-3"),
    Line("SD", "chain"),
    Line("Medusa"),
    Line("Hydra"),
    Line("OPT-Tree", "opt-tree"),
    Line("TALON", "talon"),
    AUTO,
)
LTDS = (
    Line("EAGLE-3", "beam:depth=9:*"),
    Line("DDD", "ddd-ltd"),
    Line("SVIP", "svip-ltd"),
    Line("GammaTune", "gammatune-ltd"),
    Line("C2T", "c2t*"),
    Line("DISCO", "disco"),
    Line("SpecDec++", "specdecpp"),
    Line("EAGLE-3 + grid search", "*.json"),
    Line("LTD", "ltd"),
    AUTO,
)
NO_HEADS = "There are no Medusa and Hydra heads for the embedded model."
POOLED = (
    "Our last tau is the mean of the tasks, and so is the paper's for the static trees of its Table 1; for all others "
    "the paper's is higher than that mean, as one over all cycles would be."
)
FAMILY = "Heads trained from one EAGLE head for equal times, each with its own loss."


def _family(name: str, policy: str) -> tuple[Line, ...]:
    heads = (("EAGLE", "eagle"), ("HASS", "hass"), ("TALF", "talf-4"))
    return tuple(Line(f"{name}, {loss} head", f"*{head}/{policy}") for loss, head in heads)


def _threshold_rows() -> str:
    cells = [cell for cell in published.published() if cell.table.startswith("Table 4, th=")]
    lines = []
    for table in dict.fromkeys(cell.table for cell in cells):
        own = [cell for cell in cells if cell.table == table]
        numbers = " ".join(f"{cell.speedup}/{cell.tau}" for cell in own)
        lines.append(f"{own[0].model} | {table.partition(', ')[2]} | {numbers}")
    return "\n".join(lines)


def _cost_rows() -> str:
    return "\n".join(f"Vicuna 7B | c={c} | {speed}/{length}" for c, speed, length in published.GT_COSTS)


def _wide_rows() -> str:
    return "\n".join(f"DeepSeek-R1-Distill-Llama-8B | {name} | {a} {b} {c}" for name, a, b, c in published.TALF_K)


EXHIBITS = (
    Exhibit(
        "salf-t1",
        "salf-t1",
        "SALF & TALF",
        "Table 1",
        "speed-up of the beam and of SALF",
        SALF,
        (
            Line("EAGLE-2", "beam:depth=7:*"),
            Line("HASS"),
            Line("optimal", "optimal"),
            Line("SALF & TALF", "salf"),
            AUTO,
        ),
        BOTH,
        (0.0, 1.0),
        absent="One head drafts for all methods here; in the paper HASS and TALF are heads of another training, too.",
    ),
    Exhibit(
        "salf-t2",
        "salf-t2",
        "SALF & TALF",
        "Table 2",
        "trees and losses",
        SALF,
        (
            *_family("beam", "beam:*"),
            *_family("optimal", "optimal"),
            *_family("SALF", "salf"),
        ),
        BOTH,
        by=(0, 1),
        remarks=(FAMILY,),
    ),
    Exhibit(
        "salf-t3",
        "salf-t3",
        "SALF & TALF",
        "Table 3",
        "TALF's k",
        SALF[:3],
        (
            Line("HASS (top-1)", "*hass/optimal"),
            Line("TALF (top-1)", "*talf-1/optimal"),
            Line("TALF (top-2)", "*talf-2/optimal"),
            Line("TALF (top-4)", "*talf-4/optimal"),
        ),
        (TAU,),
        rows=_wide_rows(),
        remarks=(FAMILY,),
    ),
    Exhibit(
        "salf-t4",
        "salf-t4",
        "SALF & TALF",
        "Table 4",
        "SALF's threshold",
        SALF[:3],
        tuple(Line(f"th={tenth / 10:.1f}", f"salf:th={tenth / 10:g}") for tenth in range(10)),
        BOTH,
        rows=_threshold_rows(),
        sweep=True,
    ),
    Exhibit(
        "dynatree-t1",
        "dynatree-t1",
        "DynaTree",
        "Table 1",
        "speed on texts to be continued",
        TEXTS,
        (Line("autoregressive", "none"), CHAIN, FIXED, DYNATREE, AUTO),
        (RATE, SPEEDUP),
        rows="""
Pythia 2.8B | autoregressive | 133.4/1.00 114.8/1.00
Pythia 2.8B | linear | 196.1/1.47 144.9/1.26
Pythia 2.8B | fixed tree | 200.7/1.50 185.5/1.62
Pythia 2.8B | DynaTree | 219.5/1.64 194.9/1.70
""",
        by=(1,),
    ),
    Exhibit(
        "dynatree-t2",
        "dynatree-t1",
        "DynaTree",
        "Table 2",
        "latency",
        TEXTS,
        (Line("autoregressive", "none"), CHAIN, FIXED, DYNATREE, AUTO),
        (TTFT, TPOT),
        rows="""
Pythia 2.8B | autoregressive | 18.9/7.48 21.8/9.00
Pythia 2.8B | linear | 14.6/5.32 11.1/7.17
Pythia 2.8B | fixed tree | 14.6/5.30 9.7/5.55
Pythia 2.8B | DynaTree | 14.4/4.59 9.6/5.30
""",
        by=(),
    ),
    Exhibit(
        "dynatree-t3",
        "dynatree-t1",
        "DynaTree",
        "Table 3",
        "how well verifying goes",
        TEXTS,
        (CHAIN, FIXED, DYNATREE, AUTO),
        (ACCEPT, TAU, TAU_OF_TEXTS, ROUNDS),
        rows="""
Pythia 2.8B | linear | 88.2/6.82/7.05/220 92.5/4.56/4.63/329
Pythia 2.8B | fixed tree | 71.0/6.79/7.10/221 64.3/6.20/6.43/242
Pythia 2.8B | DynaTree | 102.2/7.08/7.15/212 92.2/6.17/6.45/243
""",
        by=(1,),
        remarks=(
            "Accepted: the mean of each text's tau, which the paper calls the committed path, over the configured "
            "depth + 2; for chains over their length.",
        ),
    ),
    Exhibit(
        "dynatree-t4",
        "dynatree-t4",
        "DynaTree",
        "Table 4",
        "what each part brings",
        ("WikiText-2",),
        (
            Line("fixed tree, depth 5, breadth 2", "fixed-tree:depth=5:breadth=2"),
            Line("+ dynamic breadth and depth", "dynatree:history=none"),
            Line("+ history", "dynatree:history=paper"),
        ),
        (RATE, SPEEDUP),
        rows="\n".join(f"Pythia 2.8B | {name} | {rate}/{gain}" for name, rate, gain in published.DYNATREE_ABLATION),
        by=(1,),
    ),
    Exhibit(
        "dynatree-t5",
        "dynatree-t5",
        "DynaTree",
        "Table 5",
        "peak memory",
        TEXTS,
        (Line("autoregressive", "none"), CHAIN, FIXED, DYNATREE),
        (PEAK, CHANGE),
        rows="""
Pythia 2.8B | autoregressive | 6110.0/0.00 6156.5/0.00
Pythia 2.8B | linear | 6315.3/3.36 6363.0/3.35
Pythia 2.8B | fixed tree | 6316.9/3.39 6354.6/3.22
Pythia 2.8B | DynaTree | 6316.4/3.38 6355.0/3.22
""",
        by=(),
        remarks=(
            "Each method in an engine of its own, on the longest prompt, weights included. The paper gives the change "
            "of the mean; here it is worked out for each column.",
        ),
    ),
    Exhibit(
        "gt-t1",
        "gt-t1",
        "GT",
        "Table 1",
        "static and dynamic trees on Spec-Bench",
        GT,
        (
            Line("Sequoia", "sequoia"),
            Line("GT, static", "gt-static"),
            Line("EAGLE-2", "eagle-2"),
            Line("GT, dynamic", "gt"),
            AUTO,
        ),
        BOTH,
        absent="The paper's static trees are drafted by Vicuna 68M, here by the head that drafts all others.",
        remarks=(POOLED,),
    ),
    Exhibit(
        "gt-t3",
        "gt-t3",
        "GT",
        "Table 3",
        "memory",
        (ALL,),
        (Line("vanilla", "none"), Line("EAGLE-2", "eagle-2"), Line("GT, dynamic", "gt")),
        (SPEEDUP, GIGABYTES, RATIO),
        rows="""
Vicuna 7B | vanilla | 1.00/14.66773/0.06817
Vicuna 7B | EAGLE-2 | 2.40/16.42108/0.14615
Vicuna 7B | GT, dynamic | 2.54/16.42126/0.15467
Vicuna 13B | vanilla | 1.00/27.56194/0.03628
Vicuna 13B | EAGLE-2 | 2.56/29.61629/0.08643
Vicuna 13B | GT, dynamic | 2.67/29.61633/0.09015
Vicuna 33B | vanilla | 1.00/67.46208/0.01482
Vicuna 33B | EAGLE-2 | 2.61/72.33713/0.03608
Vicuna 33B | GT, dynamic | 2.68/72.33717/0.03704
""",
        by=(2,),
        pooled=GT,
        remarks=("Each method in an engine of its own, on the longest prompt, weights included.",),
    ),
    Exhibit(
        "gt-t4",
        "gt-t4",
        "GT",
        "Table 4",
        "the threshold c",
        ("MT-bench",),
        tuple(Line(f"c={c}", f"gt:c={c}") for c, _, _ in published.GT_COSTS),
        (RATE, TAU),
        rows=_cost_rows(),
        sweep=True,
    ),
    Exhibit(
        "gt-t6",
        "gt-t6",
        "GT",
        "Table 6",
        "other trees",
        GT,
        (
            Line("EAGLE", "eagle-1"),
            Line("EAGLE + GT", "gt-static"),
            Line("Medusa"),
            Line("Medusa + GT"),
            Line("Hydra"),
            Line("Hydra + GT"),
            Line("EAGLE-3", "eagle-2"),
            Line("EAGLE-3 + GT", "gt"),
        ),
        BOTH,
        rows="""
Vicuna 7B | EAGLE | 2.63/3.84 1.81/2.83 2.24/3.31 2.19/3.13 2.33/3.81 1.90/3.20 2.18/3.55
Vicuna 7B | EAGLE + GT | 2.97/4.42 1.87/2.96 2.33/3.58 2.24/3.38 2.67/4.44 2.06/3.65 2.36/4.01
Vicuna 13B | EAGLE | 2.59/3.89 2.03/2.94 2.43/3.44 1.96/2.94 2.72/3.93 2.10/3.54 2.31/3.64
Vicuna 13B | EAGLE + GT | 2.91/4.47 2.13/3.07 2.40/3.76 2.01/3.12 3.05/4.54 2.44/3.95 2.50/4.09
Vicuna 33B | EAGLE | 2.64/3.52 1.90/2.80 2.38/3.25 2.08/2.82 3.01/3.88 1.89/3.05 2.32/3.38
Vicuna 33B | EAGLE + GT | 2.87/3.93 1.98/2.93 2.37/3.52 2.08/2.96 3.10/4.45 2.15/3.29 2.43/3.72
Vicuna 7B | Medusa | 1.86/2.51 1.53/2.12 1.55/2.01 1.49/2.04 1.71/2.52 1.28/2.08 1.57/2.31
Vicuna 7B | Medusa + GT | 2.04/2.55 1.71/2.13 1.65/2.02 1.62/2.06 1.57/2.51 1.24/2.11 1.64/2.33
Vicuna 13B | Medusa | 1.42/2.58 1.23/2.19 1.02/2.09 1.21/2.10 1.46/2.59 1.01/2.12 1.23/2.39
Vicuna 13B | Medusa + GT | 1.50/2.61 1.29/2.21 1.10/2.10 1.27/2.12 1.55/2.62 1.08/2.13 1.30/2.41
Vicuna 7B | Hydra | 2.45/3.59 1.97/2.79 1.92/2.70 1.91/2.91 2.30/3.66 1.64/2.90 2.04/3.26
Vicuna 7B | Hydra + GT | 2.57/3.69 2.04/2.84 1.96/2.74 1.99/2.95 2.41/3.75 1.68/2.93 2.12/3.33
Vicuna 13B | Hydra | 1.82/3.65 1.45/2.81 1.26/2.82 1.50/2.88 1.89/3.70 1.28/3.08 1.54/3.35
Vicuna 13B | Hydra + GT | 1.90/3.72 1.50/2.86 1.33/2.86 1.56/2.91 1.95/3.79 1.33/3.23 1.60/3.42
Vicuna 13B | EAGLE-3 | 3.49/5.98 2.38/4.30 3.26/5.76 2.91/4.82 3.40/5.78 2.80/5.69 3.04/5.69
Vicuna 13B | EAGLE-3 + GT | 3.76/8.38 2.42/4.40 3.45/7.88 2.94/5.31 3.44/7.75 2.88/7.11 3.15/7.48
""",
        absent=f"{NO_HEADS} EAGLE's static tree and GT's are drafted by the same EAGLE-3 head as all others.",
        remarks=(POOLED,),
    ),
    Exhibit("talon-t1", "talon-t1", "TALON", "Table 1", "six tasks, greedy", TALON, TALONS, BOTH, absent=NO_HEADS),
    Exhibit(
        "talon-t3", "talon-t3", "TALON", "Table 3", "the same at temperature 1", TALON, TALONS, BOTH, (1.0,),
        absent=NO_HEADS,
    ),
    Exhibit("ltd-t1", "ltd-t1", "LTD", "Table 1", "LTD and its rivals, greedy", LTD, LTDS, BOTH),
    Exhibit(
        "ltd-t2",
        "ltd-t2",
        "LTD",
        "Table 2",
        "what the size policy is rewarded for",
        LTD,
        (
            Line("acceptance length", "ltd:path=*length"),
            Line("time", "ltd:path=*time"),
            Line("throughput", "ltd:path=*throughput"),
        ),
        BOTH,
        rows="""
Vicuna 13B | acceptance length | 3.77/7.70 3.81/7.20 3.71/7.05 3.06/5.61 3.59/6.89
Vicuna 13B | time | 3.89/6.49 3.54/5.80 3.48/5.79 2.87/4.54 3.45/5.66
Vicuna 13B | throughput | 4.40/7.68 4.43/7.10 4.23/7.00 3.47/5.56 4.13/6.84
""",
    ),
    Exhibit(
        "ltd-t4",
        "ltd-t4",
        "LTD",
        "Table 4",
        "LTD without a part",
        LTD,
        (
            Line("EAGLE-3", "beam:depth=9:*"),
            Line("LTD - depth policy", "ltd:path=*throughput"),
            Line("LTD - size policy", "ltd:path=*depth"),
            Line("LTD - iterating", "ltd:path=*iter0"),
            Line("LTD", "ltd"),
        ),
        BOTH,
        rows="""
Vicuna 13B | EAGLE-3 | 4.48/7.22 4.36/6.58 4.16/6.47 3.43/5.12 4.11/6.35
Vicuna 13B | LTD - depth policy | 4.40/7.68 4.43/7.10 4.23/7.00 3.47/5.56 4.13/6.84
Vicuna 13B | LTD - size policy | 4.77/7.75 4.46/6.82 4.36/6.59 3.55/5.12 4.29/6.57
Vicuna 13B | LTD - iterating | 4.54/8.29 4.48/7.41 4.28/7.08 3.51/5.45 4.20/7.06
Vicuna 13B | LTD | 4.64/8.24 4.59/7.38 4.40/7.01 3.66/5.37 4.32/7.00
""",
    ),
    Exhibit("ltd-t5", "ltd-t5", "LTD", "Table 5", "Table 1 at temperature 1", LTD, LTDS, BOTH, (1.0,)),
    Exhibit(
        "ltd-t9",
        "ltd-t9",
        "LTD",
        "Table 9",
        "what the policies' own thinking takes",
        LTD,
        (Line("LTD", "ltd"), Line("DISCO", "disco"), Line("SpecDec++", "specdecpp"), Line("C2T", "c2t*")),
        (POLICY, LATENCY, OVERHEAD),
        rows="""
Llama-3.1-8B-Instruct | LTD | 62.2/4.48/1.39 17.73/1.24/1.42 18.62/1.28/1.45 16.56/1.27/1.30 28.76/2.07/1.39
Vicuna 13B | LTD | 41.6/3.59/1.16 17.56/1.37/1.28 14.53/1.16/1.25 13.29/1.10/1.20 21.76/1.81/1.22
""",
        by=(),
        remarks=("The paper's two policies together. Here their time holds the choice of the nodes, too.",),
    ),
)  # fmt: skip
