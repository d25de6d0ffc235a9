"""Options of policies and drafters, declared as dataclass fields.

The constructor, the `--set` flags and the documentation are made from the fields.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from windfall.core.errors import InputError

T = TypeVar("T")
WORDS: dict[Any, str] = {  # types as error messages name them
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "none",
}
PLAIN = set(WORDS)  # types that `check` can check
_HINTS: dict[type, dict[str, Any]] = {}


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    **details: Any,
) -> Any:
    """A dataclass field that users can set; `details` are for the command line alone, for example `metavar`."""
    metadata = {"help": help, "low": low, "high": high, "choices": choices, **details}
    return dataclasses.field(default=default, metadata=metadata)


def options_of(cls: type) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a policy or drafter that users can set."""
    return {f.name: f for f in dataclasses.fields(cls) if f.init and "help" in f.metadata}


def build(cls: type[T], settings: Mapping[str, Any], name: str) -> T:
    """Make a policy or drafter from typed or textual settings; unknown or invalid ones are an InputError."""
    known = options_of(cls)
    hints = _hints(cls)
    values = {}
    for key, value in settings.items():
        if key not in known:
            raise InputError(f"{name} has no option '{key}'; it has: {', '.join(known) or 'none'}")
        values[key] = parse_value(value, hints[key], f"{name}: {key}") if isinstance(value, str) else value
    return cls(**values)


def checked(given: Any, label: str) -> dict[str, Any]:
    """Options given by name, as a dict; None gives an empty one."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InputError(f"{label} takes options by name, for example {{'depth': 4}}, not {given!r}")
    return dict(given)


def refuse_settings(settings: Mapping[str, Any], kind: str, name: str) -> None:
    """Raise an InputError if options are given for a policy or drafter that is made already."""
    if settings:
        raise InputError(f"this {kind} is a ready {name}; give its options where it is made, or its name instead")


def require_flag(name: str, value: Any) -> bool:
    """The value, which must be True or False."""
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False, not {value!r}")
    return value


def brief(instance: Any) -> str:
    """A policy or drafter with its options, in one line: `Beam(depth=6, k=10)`."""
    values = {name: getattr(instance, name) for name in options_of(type(instance))}
    words = (
        f"{name}={value!r}" if isinstance(value, str | numbers.Number | None) else f"{name}=<{type(value).__name__}>"
        for name, value in values.items()
    )
    return f"{type(instance).__name__}({', '.join(words)})"


def check(instance: Any) -> None:
    """Check every option of a new policy or drafter against its declared type and range."""
    hints = _hints(type(instance))
    for key, f in options_of(type(instance)).items():
        value, low, high = getattr(instance, key), f.metadata["low"], f.metadata["high"]
        if f.metadata["choices"] and value not in f.metadata["choices"]:
            raise InputError(f"{key} must be one of {', '.join(f.metadata['choices'])}, not {value!r}")
        kinds = typing.get_args(hints[key]) or (hints[key],)
        if not _is_one(value, kinds):
            raise InputError(f"{key} takes {_in_words(hints[key])}, not {value!r}")
        if isinstance(value, float) and math.isnan(value):
            raise InputError(f"{key} must be a number, not nan")
        if value is None or (low is None and high is None):
            continue
        bounds = [f"{word} {limit}" for word, limit in (("at least", low), ("at most", high)) if limit is not None]
        if (low is not None and value < low) or (high is not None and value > high):
            raise InputError(f"{key} must be {' and '.join(bounds)}, not {value}")


def is_number(value: Any, whole: bool = False) -> bool:
    """Whether this is a number; True and False are not."""
    return isinstance(value, numbers.Integral if whole else numbers.Real) and not isinstance(value, bool)


def _is_one(value: Any, kinds: tuple[Any, ...]) -> bool:
    """Whether a value is of one of these types; always true if one of them is not in PLAIN."""
    if not {*kinds} <= PLAIN:
        return True
    if isinstance(value, bool | str | os.PathLike | None):
        return (str if isinstance(value, os.PathLike) else type(value)) in kinds
    return (float in kinds and is_number(value)) or (int in kinds and is_number(value, whole=True))


def _hints(cls: type) -> dict[str, Any]:
    """The types of a class's fields, cached: policies are made for every text."""
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def describe(cls: type) -> list[dict[str, Any]]:
    """The options as plain data, for tables, `--json` and the documentation."""
    hints = _hints(cls)
    return [
        {
            "name": key,
            "type": " | ".join(f.metadata["choices"]) or _type_name(hints[key]),
            "default": f.default,
            "help": f.metadata["help"],
        }
        for key, f in options_of(cls).items()
    ]


def parse_ranges(text: str) -> set[int]:
    """'3,5,10-20' → these numbers; a ValueError if it is something else."""
    pairs = (part.partition("-") for part in text.split(",") if part.strip())
    return {number for first, dash, last in pairs for number in range(int(first), int(last if dash else first) + 1)}


def split_settings(items: Sequence[str]) -> dict[str, str]:
    """Command-line settings such as `["depth=6", "k=4"]` as a dict."""
    settings = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not (key and equals):
            raise InputError(f"write settings as name=value, not '{item}'")
        settings[key.strip()] = value.strip()
    return settings


def parse_value(text: str, wanted: Any, label: str) -> Any:
    """Convert text to a value of this type; `label` names the option in the error message."""
    if wanted is Any:
        return text
    kinds = typing.get_args(wanted) or (wanted,)
    if type(None) in kinds and text.lower() in ("none", ""):
        return None
    for kind in kinds:
        if kind is bool and text.lower() in ("true", "yes", "on", "1", "false", "no", "off", "0"):
            return text.lower() in ("true", "yes", "on", "1")
        if kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        if kind is str:
            return text
    raise InputError(f"{label} takes {_in_words(wanted)}, not '{text}'")


def _type_name(wanted: Any) -> str:
    if wanted is Any:
        return "text"
    kinds = typing.get_args(wanted) or (wanted,)
    return " or ".join("none" if kind is type(None) else getattr(kind, "__name__", str(kind)) for kind in kinds)


def _in_words(wanted: Any) -> str:
    """A type as error messages name it: 'a whole number or none'."""
    kinds = typing.get_args(wanted) or (wanted,)
    return " or ".join(WORDS.get(kind) or str(getattr(kind, "__name__", kind)) for kind in kinds)
