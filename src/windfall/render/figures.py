"""The kinds of figures in reports and studies, in colours for all kinds of sight, as SVG or PNG."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from windfall.core.files import make_folder, replace_file, replace_text
from windfall.core.stats import Estimate
from windfall.render.plots import COLOURS, FADED, new_figure

Cells = Sequence[Sequence[float | None]]

INK = "#1f2329"  # text and frames
MARKERS = "osD^vPX*<>"
PARTS = {"draft": "#0072b2", "verify": "#e69f00", "policy": "#009e73", "other": "#999999"}  # of a cycle's time
RANKS = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#999999")
ROW_INCHES = 0.3  # for each method of a chart
WIDTH_INCHES = 7.2


class Series(NamedTuple):
    """One line of a plot, optionally with an interval."""

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    faded: bool = False  # for a baseline


class Panel(NamedTuple):
    """A plot of lines, with a dashed line at `base`."""

    series: Mapping[str, Series]
    across: str
    down: str
    base: float | None = None
    log: bool = False


# ---- charts with a row for every method


def bars(values: Mapping[str, Estimate], label: str, base: float | None = None) -> Any:
    """Bars with whiskers, and a dashed line at `base`."""
    with _style():
        figure, axes = _single(_height(len(values)))
        for place, (name, each) in enumerate(values.items()):
            colour = FADED if name == "none" or name.startswith("the paper") else COLOURS[0]
            axes.barh(place, each.value, height=0.68, color=colour)
            whiskers = [[max(each.value - each.low, 0)], [max(each.high - each.value, 0)]]
            if each.high > each.low:
                axes.errorbar(each.value, place, xerr=whiskers, fmt="none", ecolor=INK, capsize=3, linewidth=1.2)
            axes.annotate(
                f"{each.value:.2f}",
                (max(each.high, each.value), place),
                (5, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
        if base is not None:
            axes.axvline(base, color=INK, linestyle="--", linewidth=1)
        axes.margins(x=0.12)
        axes.set_xlim(left=0)
        _methods(axes, list(values))
        axes.set_xlabel(label)
        return figure


def stack(parts: Mapping[str, Mapping[str, float]], label: str, colours: Mapping[str, str]) -> Any:
    """Stacked bars."""
    with _style():
        figure, axes = _single(_height(len(parts)) + 0.35)
        for place, own in enumerate(parts.values()):
            left = 0.0
            for part, colour in colours.items():
                axes.barh(
                    place, own.get(part, 0.0), left=left, height=0.68, color=colour, label=None if place else part
                )
                left += own.get(part, 0.0)
        _methods(axes, list(parts))
        axes.set_xlabel(label)
        axes.legend(ncols=len(colours), loc="lower left", bbox_to_anchor=(0, 1), frameon=False, handlelength=1)
        return figure


def table(rows: Sequence[str], columns: Sequence[str], cells: Cells, unit: str, digits: int = 2) -> Any:
    """Numbers on coloured cells, a row for every method."""
    with _style():
        figure, axes = _single(_height(len(rows)) + 0.3, max(WIDTH_INCHES, 1.8 + 0.62 * len(columns)))
        shades = _shades(axes, cells)
        for i, row in enumerate(cells):
            for j, value in enumerate(row):
                if value is not None:
                    _number(axes, i, j, f"{value:.{digits}f}", float(shades.norm(value)))
        axes.set_xticks(range(len(columns)), columns)
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        _methods(axes, list(rows), grid=False)
        axes.set_xlabel(unit)
        axes.xaxis.set_label_position("bottom")
        return figure


def heatmaps(panels: Mapping[str, Sequence[Sequence[float]]], across: str, down: str, unit: str) -> Any:
    """A panel for each method: rows are depths from 1, columns ranks from 1."""
    columns = min(len(panels), 3)
    lines = -(-len(panels) // columns)
    with _style():
        figure, grid = new_figure(max(2.6 * columns, 4.2), 2.5 * lines + 0.2, lines, columns)
        flat = [axes for line in grid for axes in line]
        image = None
        for axes, (name, cells) in zip(flat, panels.items(), strict=False):
            image = heat_image(axes, cells)
            axes.set_title(name, fontsize=9)
        for axes in flat[len(panels) :]:
            axes.set_visible(False)
        figure.supxlabel(across, fontsize=9)
        figure.supylabel(down, fontsize=9)
        bar = figure.colorbar(image, ax=flat, shrink=0.8, ticks=[0, 5, 20, 50, 100])
        bar.set_label(unit)
        return figure


def heat_image(axes: Any, cells: Sequence[Sequence[float]], open_rank: int | None = None) -> Any:
    """Shares by depth (rows, from 1) and rank (columns, from 1); `open_rank` stands for all ranks from it on."""
    from matplotlib.colors import PowerNorm

    percent = [[100 * value for value in row] for row in cells]
    ranks = [f"{rank}+" if rank == open_rank else f"{rank}" for rank in range(1, len(percent[0]) + 1)]
    image = axes.imshow(percent, cmap="cividis", norm=PowerNorm(0.5, 0, 100), aspect="auto")
    axes.set_xticks(range(len(ranks)), ranks, fontsize=8)
    axes.set_yticks(range(len(percent)), range(1, len(percent) + 1), fontsize=8)
    axes.grid(False)
    return image


# ---- plots


def efficiency(points: Mapping[str, Sequence[tuple[float, float]]]) -> Any:
    """Draft passes against tokens per target pass: prompts as dots, and their means in bins as a line."""
    with _style():
        figure, axes = _single(4.4)
        for (name, own), (colour, marker) in zip(points.items(), _looks(), strict=False):
            tau, delta = zip(*own, strict=True)
            axes.plot(tau, delta, marker, color=colour, alpha=0.3, markersize=4, markeredgewidth=0)
            axes.plot(*_binned(own), marker=marker, color=colour, label=name, markersize=6)
        top = max((value for own in points.values() for tau, delta in own for value in (tau, delta)), default=1) * 1.05
        axes.plot([0, top], [0, top], "--", color=INK, linewidth=1, label="oracle: delta = tau")
        axes.set(xlim=(0.9, top), ylim=(0, top), xlabel="tau: tokens per target pass", ylabel="delta: draft passes")
        _legend(axes, len(points) + 1)
        return figure


def agreement(points: Mapping[str, tuple[float, Estimate]], across: str, down: str) -> Any:
    """Predicted against measured, and the line on which they agree."""
    with _style():
        figure, axes = _single(4.4)
        for (name, (predicted, measured)), (colour, marker) in zip(points.items(), _looks(), strict=False):
            whiskers = [[max(measured.value - measured.low, 0)], [max(measured.high - measured.value, 0)]]
            axes.errorbar(predicted, measured.value, yerr=whiskers, fmt=marker, color=colour, label=name, capsize=3)
        low = min((min(x, y.low) for x, y in points.values()), default=1) * 0.9
        top = max((max(x, y.high) for x, y in points.values()), default=1) * 1.05
        axes.plot([low, top], [low, top], "--", color=INK, linewidth=1, label="as predicted")
        axes.set(xlim=(low, top), ylim=(low, top), xlabel=across, ylabel=down)
        _legend(axes, len(points) + 1)
        return figure


def panels(given: Sequence[Panel], title: str = "") -> Any:
    """Plots of lines, one below the other."""
    with _style():
        figure, grid = new_figure(WIDTH_INCHES, 0.3 + 2.9 * len(given), len(given))
        for (axes,), panel in zip(grid, given, strict=True):
            _draw_lines(axes, panel.series)
            if panel.base is not None:
                axes.axhline(panel.base, color=INK, linestyle="--", linewidth=1)
            if panel.log:
                _log_ticks(axes, panel)
            top = max((max(each.high or each.y) for each in panel.series.values() if each.y), default=1.0)
            axes.set_ylim(0, 1.08 * max(top, panel.base or 0.0))
            axes.set(xlabel=panel.across, ylabel=panel.down)
            _legend(axes, len(panel.series))
        figure.suptitle(title, fontsize=10)
        return figure


def _log_ticks(axes: Any, panel: Panel) -> None:
    """A logarithmic axis whose ticks are some of the values."""
    ticks = sorted({x for each in panel.series.values() for x in each.x})
    shown = [x for place, x in enumerate(ticks) if not place or x >= 1.3 * ticks[place - 1]]
    axes.set_xscale("log")
    axes.set_xticks(shown, [f"{x:g}" for x in shown])
    axes.minorticks_off()


def _draw_lines(axes: Any, series: Mapping[str, Series]) -> None:
    looks = _looks()
    for name, each in series.items():
        colour, marker = (FADED, "o") if each.faded else next(looks)
        axes.plot(each.x, each.y, marker=marker, color=colour, label=name, linestyle="--" if each.faded else "-")
        if each.low:
            axes.fill_between(each.x, each.low, each.high, color=colour, alpha=0.18, linewidth=0)


# ---- files


def as_element(text: str, name: str) -> str:
    """A saved figure as an element of a page: no outside references, unique ids, text in the page's colour."""
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    return bare_svg(text.replace(INK, "currentColor"), name)


