"""Declaring the options of commands: `option` and `argument`, and options that several commands have."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from windfall.cli import config_file
from windfall.core.errors import InputError

OWN_METADATA = ("flags", "argument", "low", "high", "choices")  # keys of a field's metadata that typer does not take

COMPLETED = {"drafter": "drafters", "policy": "policies", "preset": "presets"}  # options: lists of their names

VALUES = (
    "cpu",
    "float32",
    "adamw",
    "lean",
    "raw",
    "replay",
    "builtin",
)  # a help text that begins with a value keeps its case


def option(default: Any, help: str, *flags: str, **details: Any) -> Any:
    """Declare an option: as a field of a record, or as the default of a command's parameter.

    default: `...` makes the option required.
    flags: by default the name with dashes, `--max-new-tokens` for `max_new_tokens`.
    details: more arguments of `typer.Option`, for example `min` or `metavar`.
    """
    metadata = {"help": help, "flags": flags, **details}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def argument(default: Any, help: str, **details: Any) -> Any:
    """Declare a positional argument; as `option`."""
    return option(default, help, argument=True, **{"show_default": False, **details})


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Convert a command to a function that typer can read.

    Parameters declared with `option` become options. A parameter whose type is a dataclass stands for the options that
    its fields declare. The config file may set options of `configurable` records that the command line leaves out. The
    static method `prepare` of a record, if it has one, is called before the command.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    records: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in records:
            parameters += _record_parameters(records[name])
        elif name != "context":
            parameters.append(_parameter(name, hints[name], parameter.default))
    parameters.append(inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
    configured = {f.name for kind in records.values() if kind in config_file.RECORDS for f in dataclasses.fields(kind)}

    @functools.wraps(command)
    def run(context: typer.Context, **values: Any) -> None:
        if configured:
            values |= config_file.defaults({name: values[name] for name in configured}, given_options(context))
        for record in records.values():
            getattr(record, "prepare", lambda: None)()
        for name, record in records.items():
            values[name] = record(**{f.name: values.pop(f.name) for f in dataclasses.fields(record)})
        command(**values, **({"context": context} if "context" in hints else {}))

    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    run.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)  # typer keeps line breaks
    run.__dict__["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@functools.cache
def _record_parameters(record: Any) -> tuple[inspect.Parameter, ...]:
    """The parameters of a record's fields; most records belong to many commands."""
    types, panel = typing.get_type_hints(record), getattr(record, "PANEL", None)
    return tuple(_parameter(f.name, types[f.name], f, panel) for f in dataclasses.fields(record))


def _parameter(name: str, kind: Any, declared: Any, panel: str | None = None) -> inspect.Parameter:
    """The parameter that typer reads, from a field made by `option` here or in `windfall.core.options`."""
    about = {**declared.metadata, "help": _sentence(declared.metadata["help"])}
    if name in COMPLETED:
        about.setdefault("autocompletion", complete(COMPLETED[name]))
    details = {"rich_help_panel": panel, **{key: value for key, value in about.items() if key not in OWN_METADATA}}
    flags = about.get("flags") or (f"--{name.replace('_', '-')}",)
    made = typer.Argument(**details) if about.get("argument") else typer.Option(*flags, **details)
    default = declared.default
    if declared.default_factory is not dataclasses.MISSING:
        default = declared.default_factory()
    elif default is ...:
        default = inspect.Parameter.empty
    annotation = Annotated[kind, made]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _sentence(text: str) -> str:
    first = text.split()[0].rstrip(",;:")
    start = text if first in VALUES else text[0].upper() + text[1:]
    return start + ("" if text.endswith(".") else ".")


def given_options(context: typer.Context) -> set[str]:
    """The names of the options that the command line sets."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def complete(*kinds: str) -> Callable[[str], list[str]]:
    """A function that completes names in the shell; kinds: functions of `registry` that list names. No torch."""

    def names(incomplete: str) -> list[str]:
        from windfall import registry

        known = dict.fromkeys(name for kind in kinds for name in getattr(registry, kind)())
        return [name for name in known if name.startswith(incomplete)]

    return names


def words(texts: list[str], flag: str) -> list[str]:
    """The names in a repeatable option that takes several names separated by commas."""
    found = [word.strip() for text in texts for word in text.split(",")]
    if not all(found):
        raise InputError(f"write {flag} as names separated by commas")
    return found


def numbers(text: str, flag: str, kind: type = float, example: str = "0,1") -> tuple[Any, ...]:
    """The numbers in an option that takes several numbers separated by commas."""
    try:
        return tuple(map(kind, text.split(",")))
    except ValueError:
        raise InputError(f"write {flag} as numbers separated by commas, for example {example}, not '{text}'") from None


# ---- options of several commands


def json_option() -> Any:
    return option(False, "Print one JSON object and nothing else.")


def pause_option() -> Any:
    return option(
        None, "Pause after this many minutes, with everything kept; --resume continues.", metavar="MINUTES", min=0
    )


def system_option() -> Any:
    return option(None, "System message before the prompt.", metavar="TEXT")


def show_drafts_option() -> Any:
    return option(False, "Show accepted draft tokens and the target's own tokens in two colours.")


def tasks_option(default: list[str]) -> Any:
    about = "JSONL files, names of known datasets, or builtin, separated by commas. Repeatable."
    return option(default, about, metavar="A,B,C")


def ignore_eos_option(default: bool | None = False) -> Any:
    return option(default, "Continue after the model's end-of-text token.")


def plot_option(what: str) -> Any:
    return option(None, f"Draw {what} to this PNG, SVG or PDF file.")
