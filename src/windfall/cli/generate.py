"""`windfall generate`: answer a prompt, or all prompts of a file; optionally compare with plain decoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from windfall import registry
from windfall.cli.answer_options import recorded
from windfall.cli.answers import AnswerFile, Conversation, answer_all, at_line
from windfall.cli.constraints import ConstraintOptions
from windfall.cli.declare import json_option, option, show_drafts_option
from windfall.cli.options import BatchOptions, ModelOptions, PolicyOptions, PromptOptions, SamplingOptions
from windfall.cli.session import (
    DIFFERENT,
    INTERRUPTED,
    Session,
    as_record,
    capture_graphs,
    check_chat,
    exit_if_interrupted,
    warm_up,
    with_seed,
)
from windfall.core.errors import InputError
from windfall.render import console

if TYPE_CHECKING:
    from windfall.engine.engine import Generation, Prompt


def generate(
    source: PromptOptions,
    model: ModelOptions,
    policy: PolicyOptions,
    sampling: SamplingOptions,
    constraint: ConstraintOptions,
    batch: BatchOptions,
    json: bool = json_option(),
    compare: bool = option(False, "First generate with plain decoding, then compare tokens and times."),
    show_drafts: bool = show_drafts_option(),
    out: Path | None = option(None, "Answer the lines of --file together, and write one JSON object per answer here."),
    resume: bool = option(
        False, "Answer the lines that have no answer in --out yet, with the same options as the others."
    ),
    logprobs: int | None = option(
        None, "Add log-probabilities to the JSON: of each token, and of this number of likeliest tokens at its place."
    ),
    logprobs_mode: str | None = option(
        None, "raw: log-probabilities of the model (default); processed: after penalties, temperature and filters."
    ),
) -> None:
    """Answer a prompt, or each line of a JSONL file (--file PROMPTS.jsonl).

    For a JSONL file, --json prints one JSON object per answer. With --out, the lines are answered together, and each
    answer is written to this file as soon as it is finished.
    """
    _check_output(source, json, show_drafts, compare, out, resume)
    lines = source.read_many() if source.has_many else []
    prompt = None if lines else source.read()
    keywords = sampling.keywords(**_logprobs_keywords(logprobs, logprobs_mode, json or out is not None))
    keywords |= constraint.keywords()
    answers = None
    if out is not None:
        options = recorded(source, model, sampling, constraint, logprobs=logprobs, logprobs_mode=logprobs_mode)
        answers = AnswerFile(out, lines, resume, options, sampling.seed)
        keywords["seed"] = answers.seed
    engine = model.load(policy.make(), batch)
    if answers is not None:
        answers.check_target(engine.target.name)
    if source.system is not None or any(line.system for line in lines):
        check_chat(engine)
    keywords = with_seed(keywords)
    names = {"drafter": model.drafter_name(engine.target), "policy": policy.name}
    session = Session(engine, names, keywords, source.raw, json, show_drafts)
    template = bool(getattr(engine.target.tokenizer, "chat_template", None))
    conversations = [Conversation(line, source.system, source.raw, template) for line in lines]
    if answers is not None:
        answer_all(session, conversations, answers)
        return
    capture_graphs(engine, keywords)
    for conversation in conversations:
        with at_line(conversation.line):
            _answer_turns(session, conversation)
    if compare:
        _compare(session, prompt)
    elif prompt is not None:
        _finish(session, session.answer(prompt))


def _finish(session: Session, generation: Generation, **more: object) -> None:
    """Print the JSON object if it is wanted; an interrupted text ends the command."""
    if session.json:
        console.print_json({**more, **session.report(generation)})
    exit_if_interrupted(generation)


def _check_output(
    source: PromptOptions, json: bool, show_drafts: bool, compare: bool, out: Path | None, resume: bool
) -> None:
    """Refuse options that contradict each other."""
    if json and show_drafts:
        raise InputError("--show-drafts colours a text, and --json prints none; choose one")
    if compare and source.has_many:
        raise InputError("--compare takes one prompt; for a file of prompts use `windfall bench run --tasks`")
    if resume and out is None:
        raise InputError("--resume continues the file of --out; give both")
    if out is not None and not source.has_many:
        raise InputError("--out takes the answers to a file of prompts; give one with --file PROMPTS.jsonl")
    if out is not None and (json or show_drafts):
        raise InputError("--out writes JSON to a file and prints no text; leave --json and --show-drafts out")


def _logprobs_keywords(logprobs: int | None, mode: str | None, writes_json: bool) -> dict[str, int | str]:
    """The keywords of `Engine.generate` for log-probabilities; none if they are not wanted."""
    if logprobs is None:
        if mode is not None:
            raise InputError("--logprobs-mode is for log-probabilities; give --logprobs, too")
        return {}
    if not writes_json:
        raise InputError("--logprobs adds log-probabilities to the JSON; give --json or --out, too")
    return {"logprobs": logprobs, **({} if mode is None else {"logprobs_mode": mode})}


def _answer_turns(session: Session, conversation: Conversation) -> None:
    """Answer the turns of one line, and show each text as it is generated."""
    session, line = replace(session, raw=conversation.raw), conversation.line
    while not conversation.ended:
        prompt, turn = conversation.next_prompt(), conversation.turn
        if not session.json:
            console.heading(line.id if len(line.turns) == 1 else f"{line.id}, turn {turn}")
        generation = session.answer(prompt)
        _finish(session, generation, id=line.id, line=line.number, turn=turn)
        conversation.add_answer(generation.text)


def _compare(session: Session, prompt: Prompt) -> None:
    """Plain decoding, then the chosen policy, with the same weights, prompt and seed."""
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
        speedup = console.speedup(plain.stats, chosen.stats)
        more = {"plain": as_record(plain), "equal": equal, "speedup": speedup}
        console.print_json({**session.report(chosen), **more})
    else:
        console.stdout().print(console.stats_table({"plain": plain.stats, name: chosen.stats}, baseline=plain.stats))
        console.print_agreement("plain", plain.token_ids, {name: chosen.token_ids}, engine.target.tokenizer)
    if not equal:
        raise typer.Exit(DIFFERENT)


def _compared(session: Session, prompt: Prompt, title: str) -> Generation:
    """One of the two texts; an interruption ends the comparison."""
    if not session.json:
        console.heading(title)
    generation = session.answer(prompt)
    if session.json and generation.finish_reason == INTERRUPTED:
        console.print_json(session.report(generation))
    exit_if_interrupted(generation)
    return generation
