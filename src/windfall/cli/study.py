"""`windfall bench study`: run a parameter sweep of a paper and draw its figure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from windfall.bench import tasks
from windfall.bench.paths import shorten
from windfall.cli.declare import argument, option, tasks_option, words
from windfall.cli.options import TargetOptions
from windfall.cli.session import command_line, stop_on_interrupt
from windfall.core.errors import InputError
from windfall.core.files import make_folder
from windfall.render import console


@dataclass
class StudyOptions:
    """The drafters and prompts of a study."""

    drafter: list[str] = option([], "Drafter: a name or a model. Repeatable for studies that compare drafters.")
    tasks: list[str] = tasks_option([])
    limit: int = option(12, "Prompts per task.", min=1)
    repeats: int | None = option(None, "Rounds over all prompts. Default: 3, or 1 with --no-timing.", min=1)
    max_new_tokens: int = option(128, "Maximum length of an answer.", min=1)
    seed: int = option(0, "Random seed; the same seed gives the same texts.")
    no_timing: bool = option(False, "Do not measure times; for tau only.")

    def settings(self) -> dict[str, Any]:
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


def study(
    model: TargetOptions,
    options: StudyOptions,
    name: str | None = argument(None, "Name of the study. Default: list the studies."),
    out: Path | None = option(None, "Folder for records and the figure; an interrupted study in it is continued."),
    draw: bool = option(False, "Run nothing; only draw the figure from the records in --out."),
) -> None:
    """Run a parameter sweep of a paper and draw its figure; without a name, list them."""
    from windfall.bench.papers import studies

    if name is None:
        for each in studies.STUDIES.values():
            console.stdout().print(Text.assemble((each.name, "bold"), f"  {each.title} ", (f"({each.source})", "dim")))
        return
    chosen = studies.find(name)
    if out is None:
        raise InputError(f"give a folder for the results: windfall bench study {name} --out DIR")
    for file in studies.draw(chosen, out) if draw else _run(chosen, out, model, options):
        print(file)


def _run(chosen: Any, out: Path, model: TargetOptions, options: StudyOptions) -> list[Path]:
    from windfall.bench.papers import studies
    from windfall.engine.loading import default_drafter
    from windfall.render import plots

    drafters = options.drafter
    chosen.contenders(chosen.legs[0], drafters)  # refuses a wrong number of them before a model is loaded
    make_folder(out)
    plots.check(out / f"{chosen.name}.svg")
    prompts = tasks.load_tasks(options.task_names, None if chosen.texts else options.limit)
    if chosen.texts:  # long texts, each made of all prompts
        prompts = tasks.limited(studies.long_texts(prompts), options.limit)
    target = model.load_target()
    if not drafters:
        drafters = [default_drafter(target)]
    more: dict[str, Any] = {"command": command_line(), "trust_remote_code": model.trust_remote_code}
    with (
        stop_on_interrupt("stopped; finished runs are kept, and the same command continues"),
        console.progress(chosen.title) as progress,
    ):
        return studies.run(chosen, out, options.settings(), prompts, target, drafters, progress, **more)
