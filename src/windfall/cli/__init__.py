"""The command line: parse, call the library, render. Torch is imported by the commands that need it, not for --help."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from windfall import __version__
from windfall.cli import audit, bench, chat, diagnose, generate, measure, report, show, study, train, tune
from windfall.cli.help import Command, Group
from windfall.cli.session import BAD_INPUT, ON_BROKEN_PIPE, ON_INTERRUPT
from windfall.core.errors import HeadWarning
from windfall.render import console

COMMANDS = (
    generate.generate,
    chat.chat,
    show.tree,
    measure.compare,
    measure.profile,
    measure.calibrate,
    diagnose.diagnose,
    audit.audit,
    tune.tune,
    report.report,
    show.policies,
    show.doctor,
)


class Commands(Group):
    """Turns what a person did wrong into one line, and Ctrl-C and closed pipes into quiet exits."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            return _refuse(error.format_message())
        except ValueError as error:
            from windfall.core.types import InputError

            if not isinstance(error, InputError):
                raise
            return _refuse(str(error))
        except KeyboardInterrupt:
            raise typer.Exit(ON_INTERRUPT) from None
        except BrokenPipeError:
            _let_output_go()
            raise typer.Exit(ON_BROKEN_PIPE) from None


def _let_output_go() -> None:
    """Nobody takes it any more, and the interpreter flushes once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(message: str) -> None:
    console.fail(message)
    raise typer.Exit(BAD_INPUT)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in COMMANDS:
    app.command(cls=Command)(command)
bench.app.command(cls=Command)(study.study)
app.add_typer(bench.app, name="bench")
app.add_typer(train.app, name="train")


def main() -> None:
    """The `windfall` command."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to stop
    try:
        try:
            app(prog_name="windfall")
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:
            raise
        _let_output_go()
        if isinstance(error, BrokenPipeError):
            sys.exit(ON_BROKEN_PIPE)
        console.fail(f"cannot write to standard output: {error.strerror}")
        sys.exit(BAD_INPUT)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"windfall {__version__}")
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Any Hugging Face causal language model, faster, word for word the same."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    warnings.simplefilter("always", HeadWarning)
    warnings.showwarning = partial(_show_warning, warnings.showwarning)


def _show_warning(usual: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any) -> None:
    """What drafters have to say is a note; other warnings are shown as usual."""
    if issubclass(category, HeadWarning):
        console.note(str(message))
    else:
        usual(message, category, *where)
