"""The report as one HTML page: style and drawings inside, nothing fetched; for wide and narrow screens and paper."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from windfall.bench.report.parts import Report, Section, Table
from windfall.bench.report.run_figures import Drawing

STYLE = """
:root { --ink: #1f2329; --soft: #57606a; --ground: #ffffff; --card: #f6f8fa; --line: #d0d7de; --strong: #0072b2;
  --good: #00694b; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #a3adb8; --ground: #14171a; --card: #1d2126;
  --line: #39404a; --strong: #6cc0f5; --good: #4fc79b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 66rem; padding: 1.5rem 1.1rem 4rem; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .4rem 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 2.6rem 0 .5rem; padding-top: .6rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
p { margin: .5rem 0; max-width: 46rem; }
.soft, caption, figcaption { color: var(--soft); font-size: .88rem; }
.summary { background: var(--card); border-left: 4px solid var(--strong); padding: .5rem 1rem; border-radius: 4px; }
.facts { display: flex; flex-wrap: wrap; gap: .7rem; margin: 1.1rem 0; padding: 0; list-style: none; }
.facts li { flex: 1 1 9rem; background: var(--card); border-radius: 6px; padding: .6rem .9rem; }
.facts b { display: block; font-size: 1.6rem; line-height: 1.2; color: var(--strong); }
.facts span { color: var(--soft); font-size: .85rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: .3rem 0; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { font-weight: 600; color: var(--soft); vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--ground); }
tbody th { color: var(--ink); min-width: 6.5rem; max-width: 15rem; white-space: normal; overflow-wrap: break-word; }
td.best { font-weight: 700; color: var(--good); }
td small { color: var(--soft); font-weight: 400; font-size: .9em; }
.words th, .words td { text-align: left; vertical-align: top; }
.words td { white-space: normal; } .words td:nth-last-child(-n+2) { white-space: nowrap; }
.words td:nth-child(6) { min-width: 11rem; }
details { margin: 1rem 0; }
figure { margin: 1.4rem 0; }
figure svg { max-width: 100%; height: auto; display: block; }
figure .scroll svg { min-width: 34rem; }
figure .scroll svg text { font-family: "DejaVu Sans", Verdana, system-ui, sans-serif !important; }
figcaption { max-width: 46rem; margin-top: .3rem; }
.tree .scroll { max-height: 34rem; overflow: auto; border: 1px solid var(--line); border-radius: 6px; }
figure.tree .scroll svg { background: #fff; max-width: none; min-width: 0; }
pre { background: var(--card); padding: .8rem 1rem; border-radius: 6px; font-size: .85rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
details summary { cursor: pointer; color: var(--strong); }
nav { font-size: .9rem; } nav a { color: var(--strong); margin-right: 1rem; white-space: nowrap; }
.about th, .about td { vertical-align: top; }
.about td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
@media (max-width: 40rem) { body { padding: 1rem .8rem 3rem; } h1 { font-size: 1.35rem; }
  th, td { padding: .28rem .45rem; } }
@media print { :root { --ink: #000; --soft: #444; --ground: #fff; --card: #f4f4f4; --line: #bbb; --strong: #005a8e;
  --good: #00513a; } body { max-width: none; font-size: 10.5pt; padding: 0; } nav { display: none; }
  figure, table, tr, .summary { break-inside: avoid; } h2, h3 { break-after: avoid; } .scroll { overflow: visible; }
  figure .scroll svg { min-width: 0; }
  .tree .scroll { max-height: none; } figure.tree .scroll svg { max-width: 100%; max-height: 23cm; }
  table { font-size: 8pt; } th, td { padding: 2pt 4pt; white-space: normal; } }
"""


def page(report: Report, drawn: Mapping[str, str]) -> str:
    """The whole page; `drawn` holds the figures as SVG by name."""
    parts = [
        f"<h1>{escape(report.title)}</h1>",
        '<div class="summary">' + "".join(f"<p>{escape(line)}</p>" for line in report.summary) + "</div>",
        _facts(report.facts),
        _contents(report),
        *(_section(section, drawn, f"s{place}") for place, section in enumerate(report.sections)),
        _trees(report.trees),
        _commands(report.commands),
        _about(report.about),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )


def _facts(facts: list[tuple[str, str]]) -> str:
    return (
        '<ul class="facts">'
        + "".join(f"<li><b>{escape(figure)}</b><span>{escape(what)}</span></li>" for figure, what in facts)
        + "</ul>"
    )


def _contents(report: Report) -> str:
    links = {f"s{place}": section.title for place, section in enumerate(report.sections)}
    links |= {"trees": "Example trees", "commands": "Commands", "about": "Settings and provenance"}
    return "<nav>" + " ".join(f'<a href="#{name}">{escape(title)}</a>' for name, title in links.items()) + "</nav>"


def _section(section: Section, drawn: Mapping[str, str], name: str) -> str:
    parts = [f'<h2 id="{name}">{escape(section.title)}</h2>']
    parts += [f'<p class="soft">{escape(text)}</p>' for text in section.text.split("\n\n") if text]
    figures = [_figure(drawing, drawn[drawing.name]) for drawing in section.drawings]
    return "\n".join([*parts, *figures[:1], *map(_table, section.tables), *figures[1:]])


def _figure(drawing: Drawing, svg: str) -> str:
    caption = f"<figcaption>{escape(drawing.caption)}</figcaption>"
    return f'<h3>{escape(drawing.title)}</h3>\n<figure><div class="scroll">{svg}</div>{caption}</figure>'


def _table(table: Table) -> str:
    wordy = any(len(cell) > 30 for row in table.rows for cell in row[1:])
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    body = "\n".join(_row(row, place, table.best) for place, row in enumerate(table.rows))
    note = f'<p class="soft">{escape(table.note)}</p>' if table.note else ""
    kind = ' class="words"' if wordy else ""
    shown = (
        f'<div class="scroll"><table{kind}>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>{note}"
    )
    if table.folded:
        return f"<details><summary>{escape(table.title)}, in numbers</summary>{shown}</details>"
    return f"<h3>{escape(table.title)}</h3>\n{shown}"


def _row(row: list[str], place: int, best: frozenset[tuple[int, int]]) -> str:
    cells = [
        f'<td class="best">{_cell(cell)}</td>' if (place, column) in best else f"<td>{_cell(cell)}</td>"
        for column, cell in enumerate(row[1:], 1)
    ]
    return f'<tr><th scope="row">{_breakable(row[0])}</th>{"".join(cells)}</tr>'


def _breakable(method: str) -> str:
    """A method's name, which may be broken between its parts."""
    text = escape(method)
    for mark in (":", "/"):
        text = text.replace(mark, f"{mark}<wbr>")
    return text


def _cell(text: str) -> str:
    """An interval stands back behind its value."""
    value, space, rest = text.partition(" [")
    return f"{escape(value)} <small>[{escape(rest)}</small>" if space and rest.endswith("]") else escape(text)


def _trees(trees: list[tuple[str, str]]) -> str:
    from windfall.bench.report.figures import bare_svg

    parts = ['<h2 id="trees">Example trees</h2>']
    if not trees:
        return parts[0] + '<p class="soft">None were drawn; <code>windfall report DIR --trees</code> draws them.</p>'
    for place, (name, text) in enumerate(trees):
        drawing = bare_svg(text, f"tree{place}")
        parts.append(f'<h3>{escape(name)}</h3>\n<figure class="tree"><div class="scroll">{drawing}</div></figure>')
    return "\n".join(parts)


def _commands(commands: list[str]) -> str:
    lines = escape("\n".join(commands))
    return f'<h2 id="commands">Commands</h2>\n<p class="soft">What made this page.</p>\n<pre>{lines}</pre>'


def _about(about: list[tuple[str, str]]) -> str:
    rows = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in about)
    return (
        '<h2 id="about">Settings and provenance</h2>\n<div class="scroll"><table class="about"><tbody>'
        f"{rows}</tbody></table></div>"
    )
