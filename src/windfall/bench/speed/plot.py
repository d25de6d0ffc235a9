"""Draws what `bench speed` measured as one figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from windfall.bench.speed.race import Regime
from windfall.render.plots import COLOURS, FADED, new_figure


def plot(measured: dict[str, Any], file: Path) -> None:
    """Speed-ups by method and way of sampling, and passes by rows and by context length with their lower bounds."""
    figure, grid = new_figure(15, 4.4, rows=1, columns=3, width_ratios=(1.6, 1, 1))
    gains, rows, lengths = grid[0]
    _plot_gains(gains, measured["methods"])
    _plot_passes(rows, measured["passes"].get("rows", []), "rows", "Verify pass by rows")
    _plot_passes(lengths, measured["passes"].get("lengths", []), "length", "Verify pass by context")
    machine = measured["provenance"]["machine"]
    where = f"{machine['gpu'] or machine['cpu']}, {measured['provenance']['target']['dtype']}"
    figure.suptitle(f"{measured['target']} on {where}", fontsize=10)
    figure.savefig(file, dpi=150, format=file.suffix[1:] if file.suffix else "png")


def _plot_gains(axes: Any, methods: list[dict[str, Any]]) -> None:
    shown = [row for row in methods if row["over_none"] is not None]
    labels = list(dict.fromkeys(row["method"] for row in shown))
    regimes = list(dict.fromkeys((row["temperature"], row["coupled"]) for row in shown))
    for place, regime in enumerate(regimes):
        own = {row["method"]: row["over_none"] for row in shown if (row["temperature"], row["coupled"]) == regime}
        at = [labels.index(name) + (place - (len(regimes) - 1) / 2) * 0.8 / len(regimes) for name in own]
        name = Regime(regime[0], bool(regime[1])).label
        axes.barh(at, list(own.values()), 0.8 / len(regimes), label=name, color=COLOURS[place % len(COLOURS)])
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1, color=FADED, linewidth=1)
    axes.set(title="Speed-up over plain decoding", xlabel="tokens/s over those of none")
    if shown:
        axes.legend(frameon=False, fontsize=7)


def _plot_passes(axes: Any, table: list[dict[str, Any]], by: str, title: str) -> None:
    series: list[int | None] = [None] if by == "rows" else list(dict.fromkeys(row["rows"] for row in table))
    for place, rows in enumerate(series):
        own = [row for row in table if rows in (None, row["rows"])]
        at, name = [row[by] for row in own], "forward" if rows is None else f"{rows} row{'s' * (rows != 1)}"
        axes.plot(at, [1000 * row["seconds"] for row in own], "o-", color=COLOURS[place], label=name)
    if table:
        floor = {row[by]: 1000 * row["floor_seconds"] for row in table}
        axes.plot(list(floor), list(floor.values()), "--", color=FADED, label="bytes over bandwidth")
        axes.legend(frameon=False, fontsize=7)
    axes.set(title=title, xlabel="rows" if by == "rows" else "tokens of context", ylabel="milliseconds")
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", nbins=5)
