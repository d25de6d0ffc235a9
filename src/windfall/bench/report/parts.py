"""What a report says, whatever it is written as."""

from __future__ import annotations

from dataclasses import dataclass, field

from windfall.bench.report.run_figures import Drawing

DASH = "–"  # where there is no figure


@dataclass(frozen=True)
class Table:
    """Texts in rows and columns; the first column names the rest."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    note: str = ""
    best: frozenset[tuple[int, int]] = frozenset()  # cells to stand out: row, column
    folded: bool = False  # whether a figure shows the same, so that few will want it


@dataclass(frozen=True)
class Section:
    """Tables and figures that belong together."""

    title: str
    text: str = ""  # paragraphs are parted by empty lines
    tables: list[Table] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """Everything that a page shows."""

    title: str
    summary: list[str]
    facts: list[tuple[str, str]]  # a large figure and what it is
    sections: list[Section]
    trees: list[tuple[str, str]]  # name, SVG
    commands: list[str]
    about: list[tuple[str, str]]
