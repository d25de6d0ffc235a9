"""`windfall tune`: the fastest options of a policy, found by measuring."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from windfall.cli.options import Json, ModelOptions, takes_records, words
from windfall.cli.session import ON_INTERRUPT
from windfall.core.errors import InputError
from windfall.core.files import make_folder
from windfall.render import console
from windfall.render.tables import Figures

if TYPE_CHECKING:
    from windfall.bench.tune import Result

SHOWN = 12  # lines of the table


@takes_records
def tune(
    model: ModelOptions,
    out: Annotated[Path, typer.Option("--out", help="The preset file to write, for --preset.")] = Path("tuned.json"),
    policy: Annotated[str, typer.Option("--policy", help="Which policy: a name, or FILE.py:CLASS.")] = "beam",
    search: Annotated[
        str, typer.Option("--search", help="grid: every depth with every size; halving: random settings, halved.")
    ] = "halving",
    vary: Annotated[
        str | None,
        typer.Option("--vary", help="Options to search over; none: every number.", metavar="A,B"),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="An option that stays as it is; repeatable.", metavar="NAME=VALUE")
    ] = None,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--values", help="What a grid goes over, instead of depth and nodes; repeatable.", metavar="NAME=A,B"
        ),
    ] = None,
    candidates: Annotated[int, typer.Option("--candidates", help="Settings that halving starts with.", min=2)] = 16,
    tasks: Annotated[
        list[str] | None,
        typer.Option("--tasks", help="JSONL files, builtin, or known datasets, separated by commas; repeatable."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", help="Prompts of each task.", min=1)] = 8,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Length of an answer.", min=1)] = 64,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.", min=0)] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the texts and of the random settings.")] = 0,
    json: Json = False,
) -> None:
    """Find a policy's fastest options here by measured tokens per second, and write them as a preset file.

    What was measured is kept beside it (FILE.search); the same command goes on from there.
    """
    from windfall import registry
    from windfall.bench import tune as tuning
    from windfall.bench.methods import DrafterSpec
    from windfall.bench.tasks import load_tasks
    from windfall.core.options import split_settings
    from windfall.engine.loading import attach_costs

    if out.is_dir():
        raise InputError(f"--out is the file to write, and '{out}' is a folder")
    fixed = split_settings(settings or [])
    names, given = tuple(words([vary] if vary else [], "--vary")), tuning.parse_values(values or [])
    chosen = tuning.candidates(policy, search, names, candidates, seed, fixed, given)
    asked = load_tasks(words(tasks or [], "--tasks") or ["builtin"], limit)
    sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    make_folder(out.parent)
    engine = model.load("none")
    attach_costs(engine, registry.policy(policy, **fixed))
    prompts = tuning.first_questions(engine, asked, max_new_tokens)
    drafter = DrafterSpec(model.drafter_name, split_settings(model.drafter_settings))
    about = {"policy": policy, "search": search, "fixed": fixed}
    about |= tuning.describe(engine, drafter, prompts, sampling)
    kept = tuning.Search.open(out.with_name(out.name + ".search"), about)
    measure = tuning.timed(engine, policy, fixed, prompts, sampling)
    how = tuning.sweep if search == "grid" else tuning.halving
    try:
        with console.progress(f"Tuning {policy}") as progress:
            found = how(kept, chosen, len(prompts), measure, progress)
    except KeyboardInterrupt:
        console.note(f"stopped; {len(kept.measured)} measurements are kept, and the same command goes on from there")
        raise typer.Exit(ON_INTERRUPT) from None
    tuning.write_preset(out, policy, fixed, found[0], about)
    _tell(found, out, json)


def _tell(found: list[Result], out: Path, json: bool) -> None:
    if json:
        rows: list[dict[str, Any]] = [vars(result) for result in found]
        console.print_json({"preset": str(out), "results": rows}, indent=2)
        return
    table = Figures(("settings", "prompts", "tokens/s"), least=("prompts",))
    for result in found[:SHOWN]:
        table.add(_worded(result.settings), str(result.prompts), f"{result.speed:.1f}")
    console.stdout().print(table)
    if len(found) > SHOWN:
        console.note(f"and {len(found) - SHOWN} slower ones")
    console.stdout().print(Text(f"Use it: --preset {out}"))


def _worded(settings: dict[str, Any]) -> Text:
    """`depth=4 k=8`, broken between settings where a line is too short for them."""
    values = {name: str(value) if isinstance(value, bool | str) else f"{value:g}" for name, value in settings.items()}
    return Text(" ".join(f"{name}={value}" for name, value in values.items()))
