"""`windfall generate`: answer a prompt, if asked beside plain decoding, or all prompts of a file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from windfall.cli.options import (
    Json,
    ModelOptions,
    PolicyOptions,
    PromptOptions,
    SamplingOptions,
    ShowDrafts,
    message,
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
from windfall.render import console

if TYPE_CHECKING:
    from windfall.engine.engine import Generation, Prompt
    from windfall.prompts.files import Asked


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
    """Answer a prompt, or every line of a JSONL file (--file PROMPTS.jsonl); --json then prints a line an answer."""
    from windfall.core.types import InputError

    if json and show_drafts:
        raise InputError("--show-drafts colours a text, and --json prints none; choose one")
    if compare and source.several:
        raise InputError("--compare takes one prompt; for a file of prompts there is `windfall bench run --tasks`")
    asked = source.read_all() if source.several else []
    prompt, keywords = None if asked else source.read(), sampling.keywords()
    engine = model.load(policy.make())
    if source.system is not None or any(each.system for each in asked):
        check_chat(engine)
    names = {"drafter": model.drafter_name, "policy": policy.name}
    keywords = with_seed(keywords)
    record(engine, keywords)
    session = Session(engine, names, keywords, source.raw, json, show_drafts)
    if asked:
        _answer_all(session, asked, source.system)
        return
    if compare:
        _compare(session, prompt)
        return
    generation = session.answer(prompt)
    if json:
        console.print_json(session.report(generation))
    exit_if_interrupted(generation)


def _answer_all(session: Session, asked: list[Asked], system: str | None) -> None:
    """Answer the lines of a file in order; Ctrl-C ends it, and what was printed is complete up to there."""
    from windfall.core.types import InputError

    for each in asked:
        try:
            _converse(session, each, system)
        except InputError as error:
            raise InputError(f"{each.place}: {error}") from error


def _converse(session: Session, asked: Asked, system: str | None) -> None:
    """Answer the turns of one line, each with the answers before it."""
    own = replace(session, raw=session.raw or asked.raw)
    plain = own.raw or not getattr(session.engine.target.tokenizer, "chat_template", None)
    opening = asked.system or system
    said = [] if opening is None else [message("system", opening)]
    for turn, text in enumerate(asked.turns, 1):
        said.append(message("user", text))
        prompt = "\n\n".join(each["content"] for each in said) if plain else said
        if not session.json:
            console.heading(asked.id if len(asked.turns) == 1 else f"{asked.id}, turn {turn}")
        generation = own.answer(prompt)
        if session.json:
            console.print_json({"id": asked.id, "line": asked.number, "turn": turn, **session.report(generation)})
        exit_if_interrupted(generation)
        said.append(message("assistant", generation.text))


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
