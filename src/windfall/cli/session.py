"""Generating texts for a command: streaming, Ctrl-C, warm-up, JSON files and exit codes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from windfall.core.errors import InputError
from windfall.core.files import check_writable, make_folder, parse_json, read_text, replace_text
from windfall.core.garbage import freeze_objects as freeze_objects
from windfall.render import console

if TYPE_CHECKING:
    from windfall.core.logprobs import TokenLogprob
    from windfall.core.token_text import TokenTexts
    from windfall.core.types import Step
    from windfall.engine.engine import Engine, Generation, Prompt, Stream

DIFFERENT, BAD_INPUT, ON_INTERRUPT, ON_BROKEN_PIPE = 1, 2, 130, 141  # exit codes
INTERRUPTED = "interrupted"  # finish reason
WARM_UP_TOKENS = 8  # generated before anything is timed
LONG_PROMPT_TOKENS = 512  # the prefill of such a prompt is announced


@dataclass(frozen=True)
class Session:
    """A loaded engine, its sampling options, and how the text is shown."""

    engine: Engine
    names: dict[str, str]  # of the drafter and the policy
    sampling: dict[str, Any]
    raw: bool = False
    json: bool = False
    coloured: bool = False

    def answer(self, prompt: Prompt) -> Generation:
        """Generate and show a text; Ctrl-C ends it and keeps the tokens so far."""
        generation = _collect(self.engine.stream(prompt, raw=self.raw, **self.sampling), self._show())
        if not self.json:
            print(flush=True)  # end the line of the streamed text
            if self.coloured:
                console.print_origins(generation.steps)
            console.note(console.summary(generation.stats, generation.finish_reason == INTERRUPTED))
        self.remember_costs()
        return generation

    def remember_costs(self) -> None:
        """Store what the engine has learned about the costs of passes."""
        remember_costs(self.engine)

    def report(self, generation: Generation) -> dict[str, Any]:
        """The object that `--json` prints."""
        source = {"target": self.engine.target.name, **self.names, "seed": generation.seed}
        found = generation.logprobs
        logprobs = {} if found is None else {"logprobs": [self._of_token(each) for each in found]}
        return {**as_record(generation), **logprobs, **source}

    def _of_token(self, found: TokenLogprob) -> dict[str, Any]:
        """A token with its log-probability, and the most likely tokens at its place."""
        from windfall.core.logprobs import LOWEST

        def pair(token: int, logprob: float) -> dict[str, Any]:
            return {"id": token, "token": self._token_texts[token].text, "logprob": max(logprob, LOWEST)}

        return {**pair(found.token, found.logprob), "top": [pair(*each) for each in found.top]}

    @cached_property
    def _token_texts(self) -> TokenTexts:
        from windfall.core.token_text import TokenTexts

        return TokenTexts(self.engine.target.tokenizer)

    def _show(self) -> console.Show:
        if self.json:
            return console.show_nothing
        if self.coloured:
            return console.DraftColours(self.engine.target.tokenizer, self.sampling["stop"])
        return console.show_text


def remember_costs(engine: Engine) -> None:
    """Store what the engine has learned about the costs of passes, if its policy uses them."""
    if engine.policy.uses_costs:
        from windfall.engine.profiling import remember

        remember(engine)


def as_record(generation: Generation) -> dict[str, Any]:
    """A generation as plain data."""
    names = ("text", "token_ids", "finish_reason")
    return {**{name: getattr(generation, name) for name in names}, "stats": generation.stats.as_dict()}


def with_seed(sampling: dict[str, Any], announce: bool = False) -> dict[str, Any]:
    """The same keywords with a fixed seed. `announce`: print a newly chosen seed on stderr."""
    from windfall.core.types import SamplingParams

    params = SamplingParams(**sampling).seeded()
    if announce and params.seed != sampling["seed"]:
        console.note(f"seed {params.seed}")
    return {**sampling, "seed": params.seed}


def capture_graphs(engine: Engine, sampling: dict[str, Any]) -> None:
    """On a GPU, capture the CUDA graphs before the first text, with a progress bar."""
    if engine.gpu_runner is not None:
        with console.progress("Capturing CUDA graphs…") as progress:
            for share in engine.warm_up(**sampling):
                progress(share)


def warm_up(engine: Engine, prompt: Prompt, raw: bool, sampling: dict[str, Any]) -> None:
    brief = {**sampling, "max_new_tokens": min(WARM_UP_TOKENS, sampling["max_new_tokens"])}
    engine.generate(prompt, raw=raw, **brief)


def check_chat(engine: Engine) -> None:
    """Refuse a target without a chat template."""
    if not getattr(engine.target.tokenizer, "chat_template", None):
        reason = f"{engine.target.name} has no chat template, which chat and --system need"
        raise InputError(f"{reason}; `windfall generate` without --system continues a text")


def exit_if_interrupted(generation: Generation) -> None:
    if generation.finish_reason == INTERRUPTED:
        raise typer.Exit(ON_INTERRUPT)


@contextmanager
def stop_on_interrupt(message: str | Callable[[], str]) -> Iterator[None]:
    """Ctrl-C prints this note, or the one that the function returns, and exits."""
    try:
        yield
    except KeyboardInterrupt:
        console.note(message if isinstance(message, str) else message())
        raise typer.Exit(ON_INTERRUPT) from None


def command_line() -> list[str]:
    """What the user typed, for the provenance of results."""
    return ["windfall", *sys.argv[1:]]


def check_out_file(out: Path | None) -> None:
    """Refuse a folder as `--out`, and make the folder that the file goes to."""
    if out is not None:
        if out.is_dir():
            raise InputError(f"--out is the file to write, and '{out}' is a folder")
        make_folder(out.parent)
        if not out.exists():
            check_writable(out.parent)


def check_result_file(out: Path | None, command: str, keys: Collection[str]) -> None:
    """`check_out_file`, and refuse to replace anything but a result of the same command: a JSON object with these keys.

    An empty file may be replaced, too.
    """
    check_out_file(out)
    if out is None or not out.exists():
        return
    check_writable(out.parent)  # the file is not written to, but replaced
    if not out.is_file() or not _is_result(out, keys):
        raise InputError(f"'{out}' exists and is not a result of `windfall {command}`; choose another --out")


def _is_result(file: Path, keys: Collection[str]) -> bool:
    try:
        text = read_text(file)
        found = parse_json(text) if text.strip() else dict.fromkeys(keys)
    except ValueError:
        return False
    return isinstance(found, dict) and {*keys} <= found.keys()


def write_json(out: Path | None, value: Any, indent: int = 2) -> None:
    if out is not None:
        replace_text(out, json.dumps(value, indent=indent) + "\n")


def _with_message(stream: Stream) -> Iterator[Step]:
    """The steps, with a message on the terminal during the prefill of a long prompt."""
    steps = iter(stream)
    if stream.prompt_tokens >= LONG_PROMPT_TOKENS:
        with console.waiting(f"Reading {stream.prompt_tokens} prompt tokens…"):
            first = next(steps, None)
        if first is not None:
            yield first
    yield from steps


def _collect(stream: Stream, show: console.Show) -> Generation:
    from windfall.engine.engine import Generation

    steps: list[Step] = []
    times: list[float] = []
    started = time.perf_counter()
    try:
        for step in _with_message(stream):
            steps.append(step)
            times.append(time.perf_counter() - started)
            show(step)
    except KeyboardInterrupt:
        pass
    return Generation.of(steps, times, stream.prompt_tokens, stream.seed)
