"""An engine without a model for tests of the chat: it repeats the last message."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from windfall.core.types import SamplingParams, Split

WAIT = "wait"  # the message whose answer does not end by itself


@dataclass
class FakeStream:
    steps: Iterator[Any]
    prompt_tokens: int
    seed: int | None

    def __iter__(self) -> Iterator[Any]:
        return self.steps


class FakeEngine:
    gpu_unavailable, gpu_runner = "", None
    policy = SimpleNamespace(uses_costs=False)

    def __init__(self, context: int | None = None) -> None:
        self.target = SimpleNamespace(name="fake", context=context, tokenizer=SimpleNamespace(chat_template="any"))
        self.prompts: list[list[dict[str, str]]] = []
        self.seeds: list[int | None] = []

    def params(self, **sampling: Any) -> SamplingParams:
        return SamplingParams(**sampling)

    def tokenize(self, prompt: list[dict[str, str]]) -> list[int]:
        return [ord(character) for message in prompt for character in message["content"]]

    def stream(self, prompt: list[dict[str, str]], raw: bool = False, **sampling: Any) -> FakeStream:
        self.prompts.append(prompt)
        self.seeds.append(sampling["seed"])
        return FakeStream(self._steps(prompt, sampling), len(self.tokenize(prompt)), sampling["seed"])

    def _steps(self, prompt: list[dict[str, str]], sampling: dict[str, Any]) -> Iterator[Any]:
        said = prompt[-1]["content"]
        room = sampling["max_new_tokens"]
        if self.target.context is not None:
            room = min(room, self.target.context - len(self.tokenize(prompt)))
        tokens = "working" if said == WAIT else f"heard {said!r}"
        for place, token in enumerate(tokens[:room], 1):
            last = said != WAIT and place == len(tokens)
            yield step(token, "stop" if last else "length" if place == room else None)
        for _ in range(6000 if said == WAIT else 0):
            time.sleep(0.05)  # short: an interrupt that another thread receives does not end the main thread's sleep


def step(text: str, finish: str | None) -> Any:
    return SimpleNamespace(
        tokens=(ord(text),),
        text=text,
        tree=[0],
        rows=1,
        accepted=0,
        draft_passes=0,
        counts=(1, 1, 0, 0, 0),
        seconds=Split(),
        finish=finish,
        prefill_seconds=0.0,
    )