def bare_svg(text: str, name: str) -> str:
    """An SVG document as an element of a page with several of them."""
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text[text.index("<svg") :])
    text = text.replace("xlink:href", "href")
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    return text.strip()


def save(figure: Any, folder: Path, name: str, picture: bool = True) -> list[Path]:
    """The figure as SVG and (`picture`) as PNG."""
    make_folder(folder)
    files = [folder / f"{name}.svg"]
    replace_text(files[0], _svg(figure))
    if picture:
        files.append(folder / f"{name}.png")
        replace_file(files[1], lambda file: figure.savefig(file, format="png", dpi=150, facecolor="white"))
    return files


def _svg(figure: Any) -> str:
    text = io.StringIO()
    with _style():
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return text.getvalue()


# ---- shared parts


@contextmanager
def _style() -> Iterator[None]:
    """Settings with which text stays text in SVG, and the same figure gives the same file."""
    from matplotlib import rc_context

    frame = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    look = {"font.size": 9.5, "axes.linewidth": 0.8, "axes.axisbelow": True, "legend.fontsize": 9}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "windfall", **frame, **look}):
        yield


def _single(height: float, width: float = WIDTH_INCHES) -> tuple[Any, Any]:
    figure, grid = new_figure(width, height)
    return figure, grid[0][0]


