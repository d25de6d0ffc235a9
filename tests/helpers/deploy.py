"""Reads the files in deploy/."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import typer.main

from windfall.cli import app

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


class Instruction(NamedTuple):
    """One instruction of a Dockerfile."""

    name: str
    value: str

    @property
    def words(self) -> list[str]:
        """The value as words, of a JSON list or a shell's line."""
        listed = re.search(r"\[.*\]$", self.value)
        found: list[str] = json.loads(listed.group()) if listed else shlex.split(self.value)
        return found


def dockerfile() -> list[Instruction]:
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text("utf-8"))
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [Instruction(name, value.strip()) for name, _, value in (line.partition(" ") for line in lines)]


def serve_options() -> dict[str, Any]:
    """The options of `windfall serve`, and their parameters."""
    commands: Any = typer.main.get_command(app)
    return {name: param for param in commands.commands["serve"].params for name in param.opts}
