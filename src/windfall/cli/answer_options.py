"""The options with which `generate --out` makes answers; --resume makes the missing ones with the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from windfall.cli.constraints import ConstraintOptions
from windfall.cli.options import ModelOptions, PromptOptions, SamplingOptions
from windfall.core.files import read_text

HASHED = ("target", "json_schema", "ebnf")  # paths, and contents of files
OF_MODEL = ("dtype", "weights", "fast")  # they may change the text; the device, the drafter and the policy do not
OF_PROMPT = ("system", "raw")


def recorded(
    source: PromptOptions, model: ModelOptions, sampling: SamplingOptions, constraint: ConstraintOptions, **more: Any
) -> dict[str, Any]:
    """The options that decide what an answer contains, by name, without the seed and without what is not given."""
    files = {"json_schema": constraint.json_schema, "ebnf": constraint.ebnf}
    values = {
        **asdict(sampling),
        **asdict(constraint),
        **{name: None if file is None else read_text(file) for name, file in files.items()},
        **{name: getattr(source, name) for name in OF_PROMPT},
        "target": model.reference,
        **{name: getattr(model, name) for name in OF_MODEL},
        **more,
    }
    del values["seed"]  # an answer has the one that was used
    given = {name: value for name, value in values.items() if value is not None and value is not False and value != []}
    return {name: _hash(value) if name in HASHED else value for name, value in given.items()}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The options that differ, as flags with both values."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [_difference(name, before.get(name), now.get(name)) for name in names]


def _difference(name: str, before: Any, now: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if name in HASHED else f"{flag} ({_shown(before)}, now {_shown(now)})"


def _shown(value: Any) -> str:
    if value is None or value is True:
        return "not given" if value is None else "given"
    return json.dumps(value, ensure_ascii=False)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
