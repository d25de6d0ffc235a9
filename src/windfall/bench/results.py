"""The papers' metrics, with their variants, as pure functions over the records of a run."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windfall.bench.reading import ALL, Record, Run, Turn
from windfall.core.stats import Estimate, first_difference

PLAIN = "none"  # the method that is plain decoding
BOOTSTRAP_RESAMPLES = 2000
BYTES_PER_GB = 2.0**30
PARTS = ("draft", "verify", "policy", "other")

Floats = NDArray[np.float64]
Place = tuple[int, int]  # depth and rank in a tree


# ---- tokens per pass


def tau(records: Sequence[Record], variant: str = "pooled") -> float:
    """Tokens per target pass.

    `pooled`: over all cycles; `samples`: mean over conversations; `cycles`: mean of accepted + 1, which does not count
    that the last cycle is cut at the end of the text.
    """
    if not records:
        return math.nan
    if variant == "samples":
        return fmean(record.tau for record in records)
    if variant == "cycles":
        return fmean(n + 1 for record in records for turn in record.turns for n in turn.accepted)
    assert variant == "pooled", variant
    return sum(record.tokens for record in records) / sum(record.cycles for record in records)


def delta(records: Sequence[Record]) -> float:
    """Draft passes per target pass."""
    return _per_cycle(records, "passes")


def mean_rows(records: Sequence[Record]) -> float:
    """Verified rows per target pass, including the root."""
    return _per_cycle(records, "rows")


def tau_and_delta(records: Sequence[Record]) -> list[tuple[float, float]]:
    """(tau, delta) of every prompt, its repeats together."""
    prompts: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        prompts[record.task, record.id].append(record)
    return [(tau(own), delta(own)) for own in prompts.values()]


def accepted_lengths(records: Sequence[Record]) -> dict[tuple[str, str], list[int]]:
    """The number of tokens of every cycle, by (task, id)."""
    lengths: dict[tuple[str, str], list[int]] = defaultdict(list)
    for record in records:
        lengths[record.task, record.id] += [n for turn in record.turns for n in turn.committed]
    return dict(lengths)


def length_histogram(records: Sequence[Record]) -> dict[int, int]:
    """The number of cycles by the number of tokens they committed."""
    counts = Counter(n for lengths in accepted_lengths(records).values() for n in lengths)
    return dict(sorted(counts.items()))


# ---- acceptance


def acceptance_by_position(records: Sequence[Record]) -> dict[int, float]:
    """(i) The share of the cycles with a judged node at depth i that accepted one there."""
    tried: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for turn in _turns(records):
        tried.update(dict(enumerate(turn.tried, 1)))
        for nodes in turn.nodes:
            accepted[nodes.depth] += nodes.accepted
    return {depth: accepted[depth] / count for depth, count in sorted(tried.items()) if count}


def acceptance_per_node(records: Sequence[Record], of: str = "verified") -> float:
    """(ii) Accepted drafted nodes over all `verified` nodes, or over all `drafted` nodes."""
    accepted = sum(sum(turn.accepted) for turn in _turns(records))
    nodes = sum(sum(turn.drafted) if of == "drafted" else sum(turn.rows) - turn.cycles for turn in _turns(records))
    return accepted / nodes if nodes else math.nan


def dynatree_accept(records: Sequence[Record]) -> float | None:
    """(iii) DynaTree's rate: mean of each text's tau over the configured depth + 2, for chains over their length."""
    depths = {"chain": ("depth", 0), "fixed-tree": ("depth", 2), "dynatree": ("base_depth", 2)}
    if not records or records[0].policy not in depths:
        return None
    option, more = depths[records[0].policy]
    return tau(records, "samples") / (int(records[0].settings[option]) + more)


def rank_share(records: Sequence[Record]) -> dict[int, float]:
    """The share of the verified nodes with each sibling rank."""
    return _shares({rank: counts[0] for rank, counts in _by_rank(records).items()})


def acceptance_by_rank(records: Sequence[Record]) -> dict[int, float]:
    """The share of the judged nodes with each sibling rank that was accepted."""
    return {rank: accepted / judged for rank, (_, judged, accepted) in _by_rank(records).items() if judged}


def heat_map(records: Sequence[Record], by: str = "rank", what: str = "accepted") -> dict[Place, int]:
    """Nodes by (depth, rank): `by` is rank or layer_rank, `what` is accepted, judged or verified."""
    counts: Counter[Place] = Counter()
    for turn in _turns(records):
        for nodes in turn.nodes:
            counts[nodes.depth, getattr(nodes, by)] += getattr(nodes, what)
    return dict(sorted(counts.items()))


# ---- time


def tokens_per_second(records: Sequence[Record]) -> float | None:
    """All tokens over all seconds, including the prefill."""
    seconds = _seconds(records)
    return None if not seconds else sum(record.tokens for record in records) / seconds


def speedup(
    records: Sequence[Record], plain: Sequence[Record], variant: str = "totals", seed: int = 0
) -> Estimate | None:
    """The speed-up over plain decoding on the same prompts, with a bootstrap interval over the prompts.

    `totals`: tokens per second overall, over plain decoding's; `ratios`: mean over prompts of each one's ratio;
    `rates`: mean over prompts of tokens per second, over plain decoding's mean (Spec-Bench). None if nothing was timed.
    """
    return _bootstrap(*paired(records, plain), {"totals": _totals, "ratios": _ratios, "rates": _rates}[variant], seed)


def tau_ratio(records: Sequence[Record], others: Sequence[Record], seed: int = 0) -> Estimate | None:
    """The ratio of two methods' tokens per target pass on the same prompts, with a bootstrap interval."""
    return _bootstrap(*paired(records, others, "cycles"), _totals, seed)


