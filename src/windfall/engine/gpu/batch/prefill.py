"""Processes the prompts of requests that have joined: in passes of their own, or as rows of verify passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from windfall.engine.gpu.batch.chunks import Chunk, Prompt, PromptQueue
from windfall.engine.gpu.batch.drafters import BatchDrafter
from windfall.engine.gpu.batch.round_graphs import RoundGraphs
from windfall.engine.gpu.batch.state import BatchState
from windfall.engine.gpu.batch.target import BatchTarget
from windfall.engine.gpu.events import DeviceEvent, Events
from windfall.engine.gpu.target import PREFILL_SIZES
from windfall.engine.sequence import Sequence
from windfall.kernels.pages import PAGE_TOKENS
from windfall.policies.budget import Sizes

SHARED_ROWS = 128  # rows of a verify pass that waiting prompts may take
SHARING_TOKENS = 256  # if more tokens of prompts wait, they get a pass of their own
MAX_WAITS = 2  # rounds for which few rows of prompts wait for others
CAPTURE_SHARE = 0.25  # a shared pass is captured once its absence has cost this share of the capture's time


class Taken(NamedTuple):
    """Rows of prompts that the target processes next, and the prompts that end with them."""

    chunk: Chunk | None  # None: the prompts that end are known already
    ended: list[Prompt]
    started: DeviceEvent


class Prefill:
    """The prompts that wait, and the texts that they belong to. A text waits at a seat until its prompt has ended."""

    def __init__(self, state: BatchState, target: BatchTarget, drafter: BatchDrafter | None, events: Events):
        self._state, self._target, self._drafter, self._events = state, target, drafter, events
        self.prompts = PromptQueue()
        self.rehearses_sharing = False  # whether rounds are launched as if prompts shared their verify passes
        self.started: dict[Sequence, DeviceEvent] = {}  # the start of each text's prefill, until its first Step
        self._texts: dict[int, Sequence] = {}  # by seat
        self._spans: list[tuple[DeviceEvent, DeviceEvent]] = []  # of passes since `take_spans`
        self._own_pass = False  # whether the next prompts get a pass of their own
        self._lost = 0.0  # seconds, because a shared pass was not captured
        self._waits = 0  # rounds for which the prompts have waited for others

    def __len__(self) -> int:
        """The number of prompts that wait."""
        return len(self.prompts)

    def add(self, text: Sequence, pages: list[int], known_pages: int) -> None:
        """Queue a text. The KV cache has the keys and values of its first `known_pages` already."""
        seat = next(seat for seat in range(self._state.seats, self._state.rows) if seat not in self._texts)
        self._texts[seat] = text
        self._state.set_pages(seat, pages)
        self._state.set_sampling(seat, text.params)
        self.prompts.add(Prompt(seat, list(text.tokens), pages, max(known_pages * PAGE_TOKENS - 1, 0)))

    def remove(self, text: Sequence) -> bool:
        """Forget a text; False if it does not wait."""
        self.started.pop(text, None)
        seat = next((seat for seat, other in self._texts.items() if other is text), None)
        if seat is None:
            return False
        del self._texts[seat]
        self.prompts.remove(seat)
        self._own_pass = self._own_pass and bool(self.prompts)
        return True

    @property
    def may_share(self) -> bool:
        """Whether the prompts that wait may share a verify pass."""
        return self.prompts.left <= SHARING_TOKENS and not self._own_pass

    def run(self) -> list[tuple[Prompt, Sequence]]:
        """Process the next prompts in a pass of their own; returns those that end, and their texts."""
        self._state.send()
        started, self._own_pass = self._events.mark(), False
        chunk, ended = self.prompts.take()
        if chunk is not None:
            self._target.prefill(chunk)
        return self.finish(Taken(chunk, ended, started), started)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the passes over prompts; no request may run."""
        for size in PREFILL_SIZES:
            self._target.capture_prefill(size)
            if self._drafter is not None:
                self._drafter.capture_prefill(size)

    def share(self, sizes: Sizes, graphs: RoundGraphs, running: int, seconds: Callable[[int], float]) -> Taken | None:
        """Take the prompts that share the next verify pass, and send their rows to the device; None: there are none.

        A few rows cost less there than in a pass of their own. If the shared pass is not captured, they get their own
        pass until the time lost this way justifies a capture. `running`: the requests of the verify pass, and `seconds`
        of a pass over this number of rows.
        """
        if self.rehearses_sharing:
            found = Taken(Chunk([], 0, SHARED_ROWS), [], self._events.mark())
        elif not self.prompts or self.prompts.left > SHARING_TOKENS or self._waits_for_more(sizes, running, seconds):
            return None
        elif self._captured(sizes, graphs, partial(seconds, running)):
            found = Taken(*self.prompts.take(SHARED_ROWS), self._events.mark())
        else:
            return None
        if found.chunk is not None:
            self._target.chunk.fill(found.chunk._replace(size=SHARED_ROWS))
        return found

    def _waits_for_more(self, sizes: Sizes, running: int, seconds: Callable[[int], float]) -> bool:
        """Whether other prompts should come first: unused rows of a shared pass take time, and so does waiting."""
        unused = 1 - min(self.prompts.left / SHARED_ROWS, 1)
        if not self.prompts.left or not unused or self._waits >= MAX_WAITS:
            self._waits = 0
            return False
        own = seconds(sizes.rows)
        wasted, lost = unused * (seconds(sizes.rows + SHARED_ROWS) - own), own * len(self._texts) / running
        self._waits = self._waits + 1 if wasted > lost else 0
        return wasted > lost

    def _captured(self, sizes: Sizes, graphs: RoundGraphs, pass_seconds: Callable[[], float]) -> bool:
        """Whether the verify pass with prompts is captured, or its capture pays."""
        if missing := graphs.missing_shared_seconds(sizes, SHARED_ROWS):
            self._lost += pass_seconds()
            if self._lost < CAPTURE_SHARE * missing:
                self._own_pass = True
                return False
            self._lost = 0.0
        return True

    def finish(self, taken: Taken, own_start: DeviceEvent) -> list[tuple[Prompt, Sequence]]:
        """Let the drafter process what the target has; returns the prompts that have ended, and their texts.

        `own_start`: the start of the passes that only prompts take part in.
        """
        if taken.chunk is not None:
            if self._drafter is not None:
                self._drafter.prefill(taken.chunk, self._target.states_of(taken.chunk))
            for part in taken.chunk.parts:
                self.started.setdefault(self._texts[part.prompt.seat], taken.started)
            self._spans.append((own_start, self._events.mark()))
        return [(prompt, self._texts.pop(prompt.seat)) for prompt in taken.ended]

    def take_spans(self) -> list[tuple[DeviceEvent, DeviceEvent]]:
        """Start and end of all passes over prompts since the last call."""
        spans, self._spans = self._spans, []
        return spans
