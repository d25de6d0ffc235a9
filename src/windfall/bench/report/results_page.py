"""Several runs on one page: the papers' tables with our rows among theirs, then what each run was."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from windfall.bench import reading
from windfall.bench.disturbance import disturbances
from windfall.bench.papers import compare
from windfall.bench.papers.tables import EXHIBITS
from windfall.bench.reading import Run
from windfall.bench.report import html
from windfall.bench.report import page as report
from windfall.bench.report.parts import Report, Section
from windfall.bench.report.run_figures import Drawing
from windfall.bench.results import summary as summary_of
from windfall.core.errors import InputError
from windfall.core.files import make_folder, read_text, replace_text

PREFACE = (
    "Every figure on this page comes from the records of a run, kept with its settings, versions and machine; the "
    "commands at the end repeat it and make the page."
)
SUMMARY = "summary"  # the heading of notes on the page as a whole
SHOWN = ("speedup", "tau", "time")  # figures of a run
HOW = (
    "Models, drafters, hardware and baselines are others than the papers', so what can be compared is the order of the "
    "methods. The baseline here is plain decoding by the same code; on a GPU it runs in recorded passes as all others "
    "do, and is faster than the papers'. “Within the error”: the 95% interval of one method's figure over the other's, "
    "on the same prompts, holds 1."
)


def make(folders: Sequence[Path], out: str, notes: Path | None = None) -> Report:
    """What a page of this name tells of these runs; `notes` has paragraphs under the keys of tables, as Markdown."""
    runs = [reading.load(folder) for folder in folders]
    names = [run.name for run in runs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"two of these folders are called '{twice}', and so would their figures be; rename one")
    told = _notes(notes) if notes is not None else {}
    tables = compare.sections(runs, told)
    if tables:
        tables = [Section("Beside the papers", HOW), *tables, *_not_measured(runs)]
    about = [
        (f"{run.name}: {name}", value) for run in runs for name, value in report.provenance_lines(run, len(runs) > 1)
    ]
    own = [section for folder, run in zip(folders, runs, strict=True) for section in run_sections(folder, run)]
    summary = [PREFACE, *([told[SUMMARY]] if SUMMARY in told else []), *_warnings(runs)]
    page = ["windfall", "report", *names, *(["--notes", notes.name] if notes is not None else []), "--out", out]
    commands = [*(command for run in runs for command in report.commands(run)), shlex.join(page)]
    return Report("Results", summary, [], [*tables, *own], [], commands, about)


def _warnings(runs: Sequence[Run]) -> list[str]:
    """A line for each run and temperature whose times are wrong."""
    found = [(run.name, each) for run in runs for each in disturbances(run, summary_of(run))]
    return [f"In {name}, at temperature {each.temperature:g}, {each.warning}." for name, each in found]


def _notes(file: Path) -> dict[str, str]:
    told = compare.read_notes(read_text(file))
    known = [SUMMARY, *(exhibit.key for exhibit in EXHIBITS)]
    if unknown := next((key for key in told if key not in known), None):
        raise InputError(
            f"'{file}' has something under '## {unknown}', which is no table; choose from {', '.join(known)}"
        )
    return told


def _not_measured(runs: Sequence[Run]) -> list[Section]:
    missing = compare.missing(runs)
    return [Section("Tables that were not measured", f"{'; '.join(missing)}.")] if missing else []


def run_sections(folder: Path, run: Run) -> list[Section]:
    """A run of suites in one section, as the tables show it already; any other with all that its own page has."""
    own = report.make(folder)
    marked = [replace(section, drawings=_marked(run, section)) for section in own.sections]
    if not run.settings.get("suite"):
        head = Section(f"Run {run.name}", "\n\n".join(own.summary))
        return [head, *(replace(section, title=f"{run.name}: {section.title}") for section in marked)]
    heats = marked[: len(run.temperatures)]
    tables = [replace(table, folded=True) for section in heats for table in section.tables[:1]]
    drawings = [drawing for section in heats for drawing in section.drawings[:1]]
    return [Section(f"Run {run.name}", "\n\n".join(own.summary), tables, drawings)]


def _marked(run: Run, section: Section) -> list[Drawing]:
    """The figures that say most, under names that no other run has."""
    shown = [drawing for drawing in section.drawings if drawing.name.partition("-")[0] in SHOWN]
    return [replace(drawing, name=f"{run.name}-{drawing.name}") for drawing in shown]


def write(
    folders: Sequence[Path], file: Path, notes: Path | None = None, tell: Callable[[float], None] = lambda share: None
) -> None:
    """The page as HTML, figures inside, or as Markdown, with its figures in a folder of the same name."""
    from windfall.render import plots

    made = make(folders, file.name, notes)
    make_folder(file.parent)
    drawings = any(section.drawings for section in made.sections)
    if drawings:
        plots.check(file.with_name("figure.svg"))
    if file.suffix == ".md":
        place = file.with_suffix("")
        if drawings:
            make_folder(place)
            report.draw(made, place, tell)
        text = report.markdown(made, place.name)
    else:
        with TemporaryDirectory() as scratch:
            text = html.page(made, report.draw(made, Path(scratch), tell))
    replace_text(file, text)
    tell(1.0)
