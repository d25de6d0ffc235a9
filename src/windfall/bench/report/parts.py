"""The content of a report, and how it is rendered as HTML and Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from windfall.bench.results import Row
from windfall.core.stats import Estimate

DASH = "–"  # a missing figure
WORDY_CELL = 30  # characters: a table with longer cells is set as text

Progress = Callable[[float], None]  # called with the finished share


@dataclass(frozen=True)
class Drawing:
    """A figure that is still to be drawn."""

    name: str
    title: str
    caption: str
    draw: Callable[[], Any]  # returns a matplotlib figure


@dataclass(frozen=True)
class Table:
    """Texts in rows and columns; the first column names the row."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    note: str = ""
    best: frozenset[tuple[int, int]] = frozenset()  # highlighted cells: row, column
    folded: bool = False  # whether it is collapsed, because a figure shows the same

    @property
    def wordy(self) -> bool:
        return any(len(cell) > WORDY_CELL for row in self.rows for cell in row[1:])

    @property
    def marked_rows(self) -> list[list[str]]:
        """The rows with the highlighted cells in bold Markdown."""
        return [
            [f"**{cell}**" if (place, column) in self.best else cell for column, cell in enumerate(row)]
            for place, row in enumerate(self.rows)
        ]


@dataclass(frozen=True)
class Section:
    """Tables and figures that belong together."""

    title: str
    text: str = ""  # paragraphs are separated by empty lines
    tables: list[Table] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """The whole content of a page."""

    title: str
    summary: list[str]
    facts: list[tuple[str, str]]  # a large figure and what it is
    sections: list[Section]
    trees: list[tuple[str, str]]  # name, SVG
    commands: list[str]
    about: list[tuple[str, str]]
    rows: list[Row] = field(default_factory=list)  # the figures of a single run, for the CSV file


# ---- figures as text


def number(value: float | None, digits: int = 2) -> str:
    return DASH if value is None or math.isnan(value) else f"{value:.{digits}f}"


def interval(value: Estimate | None) -> str:
    """`1.52 [1.40, 1.63]`; without the interval for plain decoding or a single prompt."""
    if value is None:
        return DASH
    exact = value.low == value.value == value.high
    return f"{value.value:.2f}" + ("" if exact else f" [{value.low:.2f}, {value.high:.2f}]")


# ---- rendering


def as_html(report: Report, drawn: Mapping[str, str]) -> str:
    """The report as one page without outside references; `drawn` has the figures as SVG by name."""
    from windfall.render.figures import bare_svg

    trees = [(name, bare_svg(text, f"tree{place}")) for place, (name, text) in enumerate(report.trees)]
    return _render("page.html.jinja", escape=True, report=report, drawn=drawn, trees=trees)


def as_markdown(report: Report, figures: str) -> str:
    """The report as Markdown; `figures` is the folder of the drawings, as seen from the file."""
    return _render("page.md.jinja", escape=False, report=report, figures=figures)


def _render(name: str, escape: bool, **context: Any) -> str:
    from jinja2 import Environment

    text = files("windfall.bench.report").joinpath(name).read_text("utf-8")
    return Environment(autoescape=escape, trim_blocks=True, lstrip_blocks=True).from_string(text).render(context)


def draw(report: Report, folder: Path, progress: Progress = lambda share: None) -> dict[str, str]:
    """Draw every figure as an SVG file in a folder; returns the same as elements for a page."""
    from windfall.render import figures

    drawings = [drawing for section in report.sections for drawing in section.drawings]
    found = {}
    for done, drawing in enumerate(drawings, 1):
        (file,) = figures.save(drawing.draw(), folder, drawing.name, picture=False)
        found[drawing.name] = figures.as_element(file.read_text("utf-8"), drawing.name)
        progress(done / len(drawings))
    return found
