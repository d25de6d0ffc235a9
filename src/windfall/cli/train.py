"""`windfall train`: the target writes its own answers, and drafters learn from them."""

from __future__ import annotations

import typer

from windfall.cli import train_data, train_head, train_lm

app = typer.Typer(no_args_is_help=True, help="Train drafters for a target on what the target itself writes.")
for command in (train_data.data, train_head.head, train_lm.lm):
    app.command()(command)
