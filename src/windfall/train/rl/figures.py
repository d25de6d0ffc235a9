"""Figures of a training: its curves, and which depths and sizes went with which accepted lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from windfall.core.errors import InputError
from windfall.render.plots import COLOURS, check
from windfall.train.rl.backend import Outcome
from windfall.train.rl.learning import Event

LENGTHS = ((1, 2), (3, 5), (6, 99))  # tokens of a cycle, from and to


def plot_curves(events: Sequence[Event], file: Path, default: float | None = None) -> None:
    """Reward of each stage by steps, and throughput on validation texts; `default`: the default beam's there."""
    check(file)
    names = list(dict.fromkeys(event.stage for event in events))
    if not names:
        raise InputError("the training has not begun: there is nothing to plot")
    figure, axes = _figure(2, len(names))
    for column, name in enumerate(names):
        own = [event for event in events if event.stage == name]
        rewards = [(event.step, event.reward) for event in own if event.reward is not None]
        looks = [event for event in own if event.throughput is not None]
        steps, values = _columns(rewards)
        axes[0][column].plot(steps, values, color=COLOURS[0], alpha=0.3)
        axes[0][column].plot(steps, _smooth(values), color=COLOURS[0])
        axes[1][column].plot([e.step for e in looks], [e.throughput for e in looks], "o-", ms=3, color=COLOURS[1])
        if default is not None:
            axes[1][column].axhline(default, ls="--", color="#999999")
        axes[0][column].set(title=name, ylabel="reward" if not column else "")
        axes[1][column].set(xlabel="steps", ylabel="validation tokens/s" if not column else "")
    figure.savefig(file, dpi=130)


def plot_decisions(played: Mapping[str, Sequence[Outcome]], file: Path) -> None:
    """Depth against verified nodes, a row of panels for each policy and a column for each range of lengths."""
    check(file)
    figure, axes = _figure(len(played), len(LENGTHS))
    everything = [outcome for outcomes in played.values() for outcome in outcomes]
    deepest, largest = max(each.passes for each in everything), max(each.nodes for each in everything)
    bins = [np.arange(deepest + 2) - 0.5, np.arange(-10, largest + 21, 20)]
    for row, (name, outcomes) in enumerate(played.items()):
        for column, (least, most) in enumerate(LENGTHS):
            own = [each for each in outcomes if least <= each.tokens <= most]
            counts, *_ = np.histogram2d([e.passes for e in own], [e.nodes for e in own], bins=bins)
            panel = axes[row][column]
            panel.pcolormesh(*bins, counts.T / max(len(own), 1), cmap="Blues", vmin=0)
            span = f"{least} to {most}" if most < LENGTHS[-1][1] else f"{least} and more"
            panel.set(title=f"{name}: {span} tokens, {len(own)} cycles", xlabel="draft passes", ylabel="nodes verified")
    figure.savefig(file, dpi=130)


def _smooth(values: Sequence[float], span: int = 8) -> list[float]:
    """The mean of the last few."""
    return [float(np.mean(values[max(end - span, 0) : end])) for end in range(1, len(values) + 1)]


def _columns(pairs: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in pairs], [value for _, value in pairs]


def _figure(rows: int, columns: int) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6 * columns, 2.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever the user's settings
    axes = figure.subplots(rows, columns, squeeze=False)
    for each in axes.flat:
        each.spines[["top", "right"]].set_visible(False)
        each.title.set_fontsize(9)
        each.locator_params(axis="x", nbins=4)
    return figure, axes
