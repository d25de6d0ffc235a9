"""`windfall report`: what a benchmark's records say, as a page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windfall.cli.options import ModelOptions, takes_records
from windfall.render import console


@takes_records
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders that `windfall bench run` wrote.", metavar="DIR")],
    model: ModelOptions,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The page, a .html or .md file; none: report.html in DIR. Several folders need it."),
    ] = None,
    notes: Annotated[
        Path | None,
        typer.Option("--notes", help="Markdown file with what to say under a table, by its name: ## salf-t1."),
    ] = None,
    trees: Annotated[
        bool, typer.Option("--trees", help="Draw an example tree for each method, with the model given here.")
    ] = False,
    prompt: Annotated[
        str, typer.Option("--prompt", help="What the example trees answer.")
    ] = "Count from one to twenty in words.",
) -> None:
    """Make a page from a benchmark's folder: summary, tables, figures; also report.md and report.csv in the folder.

    From several folders, with notes, or as a .md file: a page of the papers' tables with these runs' rows among theirs.
    """
    from windfall.bench.report import page as reports
    from windfall.bench.report import results_page
    from windfall.core.types import InputError

    if out is not None and out.suffix not in (".html", ".md"):
        raise InputError(f"--out is a .html or a .md file, not '{out}'")
    if out is None and (len(folders) > 1 or notes is not None):
        raise InputError("several folders, or notes, make a page of their own: --out FILE.html or --out FILE.md")
    if trees:
        for folder in folders:
            _draw_trees(folder, model, prompt)
    with console.progress("Drawing") as progress:
        if out is not None and (out.suffix == ".md" or len(folders) > 1 or notes is not None):
            results_page.write(folders, out, notes, progress)
            written = [out]
        else:
            written = reports.write(folders[0], out, progress)
    for file in written:
        print(file)


def _draw_trees(folder: Path, model: ModelOptions, prompt: str) -> None:
    from windfall.bench.methods import DrafterSpec
    from windfall.bench.reading import load
    from windfall.bench.report import page as reports

    run = load(folder)
    engine = model.load("none")
    drafter = DrafterSpec(model.drafter_name).short_name
    with console.progress("Drawing trees") as progress:
        reports.draw_trees(engine, drafter, run, folder, prompt, {"max_new_tokens": 48}, progress)
