"""`/set` in a chat: list, change and restore the sampling options."""

from __future__ import annotations

import dataclasses
import re
import shlex
import typing
from collections.abc import Mapping
from typing import Any

from windfall.cli.options import SamplingOptions
from windfall.core.errors import InputError
from windfall.core.options import parse_value

DEFAULT = "default"  # the value that resets an option
REPEATABLE = " Repeatable."  # ends help texts; true of flags only: here an option gets all its values at once


def flag(name: str) -> str:
    """An option's name as on the command line, without the leading dashes."""
    return name.replace("_", "-")


def names() -> list[str]:
    return [flag(field.name) for field in dataclasses.fields(SamplingOptions)]


def changed(options: SamplingOptions, text: str) -> SamplingOptions:
    """The options after a change such as `temperature 0.7` or `stop "###" END`."""
    name, value = _split(text)
    hint = _hints()[name]
    if value == DEFAULT:
        found = getattr(SamplingOptions(), name)
    elif typing.get_origin(hint) is list:
        try:
            found = shlex.split(value)
        except ValueError as error:
            raise InputError(f"cannot read {value}: {str(error).lower()}") from None
    else:
        found = parse_value(value, hint, flag(name))
    return _checked(dataclasses.replace(options, **{name: found}))


def restored(saved: Mapping[str, Any]) -> SamplingOptions:
    """The options of a saved conversation; options that it does not contain have their defaults."""
    hints = _hints()
    for name, value in saved.items():
        if name not in hints:
            raise InputError(f"there is no sampling option '{name}'; there are {', '.join(hints)}")
        if not _is_of(value, hints[name]):
            raise InputError(f"the sampling option {name} cannot be {value!r}")
    return _checked(SamplingOptions(**saved))


def listed(options: SamplingOptions) -> str:
    """The name, value and meaning of each option."""
    fields = dataclasses.fields(options)
    rows = [(flag(f.name), _written(getattr(options, f.name)), _meaning(f)) for f in fields]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}" for row in rows)


def _meaning(field: dataclasses.Field[Any]) -> str:
    return str(field.metadata["help"]).removesuffix(REPEATABLE)


def setting(options: SamplingOptions, text: str) -> str:
    """The name and value of the option that a text such as `temperature` or `temperature 0.7` names."""
    name, _ = _split(text)
    return f"{flag(name)} {_written(getattr(options, name))}"


def _split(text: str) -> tuple[str, str]:
    """The name of the field and the text of the value, from `temperature 0.7`, `--top-p=0.9` or `seed`."""
    match = re.fullmatch(r"-*([\w-]*)(?:\s*=\s*|\s+|$)(.*)", text, re.DOTALL)
    name = match[1].replace("-", "_") if match else text
    if match is None or name not in _hints():
        raise InputError(f"there is no sampling option '{flag(name)}'; there are {', '.join(names())}")
    return name, match[2].strip()


def _checked(options: SamplingOptions) -> SamplingOptions:
    options.keywords()
    return options


def _hints() -> dict[str, Any]:
    """The type of each option."""
    hints = typing.get_type_hints(SamplingOptions)
    return {field.name: hints[field.name] for field in dataclasses.fields(SamplingOptions)}


def _is_of(value: Any, hint: Any) -> bool:
    """Whether a value from JSON has this type; an int is also a float."""
    if typing.get_origin(hint) is list:
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    kinds = typing.get_args(hint) or (hint,)
    return type(value) in kinds or (type(value) is int and float in kinds)


def _written(value: Any) -> str:
    if isinstance(value, list):
        return shlex.join(value) or "none"
    return {None: "none", True: "on", False: "off"}[value] if value is None or isinstance(value, bool) else str(value)
