"""What `bench serve` sends: how many requests at which times, and what each asks for."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from windfall.bench.tasks import Prompt
from windfall.core.errors import InputError

CHAT, COMPLETIONS = "chat", "completions"  # routes
ROUTES = {CHAT: "/chat/completions", COMPLETIONS: "/completions"}
PER_CLIENT = 3  # requests of each client that sends one after another, unless more prompts or --requests ask for more
MIN_REQUESTS = 16  # of a run


class Level(NamedTuple):
    """One run: either clients that each send a request as soon as the last one ends, or arrivals at random times."""

    clients: int | None = None
    rate: float | None = None  # requests per second, on average; inf: all at once

    @property
    def label(self) -> str:
        return f"{self.clients} at once" if self.rate is None else f"{self.rate:g}/s"


@dataclass(frozen=True)
class Settings:
    """What is sent."""

    concurrency: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    requests: int | None = None  # of each run; None: by the number of clients and prompts
    api: str = CHAT
    max_new_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    stream: bool = True
    warm_up: int = 1  # requests before the first run
    timeout: float = 600.0  # seconds without a byte
    ttft_ms: float | None = None  # limits of goodput
    tpot_ms: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.api not in ROUTES:
            raise InputError(f"--api takes {' or '.join(ROUTES)}, not '{self.api}'")
        different = len({*self.concurrency}) == len(self.concurrency)
        if not different or any(each < 1 for each in self.concurrency):
            raise InputError("--concurrency takes different numbers of clients, each at least 1, for example 1,8,32")
        if len({*self.rates}) < len(self.rates) or not all(each > 0 for each in self.rates):
            raise InputError("--rate takes different numbers of requests per second above 0, for example 0.5,2,inf")
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise InputError(f"--temperature takes a number of at least 0, not {self.temperature}")
        for flag, limit in (("--ttft-ms", self.ttft_ms), ("--tpot-ms", self.tpot_ms), ("--timeout", self.timeout)):
            if limit is not None and not (math.isfinite(limit) and limit > 0):
                raise InputError(f"{flag} takes a number above 0, not {limit}")
        if not self.stream and (self.ttft_ms or self.tpot_ms):
            raise InputError("--ttft-ms and --tpot-ms need streams; leave out --no-stream")

    @property
    def levels(self) -> Iterator[Level]:
        yield from (Level(clients=each) for each in sorted(self.concurrency))
        yield from (Level(rate=each) for each in sorted(self.rates))

    def count(self, level: Level, prompts: int) -> int:
        """The number of requests of a run with this number of prompts."""
        return self.requests or max(prompts, MIN_REQUESTS, PER_CLIENT * (level.clients or 0))

    def arrivals(self, level: Level, count: int) -> list[float] | None:
        """Seconds after the start at which requests arrive, as a Poisson process; None: when the client is free."""
        if level.rate is None:
            return None
        chance, rate = random.Random(self.seed), level.rate
        return list(accumulate((0.0 if math.isinf(rate) else chance.expovariate(rate)) for _ in range(count)))

    def body(self, prompt: Prompt, number: int, model: str) -> dict[str, Any]:
        """The request for the first turn of a prompt."""
        text = prompt.turns[0]
        asked = {"prompt": text} if self.api == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
        return {
            "model": model,
            **asked,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "seed": self.seed + number,
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **({"stream": True, "stream_options": {"include_usage": True}} if self.stream else {}),
        }
