"""The command line: parse, call the library, render. Torch is imported by the commands that need it, not for --help."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
import time
import typing
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from windfall import __version__, console

if TYPE_CHECKING:
    from windfall.engine import Engine, Generation, Prompt
    from windfall.records import Step

DIFFERENT, BAD_INPUT, ON_INTERRUPT, ON_BROKEN_PIPE = 1, 2, 130, 141  # exit codes
INTERRUPTED = "interrupted"  # finish reason
WARM_UP = 8  # tokens before a timed comparison


class Commands(TyperGroup):
    """Turns what a person did wrong into one line, and Ctrl-C and closed pipes into quiet exits."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            return _refuse(error.format_message())
        except ValueError as error:
            from windfall.records import InputError

            if not isinstance(error, InputError):
                raise
            return _refuse(str(error))
        except KeyboardInterrupt:
            raise typer.Exit(ON_INTERRUPT) from None
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
            raise typer.Exit(ON_BROKEN_PIPE) from None


def _refuse(message: str) -> None:
    console.fail(message)
    raise typer.Exit(BAD_INPUT)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The `windfall` command."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to stop
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"windfall {__version__}")
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Any Hugging Face causal language model, faster, word for word the same."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


# ---- options, declared once


def _model(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="Model", **more)


def _sampling(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="Sampling", **more)


@dataclass
class ModelOptions:
    """Which target, drafter and policy, and where they run."""

    target: Annotated[
        str | None, _model("--target", "Folder, GGUF file or hub id of the model; none: the embedded one.")
    ] = None
    drafter: Annotated[
        str | None, _model("--drafter", "Drafter by name (see `windfall policies`), or a smaller model.")
    ] = None
    drafter_settings: Annotated[
        list[str], _model("--drafter-set", "An option of the drafter; repeatable.", metavar="NAME=VALUE")
    ] = field(default_factory=list)
    policy: Annotated[str | None, _model("--policy", "Tree policy by name (see `windfall policies`).")] = None
    settings: Annotated[list[str], _model("--set", "An option of the policy; repeatable.", metavar="NAME=VALUE")] = (
        field(default_factory=list)
    )
    device: Annotated[str | None, _model("--device", "cpu, cuda, cuda:1, mps; none: the best there is.")] = None
    dtype: Annotated[str | None, _model("--dtype", "float32, bfloat16, float16; none: what suits the device.")] = None
    trust_remote_code: Annotated[bool, _model("--trust-remote-code", "Run Python code that comes with the model.")] = (
        False
    )

    def load(self) -> Engine:
        """The engine; names and settings are checked before the weights are read."""
        from windfall import loading
        from windfall.options import split_settings

        policy = loading.as_policy(self.policy, **split_settings(self.settings))
        drafter = loading.as_drafter(self.drafter, **split_settings(self.drafter_settings))
        with console.waiting("Loading the model…"):
            return loading.load(self.target, drafter, policy, self.device, self.dtype, self.trust_remote_code)

    def names(self) -> dict[str, str]:
        from windfall.loading import DEFAULT_DRAFTER, DEFAULT_POLICY

        return {"drafter": self.drafter or DEFAULT_DRAFTER, "policy": self.policy or DEFAULT_POLICY}


