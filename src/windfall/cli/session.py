"""A loaded engine at work for a person: texts are streamed, Ctrl-C keeps what is there, exits have codes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from windfall.render import console

if TYPE_CHECKING:
    from windfall.core.types import Step
    from windfall.engine.engine import Engine, Generation, Prompt, Stream

DIFFERENT, BAD_INPUT, ON_INTERRUPT, ON_BROKEN_PIPE = 1, 2, 130, 141  # exit codes
INTERRUPTED = "interrupted"  # finish reason
WARM_UP = 8  # tokens before anything is timed
LONG_PROMPT = 512  # tokens; shorter prompts are read in a moment


@dataclass(frozen=True)
class Session:
    """A loaded engine, how tokens are drawn, and how the text is shown."""

    engine: Engine
    names: dict[str, str]  # of the drafter and the policy
    sampling: dict[str, Any]
    raw: bool = False
    json: bool = False
    coloured: bool = False

    def answer(self, prompt: Prompt) -> Generation:
        """Generate and show a text; Ctrl-C ends it early and keeps what is there."""
        generation = _collect(self.engine.stream(prompt, raw=self.raw, **self.sampling), self._show())
        if not self.json:
            console.end_text(generation, self.coloured)
        if self.engine.policy.uses_costs:
            from windfall.engine.profiling import remember

            remember(self.engine)
        return generation

    def report(self, generation: Generation) -> dict[str, Any]:
        source = {"target": self.engine.target.name, **self.names, "seed": generation.seed}
        return {**console.as_record(generation), **source}

    def _show(self) -> console.Show:
        if self.json:
            return console.show_nothing
        return console.DraftColours(self.engine, self.sampling["stop"]) if self.coloured else console.show_text


def with_seed(sampling: dict[str, Any], tell: bool = False) -> dict[str, Any]:
    """The same keywords with one seed for all texts to come; a fresh one is printed on stderr if `tell`."""
    from windfall.core.types import SamplingParams

    params = SamplingParams(**sampling).seeded()
    if tell and params.seed != sampling["seed"]:
        console.note(f"seed {params.seed}")
    return {**sampling, "seed": params.seed}


def record(engine: Engine, sampling: dict[str, Any]) -> None:
    """On a GPU, record the passes before the first text, and show how far that is."""
    if engine.gpu_runner is not None:
        with console.progress("Recording passes…") as told:
            for share in engine.warm_up(**sampling):
                told(share)


def warm_up(engine: Engine, prompt: Prompt, raw: bool, sampling: dict[str, Any]) -> None:
    brief = {**sampling, "max_new_tokens": min(WARM_UP, sampling["max_new_tokens"])}
    engine.generate(prompt, raw=raw, **brief)


def check_chat(engine: Engine) -> None:
    """Refuse a target that knows no conversations."""
    from windfall.core.types import InputError

    if not getattr(engine.target.tokenizer, "chat_template", None):
        raise InputError(f"{engine.target.name} has no chat template, which chat and --system need")


def exit_if_interrupted(generation: Generation) -> None:
    if generation.finish_reason == INTERRUPTED:
        raise typer.Exit(ON_INTERRUPT)


def _announced(stream: Stream) -> Iterator[Step]:
    """The steps, with a word on the terminal while a long prompt is read."""
    steps = iter(stream)
    if stream.prompt_tokens >= LONG_PROMPT:
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
        for step in _announced(stream):
            steps.append(step)
            times.append(time.perf_counter() - started)
            show(step)
    except KeyboardInterrupt:
        pass
    return Generation.of(steps, times, stream.prompt_tokens, stream.seed)
