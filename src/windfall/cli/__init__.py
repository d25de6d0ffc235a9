"""The command line. Commands import torch when they run, so that `--help` is fast."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from windfall import __version__
from windfall.cli import (
    audit,
    bench,
    bench_serve,
    chat,
    diagnose,
    export,
    generate,
    measure,
    report,
    serve,
    show,
    train_ltd,
    tune,
    usage_errors,
)
from windfall.cli.bench_speed import speed
from windfall.cli.bench_throughput import throughput
from windfall.cli.help import Group, make_group
from windfall.cli.session import BAD_INPUT, ON_BROKEN_PIPE, ON_INTERRUPT
from windfall.cli.study import study
from windfall.cli.train_classifier import classifier
from windfall.cli.train_data import data
from windfall.cli.train_drafter import head, lm
from windfall.core.errors import InputError, UserNote
from windfall.render import console

UsageError: type[Any] = typer.BadParameter.__bases__[0]  # typer has it without a public name


class Commands(Group):
    """All commands. Bad input is answered with one line; Ctrl-C and closed pipes end a command without a message."""

    def make_context(self, *given: Any, **more: Any) -> Any:
        try:
            return super().make_context(*given, **more)
        except UsageError as error:
            return _refuse_usage(error)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            return _refuse_usage(error)
        except InputError as error:
            return _refuse(str(error))
        except KeyboardInterrupt:
            raise typer.Exit(ON_INTERRUPT) from None
        except BrokenPipeError:
            _discard_output()
            raise typer.Exit(ON_BROKEN_PIPE) from None


def _discard_output() -> None:
    """Redirect stdout to nowhere: the interpreter flushes it once more at exit, which would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse_usage(error: Any) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":  # typer prints the help for it
        raise error
    _refuse(usage_errors.message_of(error))


def _refuse(message: str) -> None:
    console.fail(message)
    raise typer.Exit(BAD_INPUT)


app = make_group(
    "Faster text generation from Hugging Face causal language models, with exactly the same text.",
    generate.generate,
    chat.chat,
    serve.serve,
    show.tree,
    measure.compare,
    measure.profile,
    measure.calibrate,
    diagnose.diagnose,
    audit.audit,
    tune.tune,
    export.export,
    report.report,
    show.policies,
    show.doctor,
    cls=Commands,
)
about = "Run benchmarks of policies, drafters and servers, and keep the results."
app.add_typer(
    make_group(about, speed, throughput, bench_serve.serve, bench.run, bench.suites, bench.show, study), name="bench"
)
about = "Train drafters and policies on texts that the target writes."
app.add_typer(make_group(about, data, head, lm, classifier, train_ltd.record, train_ltd.ltd), name="train")


def main() -> None:
    """The `windfall` command."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # characters that the terminal's encoding lacks
    try:
        try:
            app(prog_name="windfall")
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:
            raise
        _discard_output()
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
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Quieten the libraries and print windfall's own warnings as notes."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context.with_resource(warnings.catch_warnings())  # the changes below end with the command
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    warnings.simplefilter("always", UserNote)
    warnings.showwarning = partial(_show_warning, warnings.showwarning, set())


def _show_warning(
    usual: Callable[..., None], shown: set[str], message: Warning | str, category: type[Warning], *where: Any
) -> None:
    """Print each of windfall's own warnings once, as a note, and other warnings as usual."""
    if not issubclass(category, UserNote):
        usual(message, category, *where)
    elif str(message) not in shown:
        shown.add(str(message))
        console.note(str(message))
