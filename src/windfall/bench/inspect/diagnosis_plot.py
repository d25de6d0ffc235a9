"""Draws a diagnosis as one figure of six panels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from windfall.bench.inspect.diagnosis import RANKS, Diagnosis
from windfall.render.figures import heat_image
from windfall.render.plots import COLOURS, FADED, new_figure

MAX_RANKS = 12  # of a heat map; the last column stands for all further ranks


def plot_diagnosis(found: Diagnosis, title: str, file: Path) -> None:
    """Accuracy and calibration by rank, ranks of tree nodes, accepted lengths, and two acceptance heat maps."""
    trees = found.trees
    figure, grid = new_figure(12.6, 7, rows=2, columns=3)
    (accuracy, calibration, share), (lengths, siblings, layers) = grid
    _by_rank(found, accuracy, calibration)
    _bars(share, [100 * part for part in trees.rank_share()], [*map(str, range(1, RANKS)), f"{RANKS}+"])
    share.set(title="Ranks of verified nodes", xlabel="rank among siblings", ylabel="share (%)")
    longest = max(trees.lengths, default=0)
    shares = [100 * trees.lengths.get(length, 0) / max(trees.cycles, 1) for length in range(longest + 1)]
    _bars(lengths, shares, [str(length) for length in range(longest + 1)])
    lengths.set(title=f"Accepted lengths, tau {trees.tau:.2f}", xlabel="drafted tokens", ylabel="target passes (%)")
    _heat(figure, siblings, trees.heat_map(columns=MAX_RANKS), "rank among siblings")
    _heat(figure, layers, trees.heat_map(layer=True, columns=MAX_RANKS), "rank within the level")
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=150)


def _by_rank(found: Diagnosis, accuracy: Any, calibration: Any) -> None:
    names = ("rank", "accuracy", "confidence", "ece_paper", "ece_guo")
    ranks, right, sure, paper, guo = ([getattr(each, name) for each in found.ranks] for name in names)
    accuracy.plot(ranks, right, "o-", color=COLOURS[0], label="accuracy")
    accuracy.plot(ranks, sure, "s--", color=FADED, label="probability of the target's token")
    accuracy.set(title="After its own guess of rank n", ylabel="top-1 accuracy", ylim=(0, 1))
    calibration.plot(ranks, paper, "o-", color=COLOURS[1], label="of the target's token")
    calibration.plot(ranks, guo, "s--", color=COLOURS[4], label="of its first guess")
    calibration.set(title="Calibration error", ylabel="ECE")
    calibration.set_ylim(bottom=0)
    for axes in (accuracy, calibration):
        axes.set_xticks(ranks)
        axes.set_xlabel("rank n")
        axes.legend(frameon=False, fontsize=8)


def _bars(axes: Any, heights: list[float], names: list[str]) -> None:
    axes.bar(range(len(heights)), heights, color=COLOURS[0])
    axes.set_xticks(range(len(heights)), names)


def _heat(figure: Any, axes: Any, cells: list[list[float]], across: str) -> None:
    image = heat_image(axes, cells or [[0.0]], MAX_RANKS)
    axes.set(title="Accepted nodes", xlabel=across, ylabel="depth")
    figure.colorbar(image, ax=axes, ticks=[0, 5, 20, 50, 100]).set_label("target passes (%)")