def _height(lines: int) -> float:
    return 0.8 + ROW_INCHES * max(lines, 1)


def _methods(axes: Any, names: list[str], grid: bool = True) -> None:
    """A row for every method, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=grid, axis="x")
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)


def _shades(axes: Any, cells: Cells) -> Any:
    from numpy import ma

    values = ma.masked_invalid([[float("nan") if value is None else value for value in row] for row in cells])
    return axes.imshow(values, cmap="cividis", aspect="auto", alpha=0.92)


def _number(axes: Any, row: int, column: int, text: str, shade: float) -> None:
    colour = "#ffffff" if shade < 0.55 else "#000000"
    axes.text(column, row, text, ha="center", va="center", fontsize=9, color=colour)


def _looks() -> Iterator[tuple[str, str]]:
    colours = (*COLOURS, "#666666")
    return cycle((colours[place % len(colours)], MARKERS[place % len(MARKERS)]) for place in range(70))


def _binned(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """The means of both coordinates in bins of one token."""
    bins: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        bins.setdefault(int(point[0]), []).append(point)
    means = [[sum(part) / len(own) for part in zip(*own, strict=True)] for _, own in sorted(bins.items())]
    return [mean[0] for mean in means], [mean[1] for mean in means]


def _legend(axes: Any, entries: int) -> None:
    if entries > 8:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    elif entries:
        axes.legend(frameon=False)
