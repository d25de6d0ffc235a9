"""`--help`: flags are shown without a type, and narrow terminals get a list of options instead of tables."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from windfall.cli.declare import takes_options

MIN_TABLE_COLUMNS = 72  # in narrower terminals typer's tables cut the names of options
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
        if width < MIN_TABLE_COLUMNS:
            formatter.write(help_list(self, ctx, width))
        else:
            super().format_help(ctx, formatter)


class Group(_Flags, TyperGroup):
    """A group of commands."""


def make_group(help: str, *commands: Callable[..., None], cls: type[Group] = Group) -> typer.Typer:
    """A typer application with these commands."""
    app = typer.Typer(
        cls=cls,
        help=help,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for command in commands:
        app.command(cls=Command)(takes_options(command))
    return app


def help_list(command: Any, ctx: Any, width: int) -> str:
    """The help of a command with each option on its own line and the explanation below it."""
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
