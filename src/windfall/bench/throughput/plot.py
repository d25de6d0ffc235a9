"""Draws what `bench throughput` measured: tokens per second by the number of requests at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from windfall.render.plots import COLOURS, FADED, new_figure


def plot(measured: dict[str, Any], file: Path) -> None:
    """A panel for each temperature and kind of arrivals, a line for each method."""
    rows = measured["rows"]
    panels = list(dict.fromkeys((row["temperature"], row["arrivals"]) for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure, (grid,) = new_figure(max(4.4 * len(panels), 6), 4, columns=len(panels))
    for axes, (temperature, arrivals) in zip(grid, panels, strict=True):
        own = [row for row in rows if (row["temperature"], row["arrivals"]) == (temperature, arrivals)]
        for place, method in enumerate(methods):
            points = [(row["concurrency"], row["tokens_per_second"]) for row in own if row["method"] == method]
            known = [point for point in points if point[1] is not None]
            again, colour_number = divmod(place, len(COLOURS))
            colour, line = (FADED, "--") if method.startswith("HF") else (COLOURS[colour_number], ":" if again else "-")
            if known:
                marker = "s" if method == "HF generate" else "o"
                axes.plot(*zip(*known, strict=True), marker + line, color=colour, label=method)
        counts = sorted({row["concurrency"] for row in own})
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set(title=f"{arrivals}, temperature {temperature:g}", xlabel="requests at once", ylabel="tokens/s, all")
        axes.legend(frameon=False, fontsize=7)
    machine = measured["provenance"]["machine"]
    where = f"{machine['gpu'] or machine['cpu']}, {measured['provenance']['target']['dtype']}"
    figure.suptitle(f"{measured['target']} on {where}", fontsize=10)
    about = {"Title": f"windfall bench throughput, {measured['provenance']['date']}"}  # says which results it shows
    figure.savefig(file, dpi=150, format=file.suffix[1:] if file.suffix else "png", metadata=about)
