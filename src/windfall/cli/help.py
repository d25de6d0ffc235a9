"""`--help`: flags are shown without a type, and in narrow terminals options are listed one below another."""

from __future__ import annotations

import shutil
import textwrap
from typing import Any

from typer.core import TyperCommand, TyperGroup

NARROW = 72  # columns below which typer's tables cut the names of options
INDENT = 4


class _Flags:
    """Shows `--raw` where typer would show `--raw <bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_Flags, TyperCommand):
    """A command of windfall."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        width = shutil.get_terminal_size().columns
        if width < NARROW:
            formatter.write(listed(self, ctx, width))
        else:
            super().format_help(ctx, formatter)


class Group(_Flags, TyperGroup):
    """Commands under one name."""


def listed(command: Any, ctx: Any, width: int) -> str:
    """The help of a command with each option on a line of its own and its meaning below it, under panel titles."""
    usage = f"Usage: {ctx.command_path} {' '.join(command.collect_usage_pieces(ctx))}"
    parts = [_filled(usage, width), *(_filled(text, width) for text in (command.help or "").split("\n\n") if text)]
    panels: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(ctx):
        if record := param.get_help_record(ctx):
            title = "Arguments" if param.param_type_name == "argument" else "Options"
            panels.setdefault(getattr(param, "rich_help_panel", None) or title, []).append(record)
    for title, records in panels.items():
        lines = [f"{name.strip()}\n{_filled(meaning, width, INDENT)}" for name, meaning in records]
        parts.append("\n".join([f"{title}:", *lines]))
    return "\n\n".join(parts) + "\n"


def _filled(text: str, width: int, indent: int = 0) -> str:
    return textwrap.fill(" ".join(text.split()), width, initial_indent=" " * indent, subsequent_indent=" " * indent)
