"""The training loop of heads and small models: it yields events, writes checkpoints and can be resumed."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windfall.core.errors import InputError
from windfall.core.files import replace_file
from windfall.core.interrupts import uninterrupted
from windfall.train.batch import Batch
from windfall.train.losses import Report
from windfall.train.muon import Muon
from windfall.train.objectives.base import Objective
from windfall.train.prefetch import prefetch
from windfall.train.recipe import Recipe
from windfall.train.shards import TokenData
from windfall.train.teacher import Teacher

CHECKPOINT = "checkpoint.pt"
LOG_STEPS = 10  # optimizer steps between events
PER_TOKEN = (
    "embed_tokens.weight",
    "lm_head.weight",
    "own_embedding",
    "own_vocabulary",
    "pair.before",
    "pair.after",
)  # matrices with a row per token


@dataclass(frozen=True)
class Event:
    """Training figures since the last event, and held-out figures if they were just measured."""

    step: int
    progress: float
    rate: float
    loss: float
    steps: list[float]  # loss by draft step
    hits: list[float]  # top-1 agreement by draft step
    tokens: int  # seen so far, padding included
    seconds: float
    held_out: dict[str, Any] | None = None
    best: bool = False  # whether the held-out loss is the lowest so far


class Trainer:
    """Trains a head with an objective, a teacher and texts."""

    def __init__(
        self,
        head: nn.Module,
        objective: Objective,
        teacher: Teacher,
        recipe: Recipe,
        folder: Path,
        measure_tau: Callable[[Any], dict[str, float]] | None = None,
    ):
        """`measure_tau` is called with the head in each validation, and its result is recorded as `tau`."""
        self.head, self.objective, self.teacher, self.recipe = head, objective, teacher, recipe
        self.measure_tau = measure_tau
        if teacher.dtype not in (torch.bfloat16, torch.float32):  # float16 gradients underflow
            name = str(teacher.dtype).removeprefix("torch.")
            raise InputError(f"training in {name} is not supported; load the target with --dtype bfloat16 or float32")
        self.path = folder / CHECKPOINT
        self.device = next(head.parameters()).device
        if recipe.compile:
            teacher.compile()
        self.workers = Workers.join()
        self.optimizers = Optimizers(head, recipe)
        self.step, self.seconds, self.tokens, self.lowest = 0, 0.0, 0, float("inf")
        self._saved = 0  # the step of the checkpoint
        self._begun: dict[str, Any] = {}  # where the step began that is not finished yet, as `save` writes it

    @property
    def progress(self) -> float:
        """From 0 to 1."""
        return self.recipe.progress(self.step, self.seconds)

    def run(
        self,
        train: TokenData,
        held_out: TokenData,
        keep: Callable[[nn.Module], None],
        pause_after: float | None = None,
    ) -> Iterator[Event]:
        """Train to the end, or for `pause_after` minutes; after Ctrl-C the checkpoint has all finished steps.

        `keep` is called with the head whenever its held-out loss is the lowest so far.
        """
        if not held_out.plan(self.recipe.batch_tokens, self.recipe.max_length):
            raise InputError(f"no held-out text has an answer within its first {self.recipe.max_length} tokens")
        with contextlib.closing(prefetch(self._batches(train))) as batches:
            try:
                yield from self._steps(batches, held_out, keep, pause_after)
            except KeyboardInterrupt:
                if self.step > self._saved:
                    self.save()
                raise

    def _steps(
        self,
        batches: Iterator[Batch],
        held_out: TokenData,
        keep: Callable[[nn.Module], None],
        pause_after: float | None,
    ) -> Iterator[Event]:
        since, saved = Means(), time.perf_counter()
        begun, over = saved, self.progress >= 1
        while not over:
            started, rate = time.perf_counter(), self.recipe.rate_at(self.progress)
            self._train_step(batches, rate, since)
            logs, validates = self.step % LOG_STEPS == 0, self.step % self.recipe.validate_every == 0
            figures = since.take() if logs or validates else None  # waits for the device
            if figures is not None and not math.isfinite(figures[0]):
                raise InputError(f"the loss is not finite at step {self.step}; use a lower --rate")
            self.seconds += time.perf_counter() - started
            if self.recipe.minutes:  # then the time decides what the next step does
                self.seconds = self.workers.agree(self.seconds)
            over = self.progress >= 1 or self._pauses(begun, pause_after)
            found = self._validate(held_out) if validates or over else None
            best = found is not None and found["loss"] < self.lowest
            if found is not None and best:
                if self.workers.rank == 0:
                    keep(self.head)
                self.lowest = found["loss"]
            if over or validates or time.perf_counter() - saved > 60 * self.recipe.save_minutes:
                self.save()
                saved = time.perf_counter()
            if figures or found:
                yield Event(
                    self.step, self.progress, rate, *(figures or since.take()), self.tokens, self.seconds, found, best
                )

    def _pauses(self, begun: float, after: float | None) -> bool:
        """Whether this many minutes have passed; the same for all workers."""
        return after is not None and self.workers.agree(time.perf_counter() - begun) >= 60 * after

    def _train_step(self, batches: Iterator[Batch], rate: float, since: Means) -> None:
        progress, self._begun = self.progress, {**self._random(), "tokens": self.tokens}
        with cudnn_attention_disabled(self.device):
            for _ in range(self.recipe.accumulate):
                batch = next(batches)
                report = self._report(batch, progress)
                (report.loss / self.recipe.accumulate).backward()  # type: ignore[no-untyped-call]
                since.add(report)
                self.tokens += batch.tokens.numel() * self.workers.count
        self.workers.average(self.optimizers.parameters)
        with uninterrupted():  # a checkpoint has whole steps
            self.optimizers.step(rate)
            self.step, self._begun = self.step + 1, {}

    def _report(self, batch: Batch, progress: float) -> Report:
        half = self.teacher.dtype != torch.float32
        precision = torch.autocast(self.device.type, self.teacher.dtype) if half else contextlib.nullcontext()
        with precision:
            return self.objective.report(self.head, self.teacher.run(batch.to(self.device)), self.teacher, progress)

    @torch.no_grad()
    def _validate(self, held_out: TokenData) -> dict[str, Any]:
        """The objective's figures on held-out texts, and the tokens per pass if they can be measured."""
        self.head.eval()
        means, recipe = Means(), self.recipe
        batches = held_out.batches(recipe.batch_tokens, recipe.max_length)
        with cudnn_attention_disabled(self.device):
            for batch in itertools.islice(batches, recipe.validation_batches):
                means.add(self._report(batch, 1.0))
        figures = means.figures()
        loss, steps, hits = means.take()
        found: dict[str, Any] = {"loss": loss, "steps": steps, "hits": hits, **figures}
        if self.measure_tau is not None and self.workers.rank == 0:
            with cudnn_attention_disabled(self.device):
                found["tau"] = self.measure_tau(self.head)
        self.head.train()
        return found

    def _batches(self, data: TokenData) -> Iterator[Batch]:
        """Endless batches of this worker, from where the last run stopped."""
        recipe, workers, epoch = self.recipe, self.workers, 0
        place = self.step * recipe.accumulate * workers.count + workers.rank  # in the epoch, of the next batch
        while True:
            plan = data.plan(recipe.batch_tokens, recipe.max_length, recipe.seed, epoch)
            if not plan:
                raise InputError("there are no texts to train on")
            while place < len(plan):
                yield data.padded(plan[place], recipe.max_length)
                place += workers.count
            place, epoch = place - len(plan), epoch + 1

    def save(self) -> None:
        """Write a checkpoint with everything that `resume` needs."""
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
            "draft_tokens": getattr(self.head, "draft_tokens", None),
            **self._random(),
            **self._begun,
        }
        replace_file(self.path, lambda file: torch.save(state, file))
        self._saved = self.step

    def _random(self) -> dict[str, Tensor]:
        """The states of torch's random numbers."""
        state = {"random": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["random_on_device"] = torch.cuda.get_rng_state(self.device)
        return state

    def resume(self) -> None:
        """Continue from the checkpoint; a different recipe is refused."""
        try:
            state = torch.load(self.path, map_location=self.device, weights_only=True)
            differing = [key for key, value in state["recipe"].items() if getattr(self.recipe, key) != value]
        except FileNotFoundError:
            raise InputError(f"'{self.path.parent}' holds no checkpoint to resume from") from None
        except Exception:
            raise InputError(f"'{self.path}' is damaged; train again into a new folder") from None
        if differing:
            changes = (f"{key} was {state['recipe'][key]}, not {getattr(self.recipe, key)}" for key in differing)
            raise InputError(f"the checkpoint was trained with other settings: {', '.join(changes)}")
        try:
            self.head.load_state_dict(state["head"])
            self.optimizers.load_state_dict(state["optimizers"])
        except (KeyError, RuntimeError, ValueError):
            raise InputError(f"'{self.path}' has another shape; resume with the same settings") from None
        self.step, self.seconds, self.tokens = state["step"], state["seconds"], state["tokens"]
        self.lowest, self._saved = state["lowest"], self.step
        torch.set_rng_state(state["random"].cpu())
        if self.device.type == "cuda" and "random_on_device" in state:
            torch.cuda.set_rng_state(state["random_on_device"].cpu(), self.device)


def drafted_tokens(folder: Path) -> Tensor | None:
    """The draft vocabulary of the checkpoint in a folder; None if it has none or cannot be read."""
    with contextlib.suppress(Exception):  # `resume` says what is wrong
        state = torch.load(folder / CHECKPOINT, map_location="cpu", weights_only=True, mmap=True)
        found: Tensor | None = state.get("draft_tokens")
        return None if found is None else found.clone()
    return None


@contextlib.contextmanager
def cudnn_attention_disabled(device: torch.device) -> Iterator[None]:
    """Disable cuDNN's attention on CUDA, which plans for 50 ms at every new shape, and restore the setting after."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


class Means:
    """Collects reports on the device; `take` reads their means and clears them."""

    def __init__(self) -> None:
        self._reports: list[Report] = []

    def add(self, report: Report) -> None:
        self._reports.append(report._replace(loss=report.loss.detach()))

    def figures(self) -> dict[str, list[float]]:
        """Further figures of the reports: means over rows, by step; without those that no row has."""
        found = [report.figures for report in self._reports if report.figures is not None]
        totals = {name: torch.stack([own[name] for own in found]).sum(0) for name in (found[0] if found else ())}
        return {name: (sums / counts.clamp(min=1)).tolist() for name, (sums, counts) in totals.items() if counts.any()}

    def take(self) -> tuple[float, list[float], list[float]]:
        reports, self._reports = self._reports, []
        if not reports:
            return float("nan"), [], []
        most = max(len(report.steps) for report in reports)
        full = [report for report in reports if len(report.steps) == most]  # objectives may add steps as they progress
        loss = torch.stack([report.loss for report in full]).mean()
        steps, hits = (torch.stack([getattr(r, name) for r in full]).mean(0) for name in ("steps", "hits"))
        return float(loss), steps.tolist(), hits.tolist()


class Optimizers:
    """AdamW, or Muon for matrices inside layers and AdamW for the rest, at one learning rate."""

    def __init__(self, module: nn.Module, recipe: Recipe):
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        inside = [p for name, p in named.items() if p.dim() == 2 and not name.endswith(PER_TOKEN)]
        matrices = inside if recipe.optimizer == "muon" else []
        others = [p for p in named.values() if not any(p is m for m in matrices)]
        self.parameters, self.clip = list(named.values()), recipe.clip
        self.parts: list[Any] = []
        if matrices:
            self.parts.append(Muon(matrices, recipe.decay))
        if others:
            self.parts.append(torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=recipe.decay, fused=True))

    def step(self, rate: float) -> None:
        if self.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[Any]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[Any]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


class Workers:
    """The training processes that `accelerate launch` started, or this process alone."""

    def __init__(self, accelerator: Any = None):
        self._accelerator = accelerator
        self.rank: int = accelerator.process_index if accelerator else 0
        self.count: int = accelerator.num_processes if accelerator else 1

    @classmethod
    def join(cls) -> Workers:
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return cls()
        from accelerate import Accelerator

        return cls(Accelerator())

    def average(self, parameters: Sequence[Tensor]) -> None:
        """Replace the gradients of every worker by their mean."""
        if self.count > 1:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = self._accelerator.reduce(parameter.grad, "mean")

    def agree(self, number: float) -> float:
        """The first worker's number, so that all workers follow one clock."""
        if self.count == 1:
            return number
        from accelerate.utils import broadcast

        return float(broadcast(torch.tensor([number], device=self._accelerator.device, dtype=torch.float64)))
