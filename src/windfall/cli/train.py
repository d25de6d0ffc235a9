"""`windfall train`: the target writes its own answers, and drafters and policies learn from them."""

from __future__ import annotations

import typer

from windfall.cli import train_classifier, train_data, train_head, train_lm, train_ltd
from windfall.cli.help import Command, Group

app = typer.Typer(cls=Group, no_args_is_help=True, help="Train drafters and policies on what the target itself writes.")
drafters = (train_data.data, train_head.head, train_lm.lm)
policies = (train_classifier.classifier, train_ltd.record, train_ltd.ltd)
for command in (*drafters, *policies):
    app.command(cls=Command)(command)