def _bootstrap(ours: Floats, theirs: Floats, figure: Callable[[Floats, Floats], Floats], seed: int) -> Estimate | None:
    if not len(ours):
        return None
    value = float(figure(ours[None], theirs[None])[0])
    if len(ours) == 1:
        return Estimate(value, value, value)
    picks = np.random.default_rng(seed).integers(len(ours), size=(BOOTSTRAP_RESAMPLES, len(ours)))
    low, high = np.quantile(figure(ours[picks], theirs[picks]), [0.025, 0.975])
    return Estimate(value, float(low), float(high))


def paired(records: Sequence[Record], plain: Sequence[Record], unit: str = "seconds") -> tuple[Floats, Floats]:
    """(tokens, seconds or cycles) of each prompt [n, 2] for a method and for plain decoding; repeats are added up.

    A prompt is one id of one task at one temperature; only repeats that both have count.
    """
    theirs = {record.key: record for record in plain}
    pairs: dict[tuple[str, str, float], list[Floats]] = defaultdict(list)
    for record in records:
        other = theirs.get(record.key)
        taken = [getattr(each, unit) for each in (record, other) if each is not None]
        if other is not None and all(taken):
            pairs[record.key[:3]].append(np.array([[record.tokens, taken[0]], [other.tokens, taken[1]]], dtype=float))
    sums = np.array([np.sum(each, axis=0) for each in pairs.values()]).reshape(-1, 2, 2)
    return sums[:, 0], sums[:, 1]


def _totals(ours: Floats, theirs: Floats) -> Floats:  # [resamples, prompts, 2] each
    ours, theirs = ours.sum(1), theirs.sum(1)
    return np.divide(ours[:, 0] * theirs[:, 1], ours[:, 1] * theirs[:, 0])


def _ratios(ours: Floats, theirs: Floats) -> Floats:
    ratios: Floats = (ours[..., 0] / ours[..., 1]) / (theirs[..., 0] / theirs[..., 1])
    return np.asarray(ratios.mean(1))


def _rates(ours: Floats, theirs: Floats) -> Floats:
    means: list[Floats] = [(each[..., 0] / each[..., 1]).mean(1) for each in (ours, theirs)]
    return np.divide(*means)


def ttft(records: Sequence[Record]) -> float | None:
    """Mean seconds from the start of an answer to its first token."""
    return _mean(turn.ttft for turn in _turns(records))


