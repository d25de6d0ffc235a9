"""`windfall train data`: prompts come in, conversations with the target's own answers come out."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windfall.cli.options import Json, TargetOptions, takes_records
from windfall.core.wording import counted
from windfall.render import console

if TYPE_CHECKING:
    from windfall.train.data import Progress


@takes_records
def data(
    model: TargetOptions,
    out: Annotated[Path, typer.Option("--out", help="Folder for the token files.", show_default=False)],
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="JSONL or text files, or datasets on the hub (name or name:split).", show_default=False),
    ] = None,
    self_prompts: Annotated[
        int, typer.Option("--self-prompts", help="User turns that the target writes itself, besides.", min=0)
    ] = 0,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Length of an answer at the most.")] = 256,
    max_length: Annotated[int, typer.Option("--max-length", help="Tokens of a conversation at the most.")] = 2048,
    temperature: Annotated[float, typer.Option("--temperature", help="Of the sampled answers.")] = 1.0,
    greedy_share: Annotated[float, typer.Option("--greedy-share", help="How many answers are greedy.")] = 0.5,
    cut_loops: Annotated[
        bool, typer.Option("--cut-loops", help="End an answer when eight tokens come for the third time.")
    ] = False,
    held_out: Annotated[float, typer.Option("--held-out", help="How many prompts are kept for validation.")] = 0.02,
    limit: Annotated[int | None, typer.Option("--limit", help="Use so many of the given prompts only.", min=1)] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", help="Texts written at once; none: what the device has room for.", min=1)
    ] = None,
    shard: Annotated[int, typer.Option("--shard", help="Prompts in a file.")] = 2000,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same answers.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in --out, or add to it.")] = False,
    json: Json = False,
) -> None:
    """Let the target answer prompts, for training drafters on what it really writes."""
    from windfall.train.data import Settings, make_data

    settings = Settings(max_new_tokens, temperature, greedy_share, held_out, seed, max_length, cut_loops, shard)
    target = model.load()
    try:
        with _progress() as report:
            about = make_data(
                target,
                prompts or [],
                out,
                settings,
                self_prompts=self_prompts,
                limit=limit,
                batch=batch,
                resume=resume,
                report=report,
                notify=console.note,
            )
    except KeyboardInterrupt:
        console.note("stopped; what is written stays, and --resume goes on")
        raise
    if json:
        console.print_json(about, indent=2)
        return
    counts = about["counts"]
    answers, tokens, texts = (
        counted(counts.get(name, 0), one)
        for name, one in (("answers", "answer"), ("answer_tokens", "token"), ("texts", "text"))
    )
    console.note(
        f"{answers} of {tokens} in {texts}, {counts.get('held_out', 0)} of them held out; "
        f"{100 * about['repeated_share']:.1f}% repeats itself"
    )
    if not counts.get("held_out"):
        console.note("training needs texts that are held out: give more prompts, or a larger --held-out")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """A bar with prompts, tokens per second and the time left."""
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[speed]}"),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(elapsed_when_finished=True),
    )
    with bars.Progress(*columns, console=console.stderr(), transient=True, disable=not sys.stderr.isatty()) as bar:
        tasks: dict[str, bars.TaskID] = {}

        def report(now: Progress) -> None:
            if now.stage not in tasks:
                tasks[now.stage] = bar.add_task(now.stage, total=now.total, speed="")
            task = tasks[now.stage]
            elapsed = bar.tasks[task].elapsed or 0.0
            speed = f"{now.tokens / elapsed:,.0f} tokens/s" if elapsed else ""
            bar.update(task, completed=now.done, total=now.total, speed=speed)

        yield report
