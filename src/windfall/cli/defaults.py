"""The config file's defaults as options of the commands; what stands on the command line comes first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windfall.cli import config_file

OPPOSITES = {"coupled": "uncoupled", "graphs": "no_graphs"}  # the file's word: the flag that says the contrary
OPTIONS = {"drafter_options": "drafter_settings", "policy_options": "settings"}
BELONGS = {  # flags: the file's words that would not fit them any more
    "target": ("drafter", "drafter_options"),
    "drafter": ("drafter_options",),
    "policy": ("policy", "preset", "policy_options"),
    "preset": ("policy", "preset", "policy_options"),
}


def fill(values: Mapping[str, Any], given: set[str]) -> dict[str, Any]:
    """The options that the file changes: `values` are those of a command, `given` stand on the command line."""
    left_out = {word for flag in given for word in BELONGS.get(flag, ())}
    changed: dict[str, Any] = {}
    for word, value in config_file.read().items():
        flag = OPPOSITES.get(word) or OPTIONS.get(word, word)
        if flag not in values or word in left_out:
            continue
        if word in OPTIONS:  # those of the command line come after them, and so override them
            changed[flag] = [*(f"{name}={each}" for name, each in value.items()), *values[flag]]
        elif flag not in given:
            changed[flag] = not value if word in OPPOSITES else value
    return changed
