"""A diagnosis as one figure of six panels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from windfall.bench.inspect.diagnosis import RANKS, Diagnosis
from windfall.render.plots import COLOURS

SHOWN = 12  # ranks of a heat map; the last answers for all beyond it
FADED = "#999999"


def plot_diagnosis(found: Diagnosis, title: str, file: Path) -> None:
    """Accuracy and calibration by rank, ranks of tree nodes, accepted lengths, and two acceptance heat maps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.6, 7), layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever the user's settings
    (accuracy, calibration, share), (lengths, siblings, layers) = figure.subplots(2, 3)
    _by_rank(found, accuracy, calibration)
    _bars(share, [100 * part for part in found.trees.rank_share()], _rank_names())
    share.set(title="Ranks of verified nodes", xlabel="rank among siblings", ylabel="share (%)")
    _bars(lengths, *_length_shares(found))
    lengths.set(
        title=f"Accepted lengths, tau {found.trees.tau:.2f}", xlabel="drafted tokens", ylabel="target passes (%)"
    )
    _heat(figure, siblings, found.trees.heat_map(columns=SHOWN), "rank among siblings")
    _heat(figure, layers, found.trees.heat_map(layer=True, columns=SHOWN), "rank within the level")
    for axes in (accuracy, calibration, share, lengths):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
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


def _rank_names() -> list[str]:
    return [*map(str, range(1, RANKS)), f"{RANKS}+"]


def _length_shares(found: Diagnosis) -> tuple[list[float], list[str]]:
    most = max(found.trees.lengths, default=0)
    counts = [found.trees.lengths.get(length, 0) for length in range(most + 1)]
    return [100 * count / max(found.trees.cycles, 1) for count in counts], [str(length) for length in range(most + 1)]


def _heat(figure: Any, axes: Any, cells: list[list[float]], across: str) -> None:
    """Rows are depths from 1, columns ranks from 1."""
    from matplotlib.colors import PowerNorm

    shown = [[100 * value for value in row] for row in cells] or [[0.0]]
    ranks = [f"{rank}+" if rank == SHOWN else f"{rank}" for rank in range(1, len(shown[0]) + 1)]
    image = axes.imshow(shown, cmap="cividis", norm=PowerNorm(0.5, 0, 100), aspect="auto")
    axes.set_xticks(range(len(shown[0])), ranks, fontsize=8)
    axes.set_yticks(range(len(shown)), range(1, len(shown) + 1))
    axes.set(title="Accepted nodes", xlabel=across, ylabel="depth")
    figure.colorbar(image, ax=axes, ticks=[0, 5, 20, 50, 100]).set_label("target passes (%)")