@dataclass
class SamplingOptions:
    """How tokens are drawn; the defaults are those of SamplingParams."""

    max_new_tokens: Annotated[int, _sampling("--max-new-tokens", "Length of the answer at the most.")] = 256
    temperature: Annotated[float, _sampling("--temperature", "0 is greedy.")] = 0.0
    top_k: Annotated[int, _sampling("--top-k", "Draw from the k likeliest tokens; 0 is off.")] = 0
    top_p: Annotated[float, _sampling("--top-p", "Draw from the likeliest tokens that make up this mass.")] = 1.0
    min_p: Annotated[float, _sampling("--min-p", "Least probability, relative to the likeliest token's.")] = 0.0
    repetition_penalty: Annotated[
        float, _sampling("--repetition-penalty", "Divides logits of seen tokens; 1 is off.")
    ] = 1.0
    presence_penalty: Annotated[
        float, _sampling("--presence-penalty", "Taken off the logits of tokens in the answer.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, _sampling("--frequency-penalty", "The same, for each time a token occurred.")
    ] = 0.0
    logit_bias: Annotated[
        list[str], _sampling("--logit-bias", "Added to a token's logit; repeatable.", metavar="ID=VALUE")
    ] = field(default_factory=list)
    stop: Annotated[list[str], _sampling("--stop", "End before this text; repeatable.", metavar="TEXT")] = field(
        default_factory=list
    )
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", "Go on after the model's end of text.")] = False
    seed: Annotated[int, _sampling("--seed", "Same seed, same text.")] = 0

    def keywords(self) -> dict[str, Any]:
        """The keywords of Engine.generate, checked as far as no model is needed."""
        from windfall.records import SamplingParams

        values = dataclasses.asdict(self)
        values["eos"] = () if values.pop("ignore_eos") else None
        values["stop"] = tuple(self.stop)
        values["logit_bias"] = dict(map(_bias, self.logit_bias))
        SamplingParams(**values)
        return values


def _bias(item: str) -> tuple[int, float]:
    from windfall.records import InputError

    token, _, value = item.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise InputError(f"write --logit-bias as ID=VALUE, for example 42=-100, not '{item}'") from None


def takes_records(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take whole records: their fields become its command-line options."""
    hints = typing.get_type_hints(command, include_extras=True)
    records: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    flat: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        own = parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        flat += _parameters(records[name]) if name in records else [own]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, record in records.items():
            values[name] = record(**{f.name: values.pop(f.name) for f in dataclasses.fields(record)})
        command(**values)

    run.__dict__["__signature__"] = inspect.Signature(flat)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run


def _parameters(record: Any) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(record, include_extras=True)
    blank = record()
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(blank, name), annotation=hints[name])
        for name in (f.name for f in dataclasses.fields(record))
    ]


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
System = Annotated[str | None, typer.Option("--system", help="A system message before the prompt.", metavar="TEXT")]
ShowDrafts = Annotated[
    bool, typer.Option("--show-drafts", help="Colour drafted and accepted tokens apart from the target's own.")
]


# ---- generate


@dataclass(frozen=True)
class Session:
    """A loaded engine, how tokens are drawn, and how the text is shown."""

    engine: Engine
    names: dict[str, str]  # of the drafter and the policy
    sampling: dict[str, Any]
    raw: bool = False
    json: bool = False
    coloured: bool = False

    def answer(self, prompt: Prompt) -> Generation:
        """Generate and show a text; Ctrl-C ends it early and keeps what is there."""
        generation = _collect(self.engine, self.engine.stream(prompt, raw=self.raw, **self.sampling), self._show())
        if not self.json:
            console.end_text(generation, self.coloured)
        return generation

    def warm_up(self, prompt: Prompt) -> None:
        brief = {**self.sampling, "max_new_tokens": min(WARM_UP, self.sampling["max_new_tokens"])}
        self.engine.generate(prompt, raw=self.raw, **brief)

    def report(self, generation: Generation) -> dict[str, Any]:
        source = {"target": self.engine.target.name, **self.names, "seed": self.sampling["seed"]}
        return {**console.as_record(generation), **source}

    def opening(self, system: str | None) -> list[dict[str, str]]:
        """The first messages of a conversation, for a target that can have one."""
        from windfall.records import InputError

        if not getattr(self.engine.target.tokenizer, "chat_template", None):
            raise InputError(f"{self.engine.target.name} has no chat template, which chat and --system need")
        return [] if system is None else [_message("system", system)]

    def _show(self) -> console.Show:
        if self.json:
            return console.show_nothing
        return console.DraftColours(self.engine, self.sampling["stop"]) if self.coloured else console.show_text


@app.command()
@takes_records
def generate(
    model: ModelOptions,
    sampling: SamplingOptions,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - or nothing reads standard input.", show_default=False)
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Read the prompt from a file.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Leave out the chat template.")] = False,
    system: System = None,
    json: Json = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode plainly first, then compare tokens and times.")
    ] = False,
    show_drafts: ShowDrafts = False,
) -> None:
    """Answer a prompt."""
    from windfall.records import InputError

    if raw and system is not None:
        raise InputError("--system needs the chat template, which --raw leaves out; choose one")
    if json and show_drafts:
        raise InputError("--show-drafts colours a text, and --json prints none; choose one")
    text, keywords = console.read_prompt(prompt, file), sampling.keywords()
    session = Session(model.load(), model.names(), keywords, raw, json, show_drafts)
    question = text if system is None else [*session.opening(system), _message("user", text)]
    if compare:
        _compare(session, question)
        return
    generation = session.answer(question)
    if json:
        console.print_json(session.report(generation))
    _exit_if_interrupted(generation)


def _compare(session: Session, prompt: Prompt) -> None:
    """Plain decoding, then the chosen policy, on the same weights, prompt and seed."""
    from windfall import registry

    engine, name = session.engine, session.names["policy"]
    policies = {"none": registry.policy("none"), "chosen": engine.policy}
    for policy in policies.values():
        engine.policy = policy
        session.warm_up(prompt)
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
    _exit_if_interrupted(generation)
    return generation


def _collect(engine: Engine, stream: Iterator[Step], show: console.Show) -> Generation:
    from windfall.engine import Generation

    steps: list[Step] = []
    times: list[float] = []
    started = time.perf_counter()
    try:
        for step in stream:
            steps.append(step)
            times.append(time.perf_counter() - started)
            show(step)
    except KeyboardInterrupt:
        pass
    return Generation.of(steps, times, engine.prefill_seconds)


def _exit_if_interrupted(generation: Generation) -> None:
    if generation.finish_reason == INTERRUPTED:
        raise typer.Exit(ON_INTERRUPT)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


# ---- tree


@app.command()
@takes_records
def tree(
    model: ModelOptions,
    sampling: SamplingOptions,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - or nothing reads standard input.", show_default=False)
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Leave out the chat template.")] = False,
    cycle: Annotated[
        int | None, typer.Option("--cycle", help="Which cycle, from 1; none: the one that accepted most.", min=1)
    ] = None,
) -> None:
    """Draw the draft tree of one cycle: what was drafted, verified and accepted."""
    from windfall.drawing import draw, legend

    text, keywords = console.read_prompt(prompt, None), sampling.keywords()
    engine = model.load()
    steps = engine.generate(text, raw=raw, **keywords).steps
    chosen = steps[min(cycle, len(steps)) - 1] if cycle else max(steps, key=lambda step: step.accepted)
    console.stdout().print(draw(chosen, engine.target.tokenizer))
    console.stdout().print(legend(chosen))


# ---- chat


class Conversation:
    """Messages so far, and what their answers cost."""

    def __init__(self, session: Session, system: str | None) -> None:
        self.session = session
        self.opening = session.opening(system)
        self.messages = self.opening
        self.answers: list[Generation] = []

    def ask(self, text: str) -> None:
        """One turn; an answer cut short by Ctrl-C stays in the conversation as it is."""
        messages = [*self.messages, _message("user", text)]
        generation = self.session.answer(messages)
        self.messages = [*messages, _message("assistant", generation.text)]
        self.answers.append(generation)

    def clear(self) -> None:
        self.messages = self.opening

    def stats(self) -> None:
        rows = {f"answer {place}": generation.stats for place, generation in enumerate(self.answers, 1)}
        console.stdout().print(console.figures(rows))


@app.command()
@takes_records
def chat(
    model: ModelOptions,
    sampling: SamplingOptions,
    system: System = None,
    show_drafts: ShowDrafts = False,
) -> None:
    """Talk with the model; /clear starts anew, /stats shows figures, /exit or Ctrl-D leaves."""
    keywords = sampling.keywords()
    conversation = Conversation(Session(model.load(), model.names(), keywords, coloured=show_drafts), system)
    for line in filter(None, map(str.strip, console.turns())):
        if line == "/exit":
            break
        _take_turn(conversation, line)


def _take_turn(conversation: Conversation, line: str) -> None:
    from windfall.records import InputError

    commands = {"/clear": conversation.clear, "/stats": conversation.stats}
    if line in commands:
        commands[line]()
    elif line.startswith("/") and line[1:].isalpha():
        console.note(f"there is no {line}; there are {', '.join(commands)} and /exit")
    else:
        try:
            conversation.ask(line)
        except InputError as error:
            console.fail(f"{error} (/clear starts anew)")


# ---- policies, doctor


@app.command()
def policies(
    name: Annotated[str | None, typer.Argument(help="One policy or drafter.", show_default=False)] = None,
    json: Json = False,
    drafters: Annotated[bool, typer.Option("--drafters", help="Only the drafters.")] = False,
) -> None:
    """List tree policies and drafters, with the options that --set and --drafter-set take."""
    from windfall import loading, registry
    from windfall.records import InputError

    known = {
        "policies": [] if drafters else _entries(registry.policies(), registry.policy_class, loading.DEFAULT_POLICY),
        "drafters": _entries(registry.drafters(), registry.drafter_class, loading.DEFAULT_DRAFTER),
    }
    found = {kind: [e for e in entries if name in (None, e["name"])] for kind, entries in known.items()}
    if not any(found.values()):
        choices = ", ".join(entry["name"] for entries in known.values() for entry in entries)
        raise InputError(f"there is no policy or drafter '{name}'; choose from {choices}")
    if json:
        console.print_json(found, indent=2)
        return
    for kind, entries in found.items():
        if entries:
            console.catalogue(kind.capitalize(), entries)


def _entries(names: list[str], find: Callable[[str], type], default: str) -> list[dict[str, Any]]:
    from windfall.options import describe

    classes = {name: find(name) for name in names}
    return [
        {"name": name, "default": name == default, "summary": _summary(cls), "options": describe(cls)}
        for name, cls in classes.items()
    ]


def _summary(cls: type) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]


@app.command()
def doctor(json: Json = False) -> None:
    """Check this installation: versions, devices, the embedded model, and that speculation changes no token."""
    from windfall.doctor import examine

    checks = [check._asdict() for check in examine()]
    ok = all(check["ok"] for check in checks if check["needed"])
    if json:
        console.print_json({"ok": ok, "checks": checks}, indent=2)
    else:
        console.checklist(checks)
    if not ok:
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
