"""`windfall report`: a page with the results of benchmarks."""

from __future__ import annotations

from pathlib import Path

from windfall.cli.declare import argument, option
from windfall.cli.options import ModelOptions
from windfall.core.errors import InputError
from windfall.render import console

EXAMPLE_TOKENS = 48  # of the text whose trees are drawn


def report(
    model: ModelOptions,
    folders: list[Path] = argument(..., "Folders that `windfall bench run` wrote.", metavar="DIR"),
    out: Path | None = option(
        None, "The page: a .html or .md file. Default: report.html in DIR. Required for several folders."
    ),
    notes: Path | None = option(
        None, "Markdown file with notes for the tables; each note has the table's name as its heading (## salf-t1)."
    ),
    trees: bool = option(False, "Draw an example tree for each method, with the model given here."),
    prompt: str = option("Count from one to twenty in words.", "Prompt of the example trees."),
) -> None:
    """Make a page from the folder of a benchmark, with summary, tables and figures.

    The folder also gets report.md and report.csv. Several folders, --notes or a .md file make a page of the papers'
    tables instead, with the rows of these runs next to the published ones.
    """
    from windfall.bench.report import page, results_page

    if out is not None and out.suffix not in (".html", ".md"):
        raise InputError(f"--out is a .html or a .md file, not '{out}'")
    several = len(folders) > 1 or notes is not None
    if out is None and several:
        raise InputError("several folders or --notes need a name for the page: --out FILE.html or --out FILE.md")
    if trees:
        for folder in folders:
            _draw_trees(folder, model, prompt)
    with console.progress("Drawing") as progress:
        if out is not None and (several or out.suffix == ".md"):
            results_page.write(folders, out, notes, progress)
            written = [out]
        else:
            written = page.write(folders[0], out, progress)
    for file in written:
        print(file)


def _draw_trees(folder: Path, model: ModelOptions, prompt: str) -> None:
    from windfall.bench.methods import DrafterSpec
    from windfall.bench.reading import load
    from windfall.bench.report import page

    run = load(folder)
    engine = model.load("none")
    drafter = DrafterSpec(model.drafter_name(engine.target)).short_name
    with console.progress("Drawing trees") as progress:
        page.draw_trees(engine, drafter, run, folder, prompt, {"max_new_tokens": EXAMPLE_TOKENS}, progress)
