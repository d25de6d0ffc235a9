"""`windfall train data`: the target answers prompts, and the conversations become training data."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windfall.cli.declare import argument, json_option, option, pause_option
from windfall.cli.options import TargetOptions
from windfall.cli.session import stop_on_interrupt
from windfall.core.wording import counted
from windfall.render import console

if TYPE_CHECKING:
    from windfall.engine.engine import Engine
    from windfall.train.data import Progress

LEFT_OUT = {
    "empty": ("answer without text", "answers without text"),
    "too_long": ("prompt that is too long", "prompts that are too long"),
}
MAX_REQUESTS, MAX_REQUESTS_CUDA = 16, 256  # texts that are generated at once by default


def data(
    model: TargetOptions,
    out: Path = option(..., "Folder for the token files.", show_default=False),
    prompts: list[str] | None = argument(None, "JSONL files, text files, or datasets on the hub (NAME or NAME:SPLIT)."),
    self_prompts: int = option(0, "Number of additional prompts that the target writes itself.", min=0),
    max_new_tokens: int = option(256, "Maximum length of an answer."),
    max_length: int = option(2048, "Maximum number of tokens of a conversation."),
    temperature: float = option(1.0, "Temperature of the sampled answers."),
    greedy_share: float = option(0.5, "Share of the answers that are greedy."),
    cut_loops: bool = option(False, "End an answer when the same eight tokens occur for the third time."),
    held_out: float = option(0.02, "Share of the prompts kept for validation."),
    limit: int | None = option(None, "Use at most this many of the given prompts.", min=1),
    batch: int | None = option(None, "Largest number of texts at once. Default: 256 with CUDA, else 16.", min=1),
    shard: int = option(2000, "Prompts per token file."),
    seed: int = option(0, "Random seed; the same seed gives the same answers."),
    resume: bool = option(False, "Continue or extend the data in --out."),
    pause_after: float | None = pause_option(),
    json: bool = json_option(),
) -> None:
    """Let the target answer prompts, to train drafters on its own texts."""
    from windfall.train.data import Settings, check_folder, make_data

    settings = Settings(max_new_tokens, temperature, greedy_share, held_out, seed, max_length, cut_loops, shard)
    check_folder(out, resume)
    engine = _plain_engine(model, batch)
    how: dict[str, Any] = {"self_prompts": self_prompts, "limit": limit, "resume": resume, "notify": console.note}
    how |= {"pause_after": pause_after}
    note = "stopped; the data so far is kept, and --resume continues"
    with stop_on_interrupt(note), engine, _progress(engine) as report:
        about = make_data(engine, prompts or [], out, settings, **how, report=report)
    if json:
        console.print_json(about, indent=2)
        return
    counts = about["counts"]
    answers, tokens, texts = (
        counted(counts.get(name, 0), one)
        for name, one in (("answers", "answer"), ("answer_tokens", "token"), ("texts", "text"))
    )
    console.note(
        f"{answers} with {tokens} in {texts}, {counts.get('held_out', 0)} of them held out; "
        f"{100 * about['repeated_share']:.1f}% of the text repeats itself"
    )
    if left_out := [counted(counts[kind], *words) for kind, words in LEFT_OUT.items() if counts.get(kind)]:
        console.note(f"left out: {', '.join(left_out)}")
    if not about["finished"]:
        console.note("paused; the same command with --resume continues")
    elif not counts.get("held_out"):
        console.note("training needs held-out texts: give more prompts, or a larger --held-out")


def _plain_engine(model: TargetOptions, batch: int | None) -> Engine:
    """Decodes many texts at once, without drafts: in large batches these cost more than they save."""
    from windfall.engine.loading import load

    target = model.load_target()
    usual = MAX_REQUESTS_CUDA if target.device.type == "cuda" else MAX_REQUESTS
    return load(target, "ngram", "none", max_requests=batch or usual)


@contextlib.contextmanager
def _progress(engine: Engine) -> Iterator[Callable[[Progress], None]]:
    """A bar with the stage, the prompts done and the tokens per second."""
    started: dict[str, float] = {}
    with console.live_progress("Generating") as progress:

        def report(now: Progress) -> None:
            if not started and engine.target.device.type == "cuda" and engine.batch_fallback:
                console.note(f"texts do not share passes on the GPU, which is slower: {engine.batch_fallback}")
            seconds = time.monotonic() - started.setdefault(now.stage, time.monotonic())
            speed = f", {now.tokens / seconds:,.0f} tokens/s" if seconds else ""
            share = now.done / now.total if now.total else 0.0
            progress(share, f"{now.stage} {now.done}/{now.total}{speed}")

        yield report
