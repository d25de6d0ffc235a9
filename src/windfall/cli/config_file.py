"""Defaults for the command line, from a TOML file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from windfall.core.errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VARIABLE = "WINDFALL_CONFIG"
TEXT, FLAG, WHOLE, NUMBER, OPTIONS = (str,), (bool,), (int,), (int, float), (dict,)
KEYS: dict[str, tuple[type, ...]] = {  # what the file may hold, in the words of `windfall.load` and SamplingParams
    "target": TEXT,
    "drafter": TEXT,
    "drafter_options": OPTIONS,
    "policy": TEXT,
    "policy_options": OPTIONS,
    "preset": TEXT,
    "device": TEXT,
    "dtype": TEXT,
    "trust_remote_code": FLAG,
    "coupled": FLAG,
    "graphs": FLAG,
    "compile": FLAG,
    "exact": FLAG,
    "host_policies": FLAG,
    "max_new_tokens": WHOLE,
    "temperature": NUMBER,
    "top_k": WHOLE,
    "top_p": NUMBER,
    "min_p": NUMBER,
    "repetition_penalty": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "seed": WHOLE,
}
WORDS = {
    TEXT: "text",
    FLAG: "true or false",
    WHOLE: "a whole number",
    NUMBER: "a number",
    OPTIONS: "a table of options",
}


def usual_file() -> Path:
    """Where the file is looked for unless the environment names another."""
    shared = os.environ.get("XDG_CONFIG_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".config") / "windfall" / "config.toml"


def file_in_use() -> Path | None:
    """The file that the commands read, if there is one; an empty WINDFALL_CONFIG stands for none."""
    named = os.environ.get(VARIABLE)
    if named is None:
        return usual_file() if usual_file().exists() else None
    return Path(named).expanduser() if named else None


def read() -> dict[str, Any]:
    """The defaults in the file that is in use; none without a file."""
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
    for key, value in found.items():
        if key not in KEYS:
            raise InputError(f"the config file '{file}' has an unknown key '{key}'; it may have: {', '.join(KEYS)}")
        if not isinstance(value, KEYS[key]) or (isinstance(value, bool) and KEYS[key] != FLAG):
            raise InputError(f"the config file '{file}': {key} must be {WORDS[KEYS[key]]}, not {value!r}")
    if {"policy", "preset"} <= {*found}:
        raise InputError(f"the config file '{file}' has a policy and a preset; a preset names a policy: keep one")
    return {key: os.path.expanduser(value) if KEYS[key] == TEXT else value for key, value in found.items()}