def tpot(records: Sequence[Record]) -> float | None:
    """Mean over answers of the seconds per token after the first."""
    return _mean(
        (turn.seconds - turn.ttft) / (turn.tokens - 1)
        for turn in _turns(records)
        if turn.seconds is not None and turn.ttft is not None and turn.tokens > 1
    )


def time_split(records: Sequence[Record]) -> dict[str, float] | None:
    """The shares of prefill, draft, verify, policy and other in the time."""
    seconds = _seconds(records)
    if not seconds:
        return None
    parts = {"prefill": sum(turn.prefill or 0.0 for turn in _turns(records))}
    for part in PARTS[:-1]:
        parts[part] = sum(turn.split[part] for turn in _turns(records) if turn.split)
    shares = {name: taken / seconds for name, taken in parts.items()}
    return {**shares, "other": max(1 - sum(shares.values()), 0.0)}


def cycle_throughput(records: Sequence[Record]) -> float | None:
    """Tokens per second of drafting and verifying alone."""
    draft, verify = _split_sum(records, "draft"), _split_sum(records, "verify")
    return sum(record.tokens for record in records) / (draft + verify) if draft is not None and verify else None


def cost_ratio(records: Sequence[Record], plain: Sequence[Record]) -> float | None:
    """c: measured seconds of a draft pass over those of a plain target pass."""
    draft, passes = _split_sum(records, "draft"), sum(sum(turn.passes) for turn in _turns(records))
    verify, cycles = _split_sum(plain, "verify"), sum(record.cycles for record in plain)
    if draft is None or not verify or not passes:
        return None
    return (draft / passes) / (verify / cycles)


def predicted_speedup(records: Sequence[Record], plain: Sequence[Record]) -> float | None:
    """R = tau / (1 + c · delta): the speed-up if the cost of a target pass did not depend on its rows."""
    c = cost_ratio(records, plain)
    return None if c is None else tau(records) / (1 + c * delta(records))


# ---- memory and text


def peak_memory(records: Sequence[Record]) -> int | None:
    """The peak bytes of device memory over the conversations."""
    return max((record.peak_memory for record in records if record.peak_memory is not None), default=None)


def memory_to_speed(records: Sequence[Record], plain: Sequence[Record]) -> float | None:
    """Speed-up per GB of peak memory."""
    peak = peak_memory(records)
    gain = speedup(records, plain) if peak else None
    return None if gain is None or not peak else gain.value / (peak / BYTES_PER_GB)


class Difference(NamedTuple):
    """An answer that differs from plain decoding's."""

    method: str
    task: str
    id: str
    temperature: float
    repeat: int
    turn: int  # the first that differs, from 1


def compared(records: Sequence[Record]) -> list[Record]:
    """The records of prompts that plain decoding answered, too, so that texts can be compared."""
    wanted = {record.key for record in records if record.method == PLAIN}
    return [record for record in records if record.method != PLAIN and record.key in wanted]


def differences(run: Run) -> list[Difference]:
    """The conversations in which a method's tokens differ from plain decoding's."""
    wanted = {record.key: [turn.digest for turn in record.turns] for record in run.select(PLAIN)}
    found = []
    for record in compared(run.records):
        place = first_difference([turn.digest for turn in record.turns], wanted[record.key])
        if place is not None:
            found.append(Difference(record.method, *record.key, place + 1))
    return found


# ---- summary


@dataclass(frozen=True)
class Row:
    """The figures of one method, task and temperature; None if a run did not measure them."""

    method: str
    drafter: str
    policy: str
    task: str
    temperature: float
    prompts: int
    samples: int  # conversations
    tokens: int
    cycles: int
    tau: float
    tau_samples: float
    tau_cycles: float
    delta: float
    rows: float
    acceptance: float  # per verified node; NaN if none was drafted
    dynatree_accept: float | None
    tokens_per_second: float | None
    speedup: Estimate | None
    speedup_ratios: Estimate | None
    speedup_rates: Estimate | None
    c: float | None
    predicted: float | None
    ttft: float | None
    tpot: float | None
    split: dict[str, float] | None
    peak_memory: int | None
    memory_to_speed: float | None
    repeated: float
    compared: int  # conversations that plain decoding had, too
    different: int  # of these, those with another text

    def as_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        values = {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in asdict(self).items()}
        estimates = {name: value._asdict() for name, value in vars(self).items() if isinstance(value, Estimate)}
        return {**values, **estimates}

    def as_columns(self) -> dict[str, Any]:
        """As columns of a table; nested figures get a column for each part."""
        flat: dict[str, Any] = {}
        for name, value in self.as_dict().items():
            if isinstance(value, dict):
                flat.update({name if part == "value" else f"{name}_{part}": each for part, each in value.items()})
            else:
                flat[name] = value
        return flat


