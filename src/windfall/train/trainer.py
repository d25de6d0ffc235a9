"""The training loop: it yields what it learnt; others show, log or stop it. What is on disk can be resumed."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windfall.core.errors import InputError
from windfall.core.files import replace_file
from windfall.train.objectives.base import Objective, Report
from windfall.train.optimizers import Optimizers
from windfall.train.recipe import Recipe
from windfall.train.shards import Batch, TokenData
from windfall.train.teacher import Teacher
from windfall.train.workers import Workers

CHECKPOINT = "checkpoint.pt"
LOG_EVERY = 10
WIDTH = 64  # columns of a text are padded to a multiple of this on a GPU


@dataclass(frozen=True)
class Event:
    """How it stands: training figures since the last event, and held-out ones if they were just taken."""

    step: int
    progress: float
    rate: float
    loss: float
    steps: list[float]  # cross-entropy by unrolled step
    hits: list[float]  # top-1 agreement by unrolled step
    tokens: int  # seen so far, padding included
    seconds: float
    held_out: dict[str, Any] | None = None
    best: bool = False  # whether the held-out loss is the lowest so far


class Trainer:
    """A head, an objective, a teacher and texts."""

    def __init__(self, head: nn.Module, objective: Objective, teacher: Teacher, recipe: Recipe, folder: Path):
        self.head, self.objective, self.teacher, self.recipe = head, objective, teacher, recipe
        if teacher.dtype not in (torch.bfloat16, torch.float32):  # in float16 gradients vanish
            name = str(teacher.dtype).removeprefix("torch.")
            raise InputError(f"nothing can be trained in {name}; load the target with --dtype bfloat16 or float32")
        self.path = folder / CHECKPOINT
        self.device = next(head.parameters()).device
        if self.device.type == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)  # plans for 50 ms whenever a shape is new
        if recipe.compile:
            teacher.compile()
        self.workers = Workers.join()
        self.optimizers = Optimizers(head, recipe)
        self.step, self.seconds, self.tokens, self.lowest = 0, 0.0, 0, float("inf")

    def run(self, train: TokenData, held_out: TokenData, keep: Callable[[nn.Module], None]) -> Iterator[Event]:
        """Train to the end; `keep` is called with the head whenever it is the best so far on held-out texts."""
        if not held_out.plan(self.recipe.batch_tokens, self.recipe.max_length):
            raise InputError(f"no held-out text has an answer within its first {self.recipe.max_length} tokens")
        batches, since, saved = self._batches(train), Tally(), time.perf_counter()
        while self.recipe.progress(self.step, self.seconds) < 1:
            started = time.perf_counter()
            progress = self.recipe.progress(self.step, self.seconds)
            rate = self.recipe.rate_at(progress)
            for _ in range(self.recipe.accumulate):
                batch = next(batches)
                report = self._report(batch, progress)
                (report.loss / self.recipe.accumulate).backward()  # type: ignore[no-untyped-call]
                since.add(report)
                self.tokens += batch.tokens.numel() * self.workers.count
            self.workers.average(self.optimizers.parameters)
            self.optimizers.step(rate)
            self.step += 1
            logs, looks = self.step % LOG_EVERY == 0, self.step % self.recipe.validate_every == 0
            figures = since.take() if logs or looks else None  # waits for the device
            if figures is not None and not math.isfinite(figures[0]):
                raise InputError(f"the loss is no number any more at step {self.step}; take a lower --rate")
            self._pass_time(started)
            over = self.recipe.progress(self.step, self.seconds) >= 1
            found = self._look(held_out) if looks or over else None
            best = found is not None and found["loss"] < self.lowest
            if found is not None and best:
                self.lowest = found["loss"]
                if self.workers.rank == 0:
                    keep(self.head)
            if over or looks or time.perf_counter() - saved > 60 * self.recipe.save_minutes:
                self.save()
                saved = time.perf_counter()
            if figures or found:
                yield Event(
                    self.step, self.recipe.progress(self.step, self.seconds), rate, *(figures or since.take()),
                    self.tokens, self.seconds, found, best,
                )  # fmt: skip

    def _pass_time(self, started: float) -> None:
        self.seconds = self.workers.agree(self.seconds + time.perf_counter() - started)

    def _report(self, batch: Batch, progress: float) -> Report:
        with self._precision():
            return self.objective.report(self.head, self.teacher.teach(batch), self.teacher, progress)

    def _precision(self) -> Any:
        if self.teacher.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.teacher.dtype)

    @torch.no_grad()
    def _look(self, held_out: TokenData) -> dict[str, Any]:
        """Held-out figures of the full objective."""
        self.head.eval()
        tally, recipe = Tally(), self.recipe
        for batch in itertools.islice(
            held_out.batches(recipe.batch_tokens, recipe.max_length), recipe.validation_batches
        ):
            tally.add(self._report(self._moved(batch), 1.0))
        self.head.train()
        loss, steps, hits = tally.take()
        return {"loss": loss, "steps": steps, "hits": hits}

    def _batches(self, data: TokenData) -> Iterator[Batch]:
        """Batches without end; this worker's share, from where the last run stopped."""
        recipe, epoch = self.recipe, 0
        size = recipe.batch_tokens, recipe.max_length, recipe.seed
        place = self.step * recipe.accumulate * self.workers.count  # of the next batch, counted over all epochs
        start = place
        while (count := len(data.plan(*size, epoch))) and start >= count:
            start, epoch = start - count, epoch + 1
        if not count:
            raise InputError("there are no texts to train on")
        while True:
            for batch in data.batches(*size, epoch, start):
                if place % self.workers.count == self.workers.rank:
                    yield self._moved(batch)
                place += 1
            start, epoch = 0, epoch + 1

    def _moved(self, batch: Batch) -> Batch:
        """On the device, a little wider: few shapes to get used to, and rows that kernels like."""
        wider = -(batch.tokens.shape[1] - 1) % WIDTH if self.device.type == "cuda" else 0
        tokens, answer = (torch.nn.functional.pad(x, (0, wider)) for x in (batch.tokens, batch.answer))
        moved = Batch(*(x.to(self.device, non_blocking=True) for x in (tokens, answer)))
        return moved._replace(lengths=None if batch.lengths is None else batch.lengths.to(self.device))

    def save(self) -> None:
        """Everything needed to go on, written in one piece."""
        if self.workers.rank:
            return
        state = {
            "head": self.head.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "lowest": self.lowest,
            "recipe": self.recipe.__dict__,
            "random": torch.get_rng_state(),
        }
        if self.device.type == "cuda":
            state["random_on_device"] = torch.cuda.get_rng_state(self.device)
        replace_file(self.path, lambda file: torch.save(state, file))

    def resume(self) -> None:
        """Go on from the checkpoint; a different recipe is refused."""
        try:
            state = torch.load(self.path, map_location=self.device, weights_only=True)
            differing = [key for key, value in state["recipe"].items() if getattr(self.recipe, key) != value]
        except FileNotFoundError:
            raise InputError(f"{self.path.parent} holds no checkpoint to resume from") from None
        except Exception:
            raise InputError(f"{self.path} is damaged; train again into a new folder") from None
        if differing:
            told = (f"{key} was {state['recipe'][key]}, not {getattr(self.recipe, key)}" for key in differing)
            raise InputError(f"the checkpoint was trained with other settings: {', '.join(told)}")
        try:
            self.head.load_state_dict(state["head"])
            self.optimizers.load_state_dict(state["optimizers"])
        except (KeyError, RuntimeError, ValueError):
            raise InputError(f"{self.path} is of another shape; resume with the same settings") from None
        self.step, self.seconds, self.tokens = state["step"], state["seconds"], state["tokens"]
        self.lowest = state["lowest"]
        torch.set_rng_state(state["random"].cpu())
        if self.device.type == "cuda" and "random_on_device" in state:
            torch.cuda.set_rng_state(state["random_on_device"].cpu(), self.device)


class Tally:
    """Sums reports on the device; `take` reads the means and starts anew."""

    def __init__(self) -> None:
        self._reports: list[Report] = []

    def add(self, report: Report) -> None:
        self._reports.append(Report(report.loss.detach(), report.steps, report.hits))

    def take(self) -> tuple[float, list[float], list[float]]:
        reports, self._reports = self._reports, []
        if not reports:
            return float("nan"), [], []
        most = max(len(report.steps) for report in reports)
        full = [report for report in reports if len(report.steps) == most]  # the number of steps may rise on the way
        loss = torch.stack([report.loss for report in full]).mean()
        steps, hits = (torch.stack([getattr(r, name) for r in full]).mean(0) for name in ("steps", "hits"))
        return float(loss), steps.tolist(), hits.tolist()
