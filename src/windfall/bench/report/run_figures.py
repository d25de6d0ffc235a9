"""Which figures a report shows, and what is drawn in each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from windfall.bench import reading, results
from windfall.bench.reading import Run
from windfall.bench.report import figures
from windfall.bench.report.parts import Drawing
from windfall.bench.results import Row

LINES = 7  # methods in a plot: the fastest
PANELS = 6  # heat maps
LONGEST = 12  # tokens of a cycle that get a column of their own
DEPTHS, RANKS = 10, 10  # of the heat maps


def drawings(run: Run, rows: list[Row], ranked: list[Row], heat: float) -> list[Drawing]:
    """The figures that these records allow."""
    mark = f"t{heat:g}".replace(".", "-")
    kept = {row.method: run.select(row.method, temperature=heat) for row in ranked}
    trees = {row.method: kept[row.method] for row in ranked if row.delta > 0}
    few = dict(list(trees.items())[:LINES])
    gains = {row.method: row.speedup for row in ranked if row.speedup}
    found = []
    if len(gains) > 1:
        found.append(
            Drawing(
                f"speedup-{mark}",
                "Speed-up",
                "How many times faster than plain decoding (dashed). Whiskers: 95% interval over the prompts.",
                lambda: figures.bars(gains, "speed-up over plain decoding (×)", base=1.0),
            )
        )
    if len(run.tasks) > 1:
        found.append(
            Drawing(
                f"tau-{mark}",
                "Tokens per target pass, by task",
                "The longer the accepted drafts, the brighter.",
                lambda: _tau_figure(run, rows, ranked, heat),
            )
        )
    if any(row.split for row in ranked):
        found.append(
            Drawing(
                f"time-{mark}",
                "Where the time goes",
                "Milliseconds for each token of the text. A shorter bar is a faster method; prompts are not counted.",
                lambda: figures.stack(_milliseconds(ranked), "milliseconds per token", figures.PARTS),
            )
        )
    if trees:
        found.append(
            Drawing(
                f"lengths-{mark}",
                "How many tokens a target pass yields",
                "Share of the passes (%) that yielded so many tokens; 1 means that no drafted token was accepted.",
                lambda: _length_figure(trees),
            )
        )
    if any(any(results.heat_map(records).values()) for records in few.values()):
        found += _node_drawings(few, mark)
    if trees:
        found.append(
            Drawing(
                f"efficiency-{mark}",
                "Drafting against what it brings",
                "Each dot is a prompt; lines join the means. Dashed: as many draft passes as tokens, TALON's oracle. "
                "Above it passes are wasted. The target adds a token of its own to each pass, so a drafter that is "
                "always right, with a pass for each token, lies one below.",
                lambda: figures.efficiency({name: prompt_efficiency(records) for name, records in few.items()}),
            )
        )
    forecast = {row.method: (row.predicted, row.speedup) for row in ranked if row.predicted and row.speedup}
    if forecast:
        found.append(
            Drawing(
                f"predicted-{mark}",
                "Predicted and measured speed-up",
                "Predicted: tau / (1 + c·delta), c being a draft pass over a plain target pass. Below the line lies "
                "what this leaves out: target passes that cost more with more rows, the policy's own time, the prompt.",
                lambda: figures.agreement(
                    dict(list(forecast.items())[:LINES]), "predicted speed-up (×)", "measured speed-up (×)"
                ),
            )
        )
    return found


def _node_drawings(few: dict[str, list[reading.Record]], mark: str) -> list[Drawing]:
    colours = dict(zip(("rank 1", "rank 2", "rank 3", "rank 4", "rank 5 and later"), figures.RANKS, strict=True))
    return [
        Drawing(
            f"acceptance-{mark}",
            "Where the accepted tokens lie in the tree",
            "Share of the target passes that accepted the node at this depth and rank (by path probability within its "
            "level).",
            lambda: figures.heatmaps(
                {name: _heat(records) for name, records in list(few.items())[:PANELS]},
                "rank within the level",
                "depth",
                "accepted (% of passes)",
            ),
        ),
        Drawing(
            f"ranks-{mark}",
            "Which guesses fill the trees",
            "Verified nodes by their rank among their siblings: rank 1 is the drafter's first guess.",
            lambda: figures.stack(
                {name: _rank_shares(records) for name, records in few.items()}, "share of verified nodes (%)", colours
            ),
        ),
    ]


def _tau_figure(run: Run, rows: list[Row], ranked: list[Row], heat: float) -> Any:
    found = {(row.method, row.task): row.tau for row in rows if row.temperature == heat}
    methods = [row.method for row in ranked]
    cells = [[found.get((method, task)) for task in run.tasks] for method in methods]
    return figures.table(methods, run.tasks, cells, "tau: tokens per target pass")


def _milliseconds(ranked: list[Row]) -> dict[str, dict[str, float]]:
    return {
        row.method: {part: 1000 * share / row.tokens_per_second for part, share in row.split.items()}
        for row in ranked
        if row.split is not None and row.tokens_per_second
    }


def _length_figure(trees: dict[str, list[reading.Record]]) -> Any:
    histograms = {name: results.length_histogram(records) for name, records in trees.items()}
    top = min(max(max(each) for each in histograms.values()), LONGEST)
    cells = []
    for counts in histograms.values():
        total = sum(counts.values())
        line = [100 * counts.get(length, 0) / total for length in range(1, top)]
        cells.append([*line, 100 * sum(n for length, n in counts.items() if length >= top) / total])
    longer = any(max(each) > top for each in histograms.values())
    columns = [*map(str, range(1, top)), f"{top}+" if longer else str(top)]
    return figures.table(list(trees), columns, cells, "tokens from one target pass; cells: % of the passes", digits=0)


def _heat(records: list[reading.Record]) -> list[list[float]]:
    counts, cycles = results.heat_map(records, by="layer_rank"), sum(record.cycles for record in records)
    deepest = min(max((depth for depth, _ in counts), default=1), DEPTHS)
    widest = min(max((rank for _, rank in counts), default=0) + 1, RANKS)
    return [[counts.get((depth, rank), 0) / cycles for rank in range(widest)] for depth in range(1, deepest + 1)]


def _rank_shares(records: list[reading.Record]) -> dict[str, float]:
    shares = results.rank_share(records)
    first = {f"rank {rank + 1}": 100 * shares.get(rank, 0.0) for rank in range(4)}
    return {**first, "rank 5 and later": 100 * sum(share for rank, share in shares.items() if rank > 3)}


def prompt_efficiency(records: Sequence[reading.Record]) -> list[tuple[float, float]]:
    """(tau, delta) of every prompt, its repeats together."""
    prompts: dict[tuple[str, str], list[reading.Record]] = {}
    for record in records:
        prompts.setdefault((record.task, record.id), []).append(record)
    return [(results.tau(own), results.delta(own)) for own in prompts.values()]
