"""`windfall generate`: answer a prompt, if asked beside plain decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from windfall import console
from windfall.cli.options import (
    Json,
    ModelOptions,
    PolicyOptions,
    PromptOptions,
    SamplingOptions,
    ShowDrafts,
    takes_records,
)
from windfall.cli.session import (
    DIFFERENT,
    INTERRUPTED,
    Session,
    check_chat,
    exit_if_interrupted,
    record,
    warm_up,
    with_seed,
)

if TYPE_CHECKING:
    from windfall.engine import Generation, Prompt


@takes_records
def generate(
    source: PromptOptions,
    model: ModelOptions,
    policy: PolicyOptions,
    sampling: SamplingOptions,
    json: Json = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode plainly first, then compare tokens and times.")
    ] = False,
    show_drafts: ShowDrafts = False,
) -> None:
    """Answer a prompt."""
    from windfall.records import InputError

    if json and show_drafts:
        raise InputError("--show-drafts colours a text, and --json prints none; choose one")
    prompt, keywords = source.read(), sampling.keywords()
    engine = model.load(policy.make())
    if source.system is not None:
        check_chat(engine)
    names = {"drafter": model.drafter_name, "policy": policy.name}
    keywords = with_seed(keywords)
    record(engine, keywords)
    session = Session(engine, names, keywords, source.raw, json, show_drafts)
    if compare:
        _compare(session, prompt)
        return
    generation = session.answer(prompt)
    if json:
        console.print_json(session.report(generation))
    exit_if_interrupted(generation)


def _compare(session: Session, prompt: Prompt) -> None:
    """Plain decoding, then the chosen policy, on the same weights, prompt and seed."""
    from windfall import registry

    engine, name = session.engine, session.names["policy"]
    policies = {"none": registry.policy("none"), "chosen": engine.policy}
    for policy in policies.values():
        engine.policy = policy
        warm_up(engine, prompt, session.raw, session.sampling)
    engine.policy = policies["none"]
    plain = _compared(replace(session, names={**session.names, "policy": "none"}), prompt, "plain")
    engine.policy = policies["chosen"]
    chosen = _compared(session, prompt, name)
    equal = plain.token_ids == chosen.token_ids
    if session.json:
        gain = console.speedup(plain.stats, chosen.stats)
        more = {"plain": console.as_record(plain), "equal": equal, "speedup": gain}
        console.print_json({**session.report(chosen), **more})
    else:
        console.comparison(plain, chosen, name, engine)
    if not equal:
        raise typer.Exit(DIFFERENT)


def _compared(session: Session, prompt: Prompt, title: str) -> Generation:
    """One side of a comparison, which ends with it if it is interrupted."""
    if not session.json:
        console.heading(title)
    generation = session.answer(prompt)
    if session.json and generation.finish_reason == INTERRUPTED:
        console.print_json(session.report(generation))
    exit_if_interrupted(generation)
    return generation
