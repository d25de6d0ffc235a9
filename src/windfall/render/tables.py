"""Tables for terminals of any width: columns that do not fit are left out and named below the table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

MIN_NAME_COLUMNS = 12  # minimum width that the first column is folded to


class Wrapped:
    """Wraps lines between words, also on a console with soft wrapping."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self._content, options.update(no_wrap=False, overflow="fold"))


class Layout(NamedTuple):
    """The visible columns and their widths."""

    columns: list[int]
    widths: list[int]
    gap: int  # spaces between two columns


class Figures:
    """A table of figures; the first column holds the names of the rows.

    In a narrow terminal, headers are wrapped, names are folded, and then columns of figures are left out: those in
    `least` first, in that order, then from right to left. A line below the table names them.
    """

    def __init__(
        self, columns: Sequence[str], title: str = "", least: Sequence[str] = (), names: JustifyMethod = "left"
    ) -> None:
        self.columns, self.title = list(columns), title
        self._names = names  # how the first column is justified
        self._rows: list[tuple[list[Text], bool]] = []  # cells, and whether the row ends a section
        figures = range(1, len(self.columns))
        first = [next(place for place in figures if self.columns[place] == name) for name in least]
        self._dispensable = [*first, *(place for place in reversed(figures) if place not in first)]

    def add(self, *cells: str | Text, ends_section: bool = False) -> None:
        """Add a row; missing cells are empty."""
        texts = [cell if isinstance(cell, Text) else Text(cell) for cell in cells]
        self._rows.append((texts, ends_section))

    def end_section(self) -> None:
        """Draw a line after the last row."""
        if self._rows:
            self._rows[-1] = (self._rows[-1][0], True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        options = options.update(no_wrap=False, overflow="fold")
        layout = self.layout(options.max_width)
        yield from console.render(self._table(layout), options)
        left_out = [name for place, name in enumerate(self.columns) if place not in layout.columns]
        if left_out:
            line = Text(f"The terminal is too narrow for: {', '.join(left_out)}", style="dim")
            yield from console.render(line, options)

    def layout(self, width: int) -> Layout:
        """The widest layout that fits into `width`, with as many columns as possible."""
        shown = list(range(len(self.columns)))
        for place in (None, *self._dispensable):
            shown = [each for each in shown if each != place]
            for layout in self._layouts(shown, width):
                if sum(layout.widths) + layout.gap * (len(layout.widths) - 1) <= width:
                    return layout
        return Layout([0], [max(width, 1)], 0)

    def _layouts(self, shown: list[int], width: int) -> Iterable[Layout]:
        """From the widest to the narrowest."""
        headers = [self.columns[place] for place in shown]
        whole = [self._width(place, cell_len(header)) for place, header in zip(shown, headers, strict=True)]
        broken = [self._width(place, _longest_word(header)) for place, header in zip(shown, headers, strict=True)]
        yield Layout(shown, whole, 2)
        yield Layout(shown, broken, 2)
        yield Layout(shown, broken, 1)
        room = width - sum(broken[1:]) - len(broken[1:])
        yield Layout(shown, [max(min(broken[0], MIN_NAME_COLUMNS), min(broken[0], room)), *broken[1:]], 1)

    def _width(self, place: int, header: int) -> int:
        """The width of a column whose header needs the width `header`."""
        cells = (row[place].cell_len for row, _ in self._rows if place < len(row))
        return max([header, 1, *cells])

    def _table(self, layout: Layout) -> Table:
        table = Table(
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, max(layout.gap - 1, 0), 0, 0),
            title=self.title or None,
            title_justify="left",
        )
        for place, width in zip(layout.columns, layout.widths, strict=True):
            justify: JustifyMethod = "right" if place else self._names
            table.add_column(Text(self.columns[place]), justify=justify, width=width, overflow="fold")
        for cells, ends_section in self._rows:
            shown = [cells[place] if place < len(cells) else Text("") for place in layout.columns]
            table.add_row(*shown, end_section=ends_section)
        return table


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


def figure(value: float | None, shape: str, factor: float = 1) -> str:
    """A number times `factor` in this shape, such as "{:.2f}"; empty for None."""
    return "" if value is None else shape.format(factor * value)
