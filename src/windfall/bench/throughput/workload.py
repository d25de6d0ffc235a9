"""What `bench throughput` measures: how many requests run at once, how they arrive, and which prompts they have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from windfall.bench.runner import check_temperatures
from windfall.bench.suites import PROMPT_TOKENS
from windfall.bench.tasks import Prompt
from windfall.core.errors import InputError
from windfall.core.types import GpuOptions

BATCH, STREAM = "batch", "stream"  # how requests arrive


class Cell(NamedTuple):
    """One point of the measurement, at which all methods are compared."""

    temperature: float
    arrivals: str
    concurrency: int  # requests at once


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    concurrency: tuple[int, ...] = (1, 2, 4, 8)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    arrivals: tuple[str, ...] = (BATCH, STREAM)
    stream_factor: int = 3  # requests of a stream, relative to those at once
    rounds: int = 3
    max_new_tokens: int = 128
    prompt_tokens: int = PROMPT_TOKENS
    ignore_eos: bool = False
    coupled: bool = True
    hf: bool = True
    seed: int = 0
    gpu_options: GpuOptions = GpuOptions()

    def __post_init__(self) -> None:
        check_temperatures(self.temperatures)
        if not self.concurrency or len({*self.concurrency}) < len(self.concurrency) or min(self.concurrency) < 1:
            raise InputError("--concurrency takes different numbers of requests, each at least 1, for example 1,8,32")
        if unknown := next((name for name in self.arrivals if name not in (BATCH, STREAM)), None):
            raise InputError(f"--arrivals takes {BATCH} and {STREAM}, not '{unknown}'")
        if not self.arrivals or len({*self.arrivals}) < len(self.arrivals):
            raise InputError(f"give each of --arrivals once, for example {BATCH},{STREAM}")

    @property
    def cells(self) -> Iterator[Cell]:
        """All points, those with few requests first: their texts are what the others are compared with."""
        for temperature in self.temperatures:
            for arrivals in self.arrivals:
                for concurrency in sorted(self.concurrency):
                    yield Cell(temperature, arrivals, concurrency)

    def requests(self, cell: Cell, prompts: int) -> int:
        """The number of requests of one run, with this number of different prompts."""
        if cell.arrivals == STREAM:
            return max(self.stream_factor * cell.concurrency, prompts)
        return max(prompts // cell.concurrency, 1) * cell.concurrency


def repeated(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """The first `count` prompts. If there are fewer, they are asked again with a number in front.

    The number comes first because requests whose prompts begin with the same tokens may share the work of their
    prefill.
    """
    found = list(prompts[:count])
    for place in range(len(found), count):
        prompt, number = prompts[place % len(prompts)], place // len(prompts) + 1
        turns = f"({number}) {prompt.turns[0]}", *prompt.turns[1:]
        found.append(replace(prompt, id=f"{prompt.id}, again {number}", turns=turns))
    return found
