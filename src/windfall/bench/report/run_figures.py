"""The figures of a report, and the data of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from windfall.bench import reading, results
from windfall.bench.reading import Run
from windfall.bench.report.parts import Drawing
from windfall.bench.results import Row
from windfall.render import figures

MAX_LINES = 7  # of a plot: the fastest methods
MAX_HEAT_MAPS = 6
MAX_CYCLE_TOKENS = 12  # the last column of the table of lengths
MAX_DEPTH, MAX_RANK = 10, 10  # of a heat map


def drawings(run: Run, rows: list[Row], ranked: list[Row], temperature: float) -> list[Drawing]:
    """The figures that these records allow."""
    trees = {row.method: run.select(row.method, temperature=temperature) for row in ranked if row.delta > 0}
    fastest = dict(list(trees.items())[:MAX_LINES])
    gains = {row.method: row.speedup for row in ranked if row.speedup}
    predicted = {row.method: (row.predicted, row.speedup) for row in ranked if row.predicted and row.speedup}
    found: list[Drawing] = []

    def add(name: str, title: str, caption: str, draw: Callable[[], Any]) -> None:
        found.append(Drawing(f"{name}-t{temperature:g}".replace(".", "-"), title, caption, draw))

    if len(gains) > 1:
        caption = "Tokens per second over those of plain decoding (dashed). Whiskers: 95% interval over the prompts."
        add("speedup", "Speed-up", caption, lambda: figures.bars(gains, "speed-up over plain decoding (×)", base=1.0))
    if len(run.tasks) > 1:
        caption = "The longer the accepted drafts, the brighter."
        add("tau", "Tokens per target pass, by task", caption, lambda: _tau_figure(run, rows, ranked, temperature))
    if any(row.split for row in ranked):
        caption = "Milliseconds for each token of the text. A shorter bar is a faster method; prompts are not counted."
        label = "milliseconds per token"
        add("time", "Where the time goes", caption, lambda: figures.stack(_milliseconds(ranked), label, figures.PARTS))
    if trees:
        caption = "Share of the passes (%) by the tokens they yielded; 1 means that no drafted token was accepted."
        add("lengths", "How many tokens a target pass yields", caption, lambda: _length_figure(trees))
    if any(any(results.heat_map(records).values()) for records in fastest.values()):
        caption = "Share of the target passes that accepted the node at this depth and rank (by path probability "
        caption += "within its level)."
        add("acceptance", "Where the accepted tokens lie in the tree", caption, lambda: _acceptance_figure(fastest))
        caption = "Verified nodes by their rank among their siblings: rank 1 is the drafter's first guess."
        add("ranks", "Which guesses fill the trees", caption, lambda: _rank_figure(fastest))
    if trees:
        caption = (
            "Each dot is a prompt; lines join the means. Dashed: as many draft passes as tokens, TALON's oracle. Above "
            "it passes are wasted. The target adds a token of its own to each pass, so a drafter that is always right, "
            "with a pass for each token, lies one below."
        )
        points = {name: results.tau_and_delta(records) for name, records in fastest.items()}
        add("efficiency", "Drafting against what it brings", caption, lambda: figures.efficiency(points))
    if predicted:
        caption = (
            "Predicted: tau / (1 + c·delta), c being a draft pass over a plain target pass. The gap below the line is "
            "what this leaves out: target passes that cost more with more rows, the policy's own time, the prompt."
        )
        some = dict(list(predicted.items())[:MAX_LINES])
        axes = "predicted speed-up (×)", "measured speed-up (×)"
        add("predicted", "Predicted and measured speed-up", caption, lambda: figures.agreement(some, *axes))
    return found


def _acceptance_figure(fastest: dict[str, list[reading.Record]]) -> Any:
    panels = {name: _heat(records) for name, records in list(fastest.items())[:MAX_HEAT_MAPS]}
    return figures.heatmaps(panels, "rank within the level", "depth", "accepted (% of passes)")


def _rank_figure(fastest: dict[str, list[reading.Record]]) -> Any:
    colours = dict(zip(("rank 1", "rank 2", "rank 3", "rank 4", "rank 5 and later"), figures.RANKS, strict=True))
    shares = {name: _rank_shares(records) for name, records in fastest.items()}
    return figures.stack(shares, "share of verified nodes (%)", colours)


def _tau_figure(run: Run, rows: list[Row], ranked: list[Row], temperature: float) -> Any:
    found = {(row.method, row.task): row.tau for row in rows if row.temperature == temperature}
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
    top = min(max(max(each) for each in histograms.values()), MAX_CYCLE_TOKENS)
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
    deepest = min(max((depth for depth, _ in counts), default=1), MAX_DEPTH)
    widest = min(max((rank for _, rank in counts), default=0) + 1, MAX_RANK)
    return [[counts.get((depth, rank), 0) / cycles for rank in range(widest)] for depth in range(1, deepest + 1)]


def _rank_shares(records: list[reading.Record]) -> dict[str, float]:
    shares = results.rank_share(records)
    first = {f"rank {rank + 1}": 100 * shares.get(rank, 0.0) for rank in range(4)}
    return {**first, "rank 5 and later": 100 * sum(share for rank, share in shares.items() if rank > 3)}
