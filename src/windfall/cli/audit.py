"""`windfall audit`: how many texts differ from plain decoding, and how small the logit gaps are where they do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from windfall.bench.paths import shorten
from windfall.bench.tasks import load_tasks
from windfall.cli.declare import ignore_eos_option, json_option, option, tasks_option, words
from windfall.cli.options import ModelOptions, PolicyOptions
from windfall.cli.session import DIFFERENT, ON_INTERRUPT, check_result_file, command_line, write_json
from windfall.core.wording import counted
from windfall.render import console
from windfall.render.tables import Figures, Wrapped

if TYPE_CHECKING:
    from windfall.bench.inspect.audit import Audit, Comparison

MAX_SHOWN_DIFFERENCES = 5
RESULT_KEYS = ("settings", "exact", "comparisons")  # of the JSON


@dataclass
class AuditOptions:
    """The conversations, and how their answers are sampled."""

    PANEL = "Audit"

    tasks: list[str] = tasks_option(["builtin"])
    limit: int = option(24, "Prompts per task, spread over its categories.", min=1)
    max_new_tokens: int = option(128, "Maximum length of an answer.", min=1)
    temperature: float = option(0.0, "Sampling temperature; 0 is greedy. The reference is always greedy.", min=0)
    ignore_eos: bool = ignore_eos_option()
    seed: int = option(0, "Random seed; the same seed gives the same texts.")
    batch: int = option(8, "Batch size at which transformers decodes a reference; 1: no reference.", min=1)

    @property
    def names(self) -> list[str]:
        return words(self.tasks, "--tasks")


def audit(
    options: AuditOptions,
    model: ModelOptions,
    policy: PolicyOptions,
    out: Path | None = option(None, "Also write the JSON to this file."),
    json: bool = json_option(),
) -> None:
    """Compare texts with plain decoding, token by token.

    In float32 and with exact passes, any difference is a failure.
    """
    from windfall.bench.inspect.audit import Audit
    from windfall.bench.provenance import describe
    from windfall.bench.runner import first_questions

    prompts, made_policy = load_tasks(options.names, options.limit), policy.make()
    check_result_file(out, "audit", RESULT_KEYS)
    engine = model.load(made_policy)
    sampling = {name: getattr(options, name) for name in ("max_new_tokens", "temperature", "seed")}
    cases = first_questions(prompts, engine, eos=() if options.ignore_eos else None, **sampling)
    if left_out := len(prompts) - len(cases):
        console.note(f"{left_out} of {len(prompts)} prompts are too long and left out")
    work, interrupted = Audit(engine, policy.name, options.batch), False
    try:
        with console.progress("Decoding") as progress:
            work.run(cases, progress)
    except KeyboardInterrupt:
        interrupted = True
        console.note(f"stopped; {len(work.speculative.outcomes)} of {len(cases)} conversations are finished")
        if not work.speculative.outcomes:
            raise typer.Exit(ON_INTERRUPT) from None
    used, drafter = [case.prompt for case in cases], model.drafter_name(engine.target)
    report = {
        "provenance": describe({drafter: engine}, engine.target, used, command_line()),
        "settings": _settings(options, model, policy, drafter),
        "finished": not interrupted,
        "exact": work.exact,
        "exact_passes": work.exact_passes,
        "failed": work.failed,
        "comparisons": [each.as_dict() for each in work.comparisons],
    }
    write_json(out, report)
    if json:
        console.print_json(report, indent=2)
    else:
        _show(work)
    if interrupted or work.failed:
        raise typer.Exit(ON_INTERRUPT if interrupted else DIFFERENT)


def _settings(options: AuditOptions, model: ModelOptions, policy: PolicyOptions, drafter: str) -> dict[str, Any]:
    return {
        **vars(options),
        "tasks": list(map(shorten, options.names)),
        "policy": shorten(policy.name),
        "policy_settings": policy.settings,
        "drafter": shorten(drafter),
        "drafter_settings": list(map(shorten, model.drafter_settings)),
        "coupled": not model.uncoupled,
    }


def _show(work: Audit) -> None:
    out, target = console.stdout(), work.reference
    dtype = str(target.decoder.dtype).removeprefix("torch.")
    out.print(_table(work.comparisons, f"{target.name}, {dtype}, {target.device.type}"))
    out.print(Wrapped(Text(_about_passes(work, dtype))))
    found, texts = work.speculative.diverging, len(work.speculative.outcomes)
    console.print_equality(len(found), texts, failed=work.failed)
    out.print(Text(f"{len(found)} of {counted(work.speculative.tokens, 'compared token')} differ"))
    for each in found[:MAX_SHOWN_DIFFERENCES]:
        assert each.divergence is not None
        one, other = (_token_text(token, target.tokenizer) for token in (each.divergence.token, each.divergence.other))
        where = f"  {each.task} {each.id}, token {each.divergence.place + 1}: {other} instead of {one}"
        style = "red" if work.failed else "yellow"
        out.print(Text(f"{where}, logit gap {_number(each.divergence.gap)}", style=style))
    if work.failed:
        when = "with exact passes" if work.exact_passes else f"in {dtype}"
        out.print(Text(f"FAILED: {when} every text must equal plain decoding", style="bold red"))


def _about_passes(work: Audit, dtype: str) -> str:
    """Whether passes were exact, and what follows for the texts."""
    if work.exact_passes:
        return "Passes were exact: every text must equal plain decoding"
    if work.exact:
        return f"Passes were not exact, but in {dtype} every text must equal plain decoding"
    return f"Passes were not exact: in {dtype} a text may differ where two tokens are almost equally likely"


def _table(comparisons: list[Comparison], title: str) -> Figures:
    columns = ("", "texts", "differ", "tokens", "per 1000", "gap", "max")
    table = Figures(columns, title, least=("max", "gap", "tokens", "texts", "per 1000"))
    for each in comparisons:
        rate = None if each.token_rate is None else 1000 * each.token_rate
        share = "" if each.conversation_rate is None else f" ({100 * each.conversation_rate:.0f}%)"
        counts = str(len(each.outcomes)), f"{len(each.diverging)}{share}", str(each.tokens)
        table.add(each.name, *counts, _number(rate), _number(each.median_gap), _number(each.largest_gap))
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _token_text(token: int | None, tokenizer: Any) -> str:
    if token is None:
        return "the end"
    return str(token) if tokenizer is None else repr(tokenizer.decode([token]))
