"""`windfall profile` and `windfall compare`: what passes cost here, and which policy is fastest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windfall.bench.methods import parse_policies
from windfall.cli.options import Json, ModelOptions, PromptOptions, SamplingOptions, takes_records
from windfall.cli.session import DIFFERENT, check_chat, warm_up, with_seed
from windfall.render import console

if TYPE_CHECKING:
    from windfall.engine.engine import Engine, Generation, Prompt
    from windfall.policies.base import TreePolicy


@takes_records
def profile(
    model: ModelOptions,
    full: Annotated[bool, typer.Option("--full", help="More sizes and repeats; takes a minute.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Measure even if there is a profile.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the curves into this PNG, SVG or PDF file.")] = None,
    json: Json = False,
) -> None:
    """Measure what draft and verify passes cost on this machine."""
    from windfall.engine import profiling
    from windfall.render import plots

    if plot is not None:
        plots.check(plot)
    engine = model.load("none")
    with console.progress("Measuring") as progress:
        measured = profiling.load_or_measure(engine, quick=not full, again=again, progress=progress)
    if plot is not None:
        plots.plot_costs(measured, plot)
    if json:
        console.print_json(measured.as_dict(), indent=2)
        return
    console.cost_tables(measured)
    if not measured.steady:
        console.note("this machine was busy with other work: the figures are rough")


@takes_records
def calibrate(
    model: ModelOptions,
    sampling: SamplingOptions,
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; none: a few of our own.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw reliability into this PNG, SVG or PDF file.")
    ] = None,
    json: Json = False,
) -> None:
    """Show how far the drafter's confidence can be believed, before and after calibration."""
    from windfall import registry
    from windfall.core.types import InputError
    from windfall.costs.acceptance import Calibrator, Reliability
    from windfall.prompts.samples import SAMPLES
    from windfall.render import plots

    if plot is not None:
        plots.check(plot)
    keywords, engine, steps = with_seed(sampling.keywords(), tell=not json), model.load("none"), []
    engine.policy = registry.policy("beam")
    texts = list(prompts or SAMPLES)
    with console.progress("Decoding") as progress:
        for done, text in enumerate(texts, 1):
            steps += engine.generate(text, **keywords).steps
            progress(done / len(texts))
    found = Reliability.of(steps, Calibrator())
    if not len(found.accepted):
        raise InputError("nothing was drafted, so there is nothing to judge; give longer prompts or another drafter")
    if plot is not None:
        plots.plot_reliability(found, plot)
    if json:
        console.print_json({**found.as_dict(), "seed": keywords["seed"]}, indent=2)
    else:
        console.reliability(found)


@takes_records
def compare(
    source: PromptOptions,
    model: ModelOptions,
    sampling: SamplingOptions,
    policies: Annotated[
        str | None,
        typer.Option(
            "--policies",
            help="Names, presets, FILE.py:CLASS, or any of these with settings (beam:depth=4:k=4), separated by "
            "commas; or all.",
            metavar="A,B,C",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Timed generations of each policy.", min=1)] = 3,
    json: Json = False,
) -> None:
    """Time policies side by side on one prompt; plain decoding is always among them."""
    from windfall.engine.loading import DEFAULT_POLICY, attach_costs

    prompt, keywords = source.read(), with_seed(sampling.keywords(), tell=not json)
    contenders = parse_policies(DEFAULT_POLICY if policies is None else policies)
    engine = model.load("none")
    attach_costs(engine, *contenders.values())
    if source.system is not None:
        check_chat(engine)
    runs = _race(engine, prompt, source.raw, keywords, contenders, rounds)
    wanted = runs["none"][0].token_ids
    wrong = {name: found for name, own in runs.items() for found in own if found.token_ids != wanted}
    middle = {name: sorted(own, key=lambda run: run.stats.seconds)[(len(own) - 1) // 2] for name, own in runs.items()}
    if json:
        console.print_json(_report(engine, model, middle, wrong, rounds))
    else:
        console.standings({name: run.stats for name, run in middle.items()})
        console.agreement(wanted, {name: run.token_ids for name, run in wrong.items()}, engine)
    if wrong:
        raise typer.Exit(DIFFERENT)


def _race(
    engine: Engine, prompt: Prompt, raw: bool, sampling: dict[str, Any], contenders: dict[str, TreePolicy], rounds: int
) -> dict[str, list[Generation]]:
    """Every policy in turn, `rounds` times over, after a warm-up that is not timed."""
    runs: dict[str, list[Generation]] = {name: [] for name in contenders}
    turns = len(contenders) * (rounds + 1)
    with console.progress("Comparing") as progress:
        for turn in range(turns):
            name = list(contenders)[turn % len(contenders)]
            engine.policy = contenders[name]
            if turn < len(contenders):
                warm_up(engine, prompt, raw, sampling)
            else:
                runs[name].append(engine.generate(prompt, raw=raw, **sampling))
            progress((turn + 1) / turns)
    return runs


def _report(
    engine: Engine, model: ModelOptions, runs: dict[str, Generation], wrong: dict[str, Generation], rounds: int
) -> dict[str, Any]:
    plain = runs["none"].stats
    rows = {
        name: {
            **run.stats.as_dict(),
            "mean_rows": run.stats.rows / run.stats.cycles,
            "speedup": console.speedup(plain, run.stats),
            "equal": name not in wrong,
        }
        for name, run in runs.items()
    }
    names = {"target": engine.target.name, "drafter": model.drafter_name}
    text = {"seed": plain.seed, "token_ids": runs["none"].token_ids}
    return {**names, "rounds": rounds, "equal": not wrong, **text, "policies": rows}
