"""The config file: defaults for the options that the commands share, in TOML."""

from __future__ import annotations

import os
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from windfall.core.errors import InputError
from windfall.core.options import split_settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

VARIABLE = "WINDFALL_CONFIG"
RECORDS: list[type] = []  # whose options the file may set
KEY_NAMES = {  # options whose key in the file has another name, that of `windfall.load`
    "drafter_settings": "drafter_options",
    "settings": "policy_options",
    "uncoupled": "coupled",
    "no_graphs": "graphs",
}
OLD_KEYS = {"exact": "fast"}  # keys of earlier versions: the option that each one sets
NEGATED = ("coupled", "graphs", "exact")  # keys whose option says the opposite
NOT_IN_FILE = ("logit_bias", "stop", "ignore_eos")  # options that the file cannot set
TYPES: dict[Any, tuple[tuple[type, ...], str]] = {  # type of an option: types of its value in the file, in words
    str | None: ((str,), "text"),
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    int | None: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    list[str]: ((dict,), "a table of options"),
}
REPLACED_BY_FLAG = {  # a flag on the command line: the keys that are then ignored
    "target": ("drafter", "drafter_options"),
    "drafter": ("drafter_options",),
    "policy": ("policy", "preset", "policy_options"),
    "preset": ("policy", "preset", "policy_options"),
    "exact": ("fast", "exact"),
    "fast": ("fast", "exact"),
}


class FileSetting(str):
    """A `NAME=VALUE` of the file, among those of the command line."""


def configurable(record: type[T]) -> type[T]:
    """Let the file set the options of this record."""
    RECORDS.append(record)
    return record


def keys() -> dict[str, Any]:
    """The keys that the file may have, each with the type of its option."""
    options = {name: hint for record in RECORDS for name, hint in typing.get_type_hints(record).items()}
    return {KEY_NAMES.get(name, name): hint for name, hint in options.items() if name not in NOT_IN_FILE}


def usual_file() -> Path:
    """The file that is read if the environment names no other."""
    shared = os.environ.get("XDG_CONFIG_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".config") / "windfall" / "config.toml"


def file_in_use() -> Path | None:
    """The file that the commands read, if there is one; an empty WINDFALL_CONFIG means no file."""
    named = os.environ.get(VARIABLE)
    if named is None:
        return usual_file() if usual_file().exists() else None
    return Path(named).expanduser() if named else None


def describe() -> str:
    """Which file is in use and what it sets, for `windfall doctor`."""
    file = file_in_use()
    if file is None:
        return "none" if os.environ.get(VARIABLE) == "" else f"none; {usual_file()} would be read"
    return f"{file} sets {', '.join(parse(file)) or 'nothing'}"


def read() -> dict[str, Any]:
    """The defaults in the file in use; empty without a file."""
    file = file_in_use()
    return {} if file is None else parse(file)


def parse(file: Path) -> dict[str, Any]:
    """The defaults in this file, checked."""
    try:
        found = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the config file '{file}': {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"the config file '{file}' is not valid TOML: {error}") from None
    known = keys()
    for key, value in found.items():
        if key not in known:
            raise InputError(f"the config file '{file}' has an unknown key '{key}'; it may have: {', '.join(known)}")
        types, words = TYPES[known[key]]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise InputError(f"the config file '{file}': {key} must be {words}, not {value!r}")
    if {"policy", "preset"} <= {*found}:
        raise InputError(f"the config file '{file}' has a policy and a preset; a preset names a policy: keep one")
    if {"exact", "fast"} <= {*found}:
        raise InputError(f"the config file '{file}' has exact and fast, which say the opposite: keep one")
    return {key: os.path.expanduser(value) if isinstance(value, str) else value for key, value in found.items()}


def defaults(values: Mapping[str, Any], given: set[str]) -> dict[str, Any]:
    """The options that the file changes.

    values: the command's options that the file may set; given: the names of those on the command line.
    """
    ignored = {key for flag in given for key in REPLACED_BY_FLAG.get(flag, ())}
    changed: dict[str, Any] = {}
    option_names = {**{key: name for name, key in KEY_NAMES.items()}, **OLD_KEYS}
    for key, value in read().items():
        name = option_names.get(key, key)
        if name not in values or key in ignored:
            continue
        if isinstance(value, dict):  # the command line's settings come last and so override the file's
            changed[name] = [*(FileSetting(f"{option}={each}") for option, each in value.items()), *values[name]]
        elif name not in given:
            changed[name] = not value if key in NEGATED else value
    return changed


def made_with(settings: Sequence[str], key: str, make: Callable[[dict[str, str]], T]) -> T:
    """Call `make` with these settings, some of which may come from the file, and return its result.

    If `make` refuses them, but not those of the command line alone, the error names the file and `key`.
    """
    try:
        return make(split_settings(settings))
    except InputError as error:
        own = [each for each in settings if not isinstance(each, FileSetting)]
        if len(own) == len(settings) or not _takes(make, own):
            raise
        raise InputError(f"the config file '{file_in_use()}', {key}: {error}") from error


def _takes(make: Callable[[dict[str, str]], Any], settings: Sequence[str]) -> bool:
    try:
        make(split_settings(settings))
    except InputError:
        return False
    return True
