"""Plots of cost curves and reliability, with matplotlib."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windfall.core.errors import InputError
from windfall.costs.acceptance import expected_calibration_error

if TYPE_CHECKING:
    from windfall.costs.acceptance import Reliability
    from windfall.costs.curves import Costs

FORMATS = (".png", ".svg", ".pdf")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's, for any colour vision
FADED = "#8c959f"  # baselines


def check(file: Path | None) -> None:
    """Raise an error before the measurement if the plot could not be written after it. None: no plot."""
    if file is None:
        return
    if file.suffix.lower() not in FORMATS:
        raise InputError(f"a plot is a {', '.join(FORMATS)} file, not '{file}'")
    if not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise InputError(f"cannot write '{file}': its folder does not exist or is not writable")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("plots need matplotlib; run: pip install windfall[plot]")


def plot_costs(costs: Costs, about: Mapping[str, Any], file: Path) -> None:
    """Draft passes by width and verify passes by rows, a line for each context length; `about` is the profile's."""
    figure, ((drafts, verifies),) = new_figure(9.6, 3.6, columns=2)
    target, machine = about["target"], about["machine"]
    drafts.plot(costs.drafts.sizes, _milliseconds(costs.drafts.seconds), "o-", color=COLOURS[0])
    for place, (length, curve) in enumerate(costs.verifies):
        colour = COLOURS[place % len(COLOURS)]
        verifies.plot(curve.sizes, _milliseconds(curve.seconds), "o-", color=colour, label=f"context {length}")
    drafts.set(title=f"Draft pass, {about['drafter']['class'].rpartition('.')[2]}", xlabel="nodes expanded")
    verifies.set(title=f"Verify pass, {target['name']}", xlabel="rows")
    verifies.legend(frameon=False)
    for axes in (drafts, verifies):
        axes.set_ylabel("milliseconds")
        axes.set_ylim(bottom=0)
    figure.suptitle(
        f"{machine['gpu'] or machine['cpu']}, {target['dtype'].removeprefix('torch.')} · c = {costs.ratio:.3f}",
        fontsize=9,
    )
    figure.savefig(file, dpi=150)


def plot_reliability(found: Reliability, file: Path) -> None:
    """Acceptance rate of nodes against the drafter's confidence, before and after calibration."""
    figure, (axes,) = new_figure(9.6, 3.6, columns=2)
    for place, (title, chances) in enumerate({"drafter": found.drafted, "calibrated": found.calibrated}.items()):
        confidence, frequency, _ = zip(*found.bins(chances), strict=True)
        axes[place].plot([0, 1], [0, 1], "--", color=FADED)
        axes[place].plot(confidence, frequency, "o-", color=COLOURS[place])
        error = expected_calibration_error(chances, found.accepted)
        axes[place].set(title=f"{title}, ECE {error:.3f}", xlabel="confidence", ylabel="accepted", ylim=(0, 1))
    figure.savefig(file, dpi=150)


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, width_ratios: Sequence[float] | None = None
) -> tuple[Any, Any]:
    """An empty figure of this size in inches, and its grid of axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # opens no window, independently of the user's settings
    grid = figure.subplots(rows, columns, squeeze=False, width_ratios=width_ratios)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=FADED, alpha=0.3, linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, grid


def _milliseconds(seconds: tuple[float, ...]) -> list[float]:
    return [1000 * each for each in seconds]
