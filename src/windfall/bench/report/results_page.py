"""One page from several runs: the papers' tables with our rows among theirs, then a section for each run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from windfall.bench import reading
from windfall.bench.disturbance import disturbances
from windfall.bench.papers.tables import paper_tables
from windfall.bench.reading import Run
from windfall.bench.report import compare, page, parts
from windfall.bench.report.parts import Drawing, Progress, Report, Section
from windfall.bench.results import summary as summary_of
from windfall.core.errors import InputError
from windfall.core.files import make_folder, read_text, replace_text

PREFACE = (
    "Every figure on this page comes from the records of a run, kept with its settings, versions and machine; the "
    "commands at the end repeat it and make the page."
)
SUMMARY = "summary"  # the heading of notes on the page as a whole
KEPT_DRAWINGS = ("speedup", "tau", "time")  # the figures of a run that are shown here
HOW = (
    "Models, drafters, hardware and baselines are others than the papers', so what can be compared is the order of the "
    "methods. The baseline here is plain decoding by the same code; on a GPU it runs in CUDA graphs as all others do, "
    "and is faster than the papers'. “Within the error”: the 95% interval of one method's figure over the other's, on "
    "the same prompts, contains 1."
)


def make(folders: Sequence[Path], out: str, notes: Path | None = None) -> Report:
    """The content of the page `out`; `notes` is a Markdown file with paragraphs under the keys of tables."""
    runs = [reading.load(folder) for folder in folders]
    names = [run.name for run in runs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"two of these folders are called '{twice}', and so would their figures be; rename one")
    remarks = _notes(notes) if notes is not None else {}
    sections = compare.sections(runs, remarks)
    if sections:
        sections = [Section("Compared with the papers", HOW), *sections, *_not_measured(runs)]
    about = [
        (f"{run.name}: {name}", value) for run in runs for name, value in page.provenance_lines(run, len(runs) > 1)
    ]
    own = [section for folder, run in zip(folders, runs, strict=True) for section in run_sections(folder, run)]
    summary = [PREFACE, *([remarks[SUMMARY]] if SUMMARY in remarks else []), *_warnings(runs)]
    command = ["windfall", "report", *names, *(["--notes", notes.name] if notes is not None else []), "--out", out]
    commands = [*(command for run in runs for command in page.commands(run)), shlex.join(command)]
    return Report("Results", summary, [], [*sections, *own], [], commands, about)


def _warnings(runs: Sequence[Run]) -> list[str]:
    """A line for each run and temperature whose times are wrong."""
    found = [(run.name, each) for run in runs for each in disturbances(run, summary_of(run))]
    return [f"In {name}, at temperature {each.temperature:g}, {each.warning}." for name, each in found]


def _notes(file: Path) -> dict[str, str]:
    remarks = compare.read_notes(read_text(file))
    known = [SUMMARY, *paper_tables()]
    if unknown := next((key for key in remarks if key not in known), None):
        raise InputError(
            f"'{file}' has something under '## {unknown}', which is no table; choose from {', '.join(known)}"
        )
    return remarks


def _not_measured(runs: Sequence[Run]) -> list[Section]:
    missing = compare.missing(runs)
    return [Section("Tables that were not measured", f"{'; '.join(missing)}.")] if missing else []


def run_sections(folder: Path, run: Run) -> list[Section]:
    """One section for a run of suites, which the papers' tables show already; all sections of any other run."""
    own = page.make(folder, run)
    marked = [replace(section, drawings=_kept_drawings(run, section)) for section in own.sections]
    if not run.settings.get("suite"):
        head = Section(f"Run {run.name}", "\n\n".join(own.summary))
        return [head, *(replace(section, title=f"{run.name}: {section.title}") for section in marked)]
    heats = marked[: len(run.temperatures)]
    tables = [replace(table, folded=True) for section in heats for table in section.tables[:1]]
    drawings = [drawing for section in heats for drawing in section.drawings[:1]]
    return [Section(f"Run {run.name}", "\n\n".join(own.summary), tables, drawings)]


def _kept_drawings(run: Run, section: Section) -> list[Drawing]:
    """The figures shown here, under names that no other run has."""
    kept = [drawing for drawing in section.drawings if drawing.name.partition("-")[0] in KEPT_DRAWINGS]
    return [replace(drawing, name=f"{run.name}-{drawing.name}") for drawing in kept]


def write(
    folders: Sequence[Path], file: Path, notes: Path | None = None, progress: Progress = lambda share: None
) -> None:
    """Write the page as HTML with its figures inside, or as Markdown with its figures in a folder of the same name."""
    from windfall.render import plots

    made = make(folders, file.name, notes)
    make_folder(file.parent)
    if any(section.drawings for section in made.sections):
        plots.check(file.with_name("figure.svg"))
    if file.suffix == ".md":
        parts.draw(made, file.with_suffix(""), progress)
        text = parts.as_markdown(made, file.stem)
    else:
        with TemporaryDirectory() as scratch:
            text = parts.as_html(made, parts.draw(made, Path(scratch), progress))
    replace_text(file, text)
    progress(1.0)