def as_csv(lines: Sequence[dict[str, Any]]) -> str:
    """Lines as CSV, with every column that any line has."""
    names = list(dict.fromkeys(name for line in lines for name in line))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def summary(run: Run) -> list[Row]:
    """A row for each method, task and temperature; with several tasks, also one for all of them pooled."""
    wrong = Counter((each.method, each.task, each.temperature) for each in differences(run))
    tasks = [*run.tasks, ALL] if len(run.tasks) > 1 else run.tasks
    rows = []
    for temperature in run.temperatures:
        for task in tasks:
            plain = run.select(PLAIN, task, temperature)
            for method in run.methods:
                records = run.select(method, task, temperature)
                mine = sum(n for (m, t, d), n in wrong.items() if (m, d) == (method, temperature) and task in (t, ALL))
                rows += [_row(records, plain, task, mine)] if records else []
    return rows


def _row(records: list[Record], plain: list[Record], task: str, different: int) -> Row:
    first = records[0]
    return Row(
        method=first.method,
        drafter=first.drafter,
        policy=first.policy,
        task=task,
        temperature=first.temperature,
        prompts=len({(record.task, record.id) for record in records}),
        samples=len(records),
        tokens=sum(record.tokens for record in records),
        cycles=sum(record.cycles for record in records),
        tau=tau(records),
        tau_samples=tau(records, "samples"),
        tau_cycles=tau(records, "cycles"),
        delta=delta(records),
        rows=mean_rows(records),
        acceptance=acceptance_per_node(records),
        dynatree_accept=dynatree_accept(records),
        tokens_per_second=tokens_per_second(records),
        speedup=speedup(records, plain),
        speedup_ratios=speedup(records, plain, "ratios"),
        speedup_rates=speedup(records, plain, "rates"),
        c=cost_ratio(records, plain),
        predicted=predicted_speedup(records, plain),
        ttft=ttft(records),
        tpot=tpot(records),
        split=time_split(records),
        peak_memory=peak_memory(records),
        memory_to_speed=memory_to_speed(records, plain),
        repeated=fmean(record.repeated for record in records),
        compared=len(compared([*plain, *records])),
        different=different,
    )


# ---- folds


def _turns(records: Sequence[Record]) -> list[Turn]:
    return [turn for record in records for turn in record.turns]


def _per_cycle(records: Sequence[Record], name: str) -> float:
    cycles = sum(record.cycles for record in records)
    return sum(sum(getattr(turn, name)) for turn in _turns(records)) / cycles if cycles else math.nan


def _by_rank(records: Sequence[Record]) -> dict[int, tuple[int, int, int]]:
    """Sibling rank → nodes verified, judged, accepted."""
    counts = {what: Counter[int]() for what in ("verified", "judged", "accepted")}
    for turn in _turns(records):
        for nodes in turn.nodes:
            for what, own in counts.items():
                own[nodes.rank] += getattr(nodes, what)
    verified, judged, accepted = counts.values()
    return {rank: (verified[rank], judged[rank], accepted[rank]) for rank in sorted(verified)}


def _shares(counts: dict[int, int]) -> dict[int, float]:
    total = sum(counts.values())
    return {place: count / total for place, count in counts.items()} if total else {}


def _seconds(records: Sequence[Record]) -> float | None:
    """All seconds, or None if any conversation was not timed."""
    times = [record.seconds for record in records if record.seconds is not None]
    return sum(times) if records and len(times) == len(records) else None


def _split_sum(records: Sequence[Record], part: str) -> float | None:
    taken = [turn.split[part] for turn in _turns(records) if turn.split is not None]
    return sum(taken) if taken else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
