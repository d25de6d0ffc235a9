"""benchmarks/one_request.py: both versions answer the same prompts in turns, each loaded as a user loads it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import windfall

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import one_request


def options(**given: Any) -> argparse.Namespace:
    defaults = {"target": None, "drafter": None, "device": "cpu", "dtype": None, "methods": "none,auto", "tokens": 3}
    return argparse.Namespace(**{**defaults, **given})


def test_every_method_loads_the_target_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a loaded target, the embedded model would not get its own draft head."""
    loaded: list[Any] = []

    def load(target: Any, drafter: Any, method: str, **how: Any) -> Any:
        loaded.append((target, drafter, method))
        return SimpleNamespace(target="a loaded model", generate=lambda prompt, **_: SimpleNamespace(token_ids=[1, 2]))

    monkeypatch.setattr(windfall, "load", load)
    found = one_request.measure(options(), ["a", "b"])
    assert loaded == [(None, None, "none"), (None, None, "auto")]
    assert [row[:2] for row in found] == [(method, t) for method in ("none", "auto") for t in (0.0, 1.0)]
    assert all(speed > 0 for *_, speed in found)


def test_versions_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[Path] = []

    def run(folder: Path, prompts: list[str]) -> list[tuple[str, float, float]]:
        ran.append(folder)
        assert prompts == ["Hi"]
        return [("auto", 0.0, 10.0 * len(ran))]

    monkeypatch.setattr(one_request, "in_own_process", run)
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "Hi"}\n')
    given = options(before=tmp_path, tasks=[str(file)], limit=1, rounds=2)
    (row,) = one_request.compare(given)["rows"]
    assert ran == [tmp_path, one_request.THIS] * 2
    assert (row["before"], row["after"]) == (20.0, 30.0)
