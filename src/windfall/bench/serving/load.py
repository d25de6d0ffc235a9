"""Sends the requests of all runs, and keeps the figures of those that are finished."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from windfall.bench.serving.client import Client, Outcome
from windfall.bench.serving.figures import figures
from windfall.bench.serving.workload import ROUTES, Level, Settings
from windfall.bench.tasks import Prompt
from windfall.bench.throughput.workload import repeated
from windfall.core.errors import InputError

Progress = Callable[[int, int], None]  # finished requests, and all


@dataclass
class Result:
    """What was measured so far, as plain data."""

    server: str
    model: str
    provenance: dict[str, Any]
    settings: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {"what": "load test of a server", **asdict(self)}

    @property
    def answered(self) -> bool:
        """Whether any request was answered."""
        return any(row["requests"] > sum(row["errors"].values()) for row in self.rows)


class LoadTest:
    """All runs against one server."""

    def __init__(self, client: Client, prompts: Sequence[Prompt], settings: Settings, progress: Progress):
        self.client, self.prompts, self.settings, self._progress = client, prompts, settings, progress
        self._done, self._total = 0, sum(settings.count(level, len(prompts)) for level in settings.levels)

    async def run(self, result: Result, keep: Callable[[Result], None]) -> None:
        """Measure everything into the result, and call `keep` with it after each run, also after one that is stopped.

        result: its `model` is filled in if it is empty.
        """
        names = await self.client.models()
        if not result.model and not names:
            raise InputError(f"{self.client.base} serves no model; name one with --model")
        result.model = result.model or names[0]
        await self._warm_up(result.model)
        for level in self.settings.levels:
            count, outcomes = self.settings.count(level, len(self.prompts)), list[Outcome]()
            try:
                await self._run_level(level, count, result.model, outcomes)
            finally:
                if outcomes:
                    result.rows.append(figures(level, outcomes, self.settings, count))
                    keep(result)
        result.finished = True
        keep(result)

    async def _warm_up(self, model: str) -> None:
        """A server that answers none of these requests is not worth a test."""
        for number in range(self.settings.warm_up):
            body = self.settings.body(self.prompts[number % len(self.prompts)], number, model)
            outcome = await self.client.send(ROUTES[self.settings.api], body)
            if outcome.error is not None:
                reason = f"{outcome.error} ({outcome.detail})" if outcome.detail else outcome.error
                raise InputError(f"the first request to {self.client.base} failed: {reason}")

    async def _run_level(self, level: Level, count: int, model: str, outcomes: list[Outcome]) -> None:
        """Send the requests of one run; finished ones are added to `outcomes`."""
        prompts, route = repeated(self.prompts, count), ROUTES[self.settings.api]
        bodies = [self.settings.body(prompt, number, model) for number, prompt in enumerate(prompts)]
        arrivals, free = self.settings.arrivals(level, count), asyncio.Semaphore(level.clients or count)
        start = time.perf_counter()

        async def send(number: int) -> None:
            if arrivals is not None:
                await asyncio.sleep(start + arrivals[number] - time.perf_counter())
            async with free:
                outcomes.append(await self.client.send(route, bodies[number]))
            self._done += 1
            self._progress(self._done, self._total)

        tasks = [asyncio.create_task(send(number)) for number in range(count)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def measure(
    result: Result,
    client: Client,
    prompts: Sequence[Prompt],
    settings: Settings,
    keep: Callable[[Result], None],
    progress: Progress = lambda done, total: None,
) -> None:
    """Run a whole load test."""
    try:
        await LoadTest(client, prompts, settings, progress).run(result, keep)
    finally:
        await client.close()
