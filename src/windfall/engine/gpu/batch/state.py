"""What the device knows of each running request: the end of its text, its pages and its sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windfall.core.types import SamplingParams
from windfall.costs.acceptance import DEPTHS, RANKS
from windfall.engine.gpu.batch.seat_sampling import sampling_arrays, seat_cutoffs, write_sampling
from windfall.engine.gpu.graphs import GraphCache
from windfall.engine.gpu.transfer import QueuedBuffer
from windfall.engine.gpu.tree import FORECAST_SHAPE
from windfall.kernels.accept import reset_to_root
from windfall.kernels.pages import PAGE_TOKENS, UNUSED_PAGE
from windfall.kernels.trees import NO_NODE, Calibration, TreeArrays, tree_of

MAX_BACKLOG = 16  # tokens of a text that wait for the drafter while nothing is drafted
CHANGED_SEATS = (4, 16, 64)  # sizes of the graphs that move or admit requests; a larger one takes all seats
ALL_COMMITTED = 1 << 24  # length of a text during its prefill: its rows read all keys from its pages


class BatchState:
    """Running requests have the seats 0, 1, …, without gaps. Those whose prompts are not processed yet have any of the
    seats from `seats` on.

    The host sends pages and sampling (`settings`); the device keeps lengths, pending tokens and trees up to date.
    """

    def __init__(self, graphs: GraphCache, seats: int, pages: int, pending: int, capacity: int, deepest: int):
        """`pages` for each text, `pending` tokens for each round, trees of `capacity` nodes down to depth `deepest`."""
        long, number = torch.long, torch.float32
        device = graphs.device
        self._graphs, self.device, self.seats, self.pages, self.pending = graphs, device, seats, pages, pending
        rows = self.rows = 2 * seats
        self._pages = QueuedBuffer(device, tables=(torch.int32, (rows, pages)))
        self._pages.host["tables"][:] = UNUSED_PAGE
        self.settings = QueuedBuffer(
            device,
            **sampling_arrays(rows),
            limits=(long, (rows,)),  # rows of a verify pass
            weights=(number, (rows, 1 + DEPTHS + RANKS)),  # of the calibrated acceptance
            live=(long, (1,)),  # seats in use
            floor=(number, (1,)),  # the lowest key of a node that is verified
        )
        self.settings.host["kappa"][:] = 1.0
        self._written: dict[str, float] = {}  # by `write`
        self.changed = self._pages_changed = True  # since the last `send`
        names = ("source", "goal", "length", "token", "waits")
        self._seat_changes = QueuedBuffer(device, **dict.fromkeys(names, (long, (seats,))))  # of seats
        self.calibration = Calibration(  # forecasts are made on the host
            self["weights"][:seats],
            torch.zeros(seats, *FORECAST_SHAPE, device=device),
            torch.zeros(seats, 2, device=device),
        )
        self.span = pages  # pages of a text that passes read; captured passes depend on it
        self.lengths = torch.zeros(rows, dtype=long, device=device)  # committed tokens, the root not included
        self.lengths[seats:] = ALL_COMMITTED
        self.trees = batch_trees(device, seats, capacity, deepest)
        self.backlog = max(pending, MAX_BACKLOG)  # tokens of a text that the drafter may have to take in
        self.tokens = torch.zeros(seats, self.backlog, dtype=long, device=device)  # not in the drafter's KV cache yet
        self.pending_count = torch.zeros(seats, dtype=long, device=device)
        self.draft_lengths = torch.zeros(rows, dtype=long, device=device)  # positions in the drafter's KV cache
        self.features: Tensor | None = None  # [rows, backlog, taps * H]: the target's states before these tokens

    def __getitem__(self, name: str) -> Tensor:
        """Settings on the device."""
        return self.settings.device[name]

    def write(self, **values: float) -> None:
        """Change settings of the host, for all requests; `send` sends them."""
        for name, value in values.items():
            if self._written.get(name) != value:
                self._written[name] = value
                self.settings.wait_writable()[name][...] = value
                self.changed = True

    def send(self) -> None:
        """Send the settings and the pages, if they have changed."""
        if self.changed:
            self.settings.send()
            self.changed = False
        if self._pages_changed:
            self._pages.send()
            self._pages_changed = False

    def set_pages(self, seat: int, pages: Sequence[int]) -> None:
        """The pages of the text at this seat."""
        table = self._pages.wait_writable()["tables"][seat]
        table[: len(pages)] = pages
        table[len(pages) :] = UNUSED_PAGE
        self._pages_changed = True

    def set_sampling(self, seat: int, params: SamplingParams) -> None:
        write_sampling(self.settings.wait_writable(), seat, params)
        self.changed = True

    def set_terms(self, seats: list[int], kappas: list[float], weights: Any) -> None:
        """Change what is known about the acceptance of the requests at these seats."""
        host = self.settings.wait_writable()
        for name, values in (("kappa", kappas), ("weights", weights)):
            new = np.asarray(values, np.float32)
            if (host[name][seats] != new).any():
                host[name][seats] = new
                self.changed = True

    def cutoffs(self, logits: Tensor, owners: Tensor) -> Tensor:
        """The lowest logit of each row [n, V] that its request's filters keep, [n]."""
        return seat_cutoffs(self.settings.device, logits, owners)

    def set_pending(self, tokens: Tensor, features: Tensor | None, count: Tensor) -> None:
        """The drafter has taken in all tokens but these: tokens [n, P] and features [n * P, F] of the first n seats."""
        seats, width = tokens.shape
        self.tokens[:seats, :width] = tokens
        if self.features is not None and features is not None:
            self.features[:seats, :width] = features.view(seats, width, -1)
        self.pending_count[:seats] = count

    def add_pending(self, tokens: Tensor, features: Tensor | None, count: Tensor) -> None:
        """The drafter has to take in one token more: tokens [n] and features [n, F] of the first n seats.

        `count` is 0 for seats that are not in use.
        """
        seats = torch.arange(len(tokens), device=self.device)
        place = self.pending_count[: len(tokens)].clamp(max=self.backlog - 1)
        self.tokens[seats, place] = tokens
        if self.features is not None and features is not None:
            self.features[seats, place] = features.to(self.features.dtype)
        self.pending_count[: len(tokens)] += count

    def move(self, sources: list[int], goals: list[int]) -> None:
        """The running requests at the seats `sources` get the seats `goals`."""
        if goals:
            self._run("move seats", self._move, source=sources, goal=goals)
            self._move_settings(sources, goals)

    def _move(self, source: Tensor, goal: Tensor) -> None:
        roots = self.trees.tokens[:, 0]  # between rounds, a tree is its root
        arrays = [self.lengths, self.draft_lengths, self.tokens, self.pending_count, roots]
        for array in arrays + ([] if self.features is None else [self.features]):
            array.index_copy_(0, goal, array.index_select(0, source))

    def admit(self, sources: list[int], goals: list[int], texts: list[list[int]]) -> None:
        """Requests whose prefill has ended, by target and drafter, get the seats `goals`."""
        if goals:
            ends = {"length": [len(text) - 1 for text in texts], "token": [text[-1] for text in texts]}
            waits = [int(len(text) > 1) for text in texts]
            self._run("admit", self._admit, source=sources, goal=goals, waits=waits, **ends)
            self._move_settings(sources, goals)

    def _admit(self, source: Tensor, goal: Tensor, length: Tensor, token: Tensor, waits: Tensor) -> None:
        given = [(self.lengths, length), (self.draft_lengths, length), (self.pending_count, waits)]
        for array, values in [*given, (self.tokens[:, 0], token), (self.trees.tokens[:, 0], token)]:
            array.index_copy_(0, goal, values)
        if self.features is not None:
            self.features.index_copy_(0, goal, self.features.index_select(0, source))

    @torch.inference_mode()
    def capture_seat_changes(self) -> None:
        """Capture the graphs of `move` and `admit`; no request may run."""
        for count in sorted({*(size for size in CHANGED_SEATS if size < self.seats), self.seats}):
            first = [0] * count
            self._run("move seats", self._move, source=first, goal=first)
            self._run("admit", self._admit, source=first, goal=first, length=first, token=first, waits=first)

    def _run(self, name: str, work: Callable[..., None], **columns: list[int]) -> None:
        """Do this work on some seats, in a graph of a fixed size; the first seat fills the unused places."""
        count = len(columns["goal"])
        size = next((each for each in CHANGED_SEATS if each >= count), self.seats)
        here = self._seat_changes.wait_writable()
        for column, values in columns.items():
            here[column][:count] = values
            here[column][count:size] = values[0]
        self._seat_changes.send()
        there = {column: self._seat_changes.device[column][:size] for column in columns}
        self._graphs.run((name, size, self), partial(work, **there))

    def _move_settings(self, sources: list[int], goals: list[int]) -> None:
        host = self.settings.wait_writable()
        for name in ("seed", "temperature", "kappa", "top_k", "top_p", "min_p", "weights"):
            host[name][goals] = host[name][sources]
        tables = self._pages.wait_writable()["tables"]
        tables[goals] = tables[sources]
        self.changed = self._pages_changed = True

    @property
    def tables(self) -> Tensor:
        """The first `span` pages of each text."""
        return self._pages.device["tables"][:, : self.span]

    @property
    def longest(self) -> int:
        """An upper bound on the length of a text."""
        return self.pages * PAGE_TOKENS


def batch_trees(device: torch.device, seats: int, capacity: int, deepest: int) -> TreeArrays:
    """Trees of one node."""

    def integers(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.long, device=device)

    def numbers(*shape: int) -> Tensor:
        return torch.zeros(*shape, device=device)

    wide = seats, capacity
    trees = TreeArrays(
        tokens=integers(*wide),
        parents=integers(*wide),
        depth=integers(*wide),
        rank=integers(*wide),
        logq=numbers(*wide),
        score=numbers(*wide),
        key=numbers(*wide),
        chance=numbers(*wide),
        taken=torch.zeros(wide, dtype=torch.bool, device=device),
        ancestors=torch.full((*wide, deepest + 1), NO_NODE, device=device),
        slot=integers(*wide),
        count=torch.ones(seats, dtype=torch.long, device=device),
    )
    for seat in range(seats):
        reset_to_root(tree_of(trees, seat), torch.zeros(1, dtype=torch.long, device=device))
    return trees
