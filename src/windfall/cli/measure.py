"""`windfall profile`, `calibrate` and `compare`: costs of passes, the drafter's confidence, speed of policies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from windfall import registry
from windfall.bench.methods import parse_policies
from windfall.cli.declare import argument, json_option, option, plot_option
from windfall.cli.options import ModelOptions, PromptOptions, SamplingOptions
from windfall.cli.session import DIFFERENT, check_chat, warm_up, with_seed
from windfall.core.errors import InputError
from windfall.prompts.samples import SAMPLES
from windfall.render import console

if TYPE_CHECKING:
    from windfall.engine.engine import Engine, Generation, Prompt
    from windfall.policies.base import TreePolicy


def profile(
    model: ModelOptions,
    full: bool = option(False, "Measure more sizes, more times; takes a minute."),
    again: bool = option(False, "Measure even if a saved profile exists."),
    plot: Path | None = plot_option("the cost curves"),
    json: bool = json_option(),
) -> None:
    """Measure the costs of draft and verify passes on this machine."""
    from windfall.engine import profiling
    from windfall.render import plots

    plots.check(plot)
    engine = model.load("none")
    with console.progress("Measuring") as progress:
        measured = profiling.load_or_measure(engine, quick=not full, again=again, progress=progress)
    if plot is not None:
        plots.plot_costs(measured.costs, measured.about, plot)
    if json:
        console.print_json(measured.as_dict(), indent=2)
        return
    console.print_costs(measured.costs, measured.about, measured.rounds)
    if not measured.steady:
        console.note("the machine was busy with other work, so these times are approximate")


def calibrate(
    model: ModelOptions,
    sampling: SamplingOptions,
    prompts: list[str] | None = argument(None, "Prompts. Default: six built-in prompts."),
    plot: Path | None = plot_option("reliability diagrams"),
    json: bool = json_option(),
) -> None:
    """Compare the drafter's confidence with the acceptance rate, before and after calibration."""
    from windfall.costs.acceptance import Calibrator, Reliability
    from windfall.render import plots

    plots.check(plot)
    keywords, engine, steps = with_seed(sampling.keywords(), announce=not json), model.load("none"), []
    engine.policy = registry.policy("beam")
    texts = list(prompts or SAMPLES)
    with console.progress("Decoding") as progress:
        for done, text in enumerate(texts, 1):
            steps += engine.generate(text, **keywords).steps
            progress(done / len(texts))
    found = Reliability.of(steps, Calibrator())
    if not len(found.accepted):
        raise InputError("nothing was drafted, so nothing can be compared; give longer prompts or another drafter")
    if plot is not None:
        plots.plot_reliability(found, plot)
    if json:
        console.print_json({**found.as_dict(), "seed": keywords["seed"]}, indent=2)
    else:
        console.print_reliability(found)


def compare(
    source: PromptOptions,
    model: ModelOptions,
    sampling: SamplingOptions,
    policies: str | None = option(
        None,
        "Policies, presets or FILE.py:CLASS, with settings after colons (beam:depth=4:k=4); or all.",
        metavar="A,B,C",
    ),
    rounds: int = option(3, "Timed generations of each policy.", min=1),
    json: bool = json_option(),
) -> None:
    """Time policies on one prompt, next to plain decoding."""
    from windfall.engine.loading import DEFAULT_POLICY, attach_costs

    prompt, keywords = source.read(), with_seed(sampling.keywords(), announce=not json)
    candidates = parse_policies(DEFAULT_POLICY if policies is None else policies)
    engine = model.load("none")
    attach_costs(engine, *candidates.values())
    if source.system is not None:
        check_chat(engine)
    runs = _time_policies(engine, prompt, source.raw, keywords, candidates, rounds)
    wanted = runs["none"][0].token_ids
    wrong = {name: found for name, own in runs.items() for found in own if found.token_ids != wanted}
    medians = {name: sorted(own, key=lambda run: run.stats.seconds)[(len(own) - 1) // 2] for name, own in runs.items()}
    if json:
        console.print_json(_report(engine, model, medians, wrong, rounds))
    else:
        console.print_policy_stats({name: run.stats for name, run in medians.items()})
        others = {name: run.token_ids for name, run in wrong.items()}
        console.print_agreement("none", wanted, others, engine.target.tokenizer)
    if wrong:
        raise typer.Exit(DIFFERENT)


def _time_policies(
    engine: Engine, prompt: Prompt, raw: bool, sampling: dict[str, Any], policies: dict[str, TreePolicy], rounds: int
) -> dict[str, list[Generation]]:
    """Run the policies in turn, `rounds` times each, after a warm-up that is not timed."""
    runs: dict[str, list[Generation]] = {name: [] for name in policies}
    turns = len(policies) * (rounds + 1)
    with console.progress("Comparing") as progress:
        for turn in range(turns):
            name = list(policies)[turn % len(policies)]
            engine.policy = policies[name]
            if turn < len(policies):
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
    names = {"target": engine.target.name, "drafter": model.drafter_name(engine.target)}
    text = {"seed": plain.seed, "token_ids": runs["none"].token_ids}
    return {**names, "rounds": rounds, "equal": not wrong, **text, "policies": rows}
