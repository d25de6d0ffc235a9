"""`windfall bench study`: one of the papers' sweeps, run and drawn."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from windfall.cli.options import loading_model, takes_records, words
from windfall.cli.session import ON_INTERRUPT
from windfall.core.files import make_folder
from windfall.render import console


@dataclass
class StudyOptions:
    """What a study is run on."""

    target: Annotated[
        str | None, typer.Option("--target", help="Folder, GGUF file or hub id of the model; none: the embedded one.")
    ] = None
    drafter: Annotated[
        list[str], typer.Option("--drafter", help="Drafter by name or a model; repeatable where drafters are compared.")
    ] = field(default_factory=list)
    tasks: Annotated[
        list[str],
        typer.Option(
            "--tasks", help="JSONL files, builtin, or known datasets, separated by commas; repeatable.", metavar="A,B,C"
        ),
    ] = field(default_factory=list)
    limit: Annotated[int, typer.Option("--limit", help="Prompts of each task.", min=1)] = 12
    repeats: Annotated[
        int | None, typer.Option("--repeats", help="Rounds over all prompts; 3, or 1 with --no-timing.", min=1)
    ] = None
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Length of an answer at the most.", min=1)] = (
        128
    )
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same texts.")] = 0
    no_timing: Annotated[bool, typer.Option("--no-timing", help="Keep no times: for tau alone.")] = False
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda, mps; none: the best there is.")] = None
    dtype: Annotated[str | None, typer.Option("--dtype", help="none: what suits the device.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False

    def settings(self) -> dict[str, Any]:
        from windfall.bench.paths import shorten

        return {
            "tasks": tuple(map(shorten, self.task_names)),
            "limit": self.limit,
            "repeats": self.repeats or (1 if self.no_timing else 3),
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
            "timing": not self.no_timing,
        }

    @property
    def task_names(self) -> list[str]:
        return words(self.tasks, "--tasks") or ["builtin"]

    @property
    def drafters(self) -> list[str]:
        from windfall.engine.loading import default_drafter

        return self.drafter or [default_drafter(self.target)]


@takes_records
def study(
    options: StudyOptions,
    name: Annotated[str | None, typer.Argument(help="Which study; none: list them.", show_default=False)] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for records and figure; one that exists goes on.")
    ] = (None),
    draw: Annotated[bool, typer.Option("--draw", help="Run nothing, only draw what is in --out.")] = False,
) -> None:
    """Run one of the papers' sweeps and draw its figure; without a name, list them."""
    from windfall.bench.papers import studies
    from windfall.core.types import InputError

    if name is None:
        _list()
        return
    chosen = studies.find(name)
    if out is None:
        raise InputError(f"where to? give a folder: windfall bench study {name} --out DIR")
    files = studies.draw(chosen, out) if draw else _run(chosen, out, options)
    for file in files:
        print(file)


def _run(chosen: Any, out: Path, options: StudyOptions) -> list[Path]:
    from windfall.bench import tasks
    from windfall.bench.papers import studies
    from windfall.engine import loading
    from windfall.render import plots

    drafters = options.drafter if chosen.drafters else options.drafters
    chosen.contenders(chosen.legs[0], drafters)  # refuses before anything is loaded
    make_folder(out)
    plots.check(out / f"{chosen.name}.svg")
    prompts = tasks.load_tasks(options.task_names, None if chosen.texts else options.limit)
    if chosen.texts:  # made of all prompts, so that they are long
        prompts = tasks.limited(studies.long_texts(prompts), options.limit)
    how: dict[str, Any] = {"device": options.device, "dtype": options.dtype}
    with loading_model():
        target = loading.as_target(options.target, **how, trust_remote_code=options.trust_remote_code)
    more: dict[str, Any] = {
        "command": ["windfall", *sys.argv[1:]],
        "trust_remote_code": options.trust_remote_code,
    }
    try:
        with console.progress(chosen.title) as progress:
            return studies.run(chosen, out, options.settings(), prompts, target, drafters, progress, **more)
    except KeyboardInterrupt:
        console.note("stopped; what is finished is kept, and the same command goes on from there")
        raise typer.Exit(ON_INTERRUPT) from None


def _list() -> None:
    from windfall.bench.papers.studies import STUDIES

    for each in STUDIES.values():
        console.stdout().print(Text.assemble((each.name, "bold"), f"  {each.title} ", (f"({each.source})", "dim")))
