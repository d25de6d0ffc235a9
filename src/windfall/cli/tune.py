"""`windfall tune`: find the fastest options of a policy by measuring."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from windfall import registry
from windfall.bench.tasks import load_tasks
from windfall.cli.declare import json_option, option, tasks_option, words
from windfall.cli.options import ModelOptions
from windfall.cli.session import check_result_file, stop_on_interrupt
from windfall.core.options import split_settings
from windfall.render import console
from windfall.render.tables import Figures

if TYPE_CHECKING:
    from windfall.bench.tune import Result

MAX_SHOWN_RESULTS = 12
RESULT_KEYS = ("policy", "settings")  # of a preset file


def tune(
    model: ModelOptions,
    out: Path = option(Path("tuned.json"), "Preset file to write, for --preset."),
    policy: str = option("beam", "Policy to tune: a name, or FILE.py:CLASS."),
    search: str = option(
        "halving",
        "How to search: grid (all combinations) or halving (random settings; each round drops the slower half).",
    ),
    vary: str | None = option(None, "Options to search over. Default: all numeric options.", metavar="A,B"),
    settings: list[str] = option([], "Keep an option at this value. Repeatable.", "--set", metavar="NAME=VALUE"),
    values: list[str] = option(
        [], "Values of an option for the grid, instead of depth and nodes. Repeatable.", metavar="NAME=A,B"
    ),
    candidates: int = option(16, "Number of settings that halving starts with.", min=2),
    tasks: list[str] = tasks_option([]),
    limit: int = option(8, "Prompts per task.", min=1),
    max_new_tokens: int = option(64, "Maximum length of an answer.", min=1),
    temperature: float = option(0.0, "Sampling temperature; 0 is greedy.", min=0),
    seed: int = option(0, "Random seed of the texts and of the random settings."),
    json: bool = json_option(),
) -> None:
    """Find the options of a policy with the most tokens per second, and write them to a preset file.

    Measurements are kept next to the file (FILE.search); the same command continues an interrupted search.
    """
    from windfall.bench import tune as tuning
    from windfall.bench.runner import first_questions
    from windfall.engine.loading import attach_costs

    fixed = split_settings(settings)
    names, given = tuple(words([vary] if vary else [], "--vary")), tuning.parse_values(values)
    chosen = tuning.candidates(policy, search, names, candidates, seed, fixed, given)
    loaded = load_tasks(words(tasks, "--tasks") or ["builtin"], limit)
    check_result_file(out, "tune", RESULT_KEYS)
    sampling: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    engine = model.load("none")
    attach_costs(engine, registry.policy(policy, **fixed))
    prompts = [case.ids for case in first_questions(loaded, engine, **sampling)]
    about = {"policy": policy, "search": search, "fixed": fixed}
    about |= tuning.describe(engine, model.drafter_spec(engine.target), prompts, sampling)
    kept = tuning.Search.open(out.with_name(out.name + ".search"), about)
    measure = tuning.timed(engine, policy, fixed, prompts, sampling)
    how = tuning.sweep if search == "grid" else tuning.halving
    with (
        stop_on_interrupt("stopped; the measurements are kept, and the same command continues"),
        console.progress(f"Tuning {policy}") as progress,
    ):
        found = how(kept, chosen, len(prompts), measure, progress)
    tuning.write_preset(out, policy, fixed, found[0], about)
    _show(found, out, json)


def _show(found: list[Result], out: Path, json: bool) -> None:
    if json:
        console.print_json({"preset": str(out), "results": [vars(result) for result in found]}, indent=2)
        return
    table = Figures(("settings", "prompts", "tokens/s"), least=("prompts",))
    for result in found[:MAX_SHOWN_RESULTS]:
        table.add(_settings_text(result.settings), str(result.prompts), f"{result.speed:.1f}")
    console.stdout().print(table)
    if len(found) > MAX_SHOWN_RESULTS:
        console.note(f"and {len(found) - MAX_SHOWN_RESULTS} slower ones")
    console.stdout().print(Text(f"Use it: --preset {out}"))


def _settings_text(settings: dict[str, Any]) -> Text:
    """`depth=4 k=8`; narrow terminals break it between settings."""
    values = {name: str(value) if isinstance(value, bool | str) else f"{value:g}" for name, value in settings.items()}
    return Text(" ".join(f"{name}={value}" for name, value in values.items()))
