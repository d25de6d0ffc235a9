"""`windfall audit`: how often texts differ from plain decoding's, and how close those calls were."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from windfall.cli.options import Json, ModelOptions, PolicyOptions, takes_records, words
from windfall.cli.session import DIFFERENT, ON_INTERRUPT
from windfall.core.wording import counted
from windfall.render import console
from windfall.render.tables import Figures

if TYPE_CHECKING:
    from windfall.bench.inspect.audit import Audit, Case, Comparison
    from windfall.bench.tasks import Prompt
    from windfall.engine.engine import Engine

SHOWN = 5  # divergences that are named


def _option(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="Audit", **more)


@dataclass
class AuditOptions:
    """Which conversations, and how their answers are drawn."""

    tasks: Annotated[
        list[str],
        _option("--tasks", "JSONL files, builtin, or known datasets, separated by commas; repeatable.", metavar="A,B"),
    ] = field(default_factory=lambda: ["builtin"])
    limit: Annotated[int, _option("--limit", "Prompts of each task, spread over its categories.", min=1)] = 24
    max_new_tokens: Annotated[int, _option("--max-new-tokens", "Length of an answer at the most.", min=1)] = 128
    temperature: Annotated[float, _option("--temperature", "0 is greedy; the yardstick always is.", min=0)] = 0.0
    ignore_eos: Annotated[bool, _option("--ignore-eos", "Go on after the model's end of text.")] = False
    seed: Annotated[int, _option("--seed", "Same seed, same texts.")] = 0
    batch: Annotated[
        int,
        _option("--batch", "Prompts that transformers decodes together, as a yardstick; 1: no yardstick.", min=1),
    ] = 8

    @property
    def names(self) -> list[str]:
        return words(self.tasks, "--tasks")


@takes_records
def audit(
    options: AuditOptions,
    model: ModelOptions,
    policy: PolicyOptions,
    out: Annotated[Path | None, typer.Option("--out", help="Write the JSON to this file, too.")] = None,
    json: Json = False,
) -> None:
    """Compare texts with plain decoding's, token by token; in float32 any difference is a failure."""
    from windfall.bench.inspect.audit import Audit
    from windfall.bench.tasks import load_tasks
    from windfall.core.errors import InputError
    from windfall.core.files import make_folder

    prompts, shaper = load_tasks(options.names, options.limit), policy.make()
    if out is not None:
        if out.is_dir():
            raise InputError(f"--out is the file to write, and '{out}' is a folder")
        make_folder(out.parent)
    engine = model.load(shaper)
    asked = _cases(prompts, engine, options)
    work, interrupted = Audit(engine, policy.name, options.batch), False
    try:
        with console.progress("Decoding") as progress:
            work.run([case for _, case in asked], progress)
    except KeyboardInterrupt:
        interrupted = True
        console.note(f"stopped; {len(work.speculative.outcomes)} of {len(asked)} conversations are finished")
        if not work.speculative.outcomes:
            raise typer.Exit(ON_INTERRUPT) from None
    told = {
        "provenance": _provenance(engine, model, [prompt for prompt, _ in asked]),
        "settings": _settings(options, model, policy),
        "finished": not interrupted,
        "exact": work.exact,
        "failed": work.failed,
        "comparisons": [each.as_dict() for each in work.comparisons],
    }
    _write(told, out)
    if json:
        console.print_json(told, indent=2)
    else:
        _show(work)
    if interrupted or work.failed:
        raise typer.Exit(ON_INTERRUPT if interrupted else DIFFERENT)


def _cases(prompts: list[Prompt], engine: Engine, options: AuditOptions) -> list[tuple[Prompt, Case]]:
    """The first questions of the prompts that the target has room for."""
    from windfall.bench.inspect.audit import Case
    from windfall.bench.runner import PROMPT_TOKENS, question, room, seed_of
    from windfall.core.errors import InputError

    most, found = room(engine.target, options.max_new_tokens), []
    for prompt in prompts:
        ids = question(prompt, (), engine, PROMPT_TOKENS)
        params = engine.params(
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            seed=seed_of(options.seed, 0, prompt),
            eos=() if options.ignore_eos else None,
        )
        found += [(prompt, Case(prompt.task, prompt.id, ids, params))] if len(ids) <= most else []
    if not found:
        raise InputError(f"no prompt fits the context of {engine.target.name} with {options.max_new_tokens} new tokens")
    if len(found) < len(prompts):
        console.note(f"{len(prompts) - len(found)} of {len(prompts)} prompts are too long: left out")
    return found


def _settings(options: AuditOptions, model: ModelOptions, policy: PolicyOptions) -> dict[str, Any]:
    from windfall.bench.paths import shorten

    chosen = {"policy": shorten(policy.name), "policy_settings": policy.settings}
    drafter = {"drafter": shorten(model.drafter_name), "drafter_settings": list(map(shorten, model.drafter_settings))}
    return {
        **vars(options),
        "tasks": list(map(shorten, options.names)),
        **chosen,
        **drafter,
        "coupled": not model.uncoupled,
    }


def _provenance(engine: Engine, model: ModelOptions, prompts: list[Prompt]) -> dict[str, Any]:
    from windfall.bench.provenance import describe

    return describe({model.drafter_name: engine}, engine.target, prompts, ["windfall", *sys.argv[1:]])


def _write(told: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        import json

        from windfall.core.files import replace_text

        replace_text(out, json.dumps(told, indent=2) + "\n")


def _show(work: Audit) -> None:
    out, target = console.stdout(), work.reference
    dtype = str(target.decoder.dtype).removeprefix("torch.")
    out.print(_table(work.comparisons, f"{target.name}, {dtype}, {target.device.type}"))
    found, texts = work.speculative.diverging, len(work.speculative.outcomes)
    if not found:
        out.print(Text(f"Same text as plain decoding's in all {counted(texts, 'conversation')}", style="green"))
        return
    style = "red" if work.failed else "yellow"
    out.print(Text(f"{len(found)} of {texts} conversations differ from plain decoding's", style=style))
    for each in found[:SHOWN]:
        assert each.divergence is not None
        one, other = (_word(token, target.tokenizer) for token in (each.divergence.token, each.divergence.other))
        at = f"  {each.task} {each.id}, token {each.divergence.place + 1}: {other} instead of {one}"
        out.print(Text(f"{at}, logit gap {_number(each.divergence.gap)}", style=style))
    if work.failed:
        out.print(Text(f"FAILED: in {dtype} every text must be plain decoding's", style="bold red"))


def _table(comparisons: list[Comparison], title: str) -> Figures:
    columns = ("", "texts", "differ", "tokens", "per 1000", "gap", "max")
    made = Figures(columns, title, least=("max", "gap", "tokens", "texts", "per 1000"))
    for each in comparisons:
        rate = None if each.token_rate is None else 1000 * each.token_rate
        share = "" if each.conversation_rate is None else f" ({100 * each.conversation_rate:.0f}%)"
        made.add(
            each.name,
            str(len(each.outcomes)),
            f"{len(each.diverging)}{share}",
            str(each.tokens),
            _number(rate),
            _number(each.median_gap),
            _number(each.largest_gap),
        )
    return made


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _word(token: int | None, tokenizer: Any) -> str:
    if token is None:
        return "the end"
    return str(token) if tokenizer is None else repr(tokenizer.decode([token]))
