"""Decodes several requests together on a GPU: gives them seats and pages, launches rounds, and collects results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from windfall.core.tree import Arrays, DraftTree
from windfall.core.types import Split, Step, Verdict
from windfall.drafters.base import GpuForm
from windfall.engine.gpu.batch.chunks import Prompt
from windfall.engine.gpu.batch.drafters import batch_drafter, pages_for
from windfall.engine.gpu.batch.page_pool import PagePool
from windfall.engine.gpu.batch.round import MAX_ROUND_ROWS, Round, Sizes, round_rows
from windfall.engine.gpu.batch.state import BatchState
from windfall.engine.gpu.batch.target import BatchTarget, Kind
from windfall.engine.gpu.forward import Unsupported
from windfall.engine.gpu.fused import FusedForward
from windfall.engine.gpu.target import GpuTarget
from windfall.engine.sequence import Sequence as Text
from windfall.kernels.pages import PAGE_TOKENS, tile_rows
from windfall.kernels.rules import Rule

MAX_FLIGHT = 2  # rounds that are launched before the host reads the results of the first
SEAT_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # requests of captured rounds


class Launched(NamedTuple):
    """A round that is launched."""

    number: int  # of its results in the mailbox
    texts: list[Text]  # by seat
    sizes: Sizes


class Limits(NamedTuple):
    """The largest sizes of a batch."""

    seats: int  # requests at a time
    pages: int  # of the KV cache
    longest: int  # tokens of a text
    passes: int  # draft passes of a round
    width: int
    k: int


class BatchRunner:
    """The requests that run at a time. `sizes` decides how large the next round is."""

    def __init__(
        self,
        gpu_target: GpuTarget,
        form: GpuForm | None,
        limits: Limits,
        sizes: Callable[[list[Text]], tuple[Sizes, Rule]],
    ):
        self.gpu_target, self.limits, self.sizes = gpu_target, limits, sizes
        device = gpu_target.device
        most = Sizes(limits.passes, limits.width, limits.k, 0)
        self.state = BatchState(
            device, limits.seats, pages_for(limits.longest), limits.passes + 1, most.nodes, limits.passes + 1
        )
        if not isinstance(gpu_target.forward, FusedForward):
            raise Unsupported("only models with a fused forward run in batches")
        group = gpu_target.forward.group
        self.target = BatchTarget(gpu_target, self.state, limits.pages, MAX_ROUND_ROWS, tile_rows(group))
        self.drafter = None if form is None or not limits.passes else batch_drafter(form, self.target)
        if self.drafter is not None:
            self.drafter.reserve(max(limits.width * (limits.passes - 1), 1) + limits.width)
        self.round_work = Round(self.state, self.target, self.drafter, limits.width)
        self.pool = PagePool(limits.pages)
        self.texts: list[Text] = []  # by seat
        self._pages: dict[Text, list[int]] = {}
        self._launched: list[Launched] = []

    # requests

    def pages_of(self, texts: Sequence[Text]) -> int:
        """Pages that these texts need for their next rounds."""
        return sum(pages_for(self._bound(text)) for text in texts)

    def _bound(self, text: Text) -> int:
        """An upper bound on the length of a text after the rounds in flight and one more."""
        return min(len(text.tokens) + (MAX_FLIGHT + 1) * self.state.pending, self.state.longest)

    @torch.inference_mode()
    def join(self, texts: Sequence[Text]) -> None:
        """Process the prompts of these texts; they take part in the next rounds."""
        prompts = []
        for text in texts:
            tokens = list(text.tokens)
            known = self.pool.find(tokens[:-1])
            pages = known + self._take(pages_for(self._bound(text)) - len(known))
            seat = len(self.texts)
            self.texts.append(text)
            self._pages[text] = pages
            self.state.set_pages(seat, pages)
            self.state.set_sampling(seat, text.params)
            prompts.append(Prompt(seat, tokens, pages, max(len(known) * PAGE_TOKENS - 1, 0)))
        self.state.write(live=len(self.texts))
        self.state.send()
        for chunk, states in self.target.prefill(prompts):
            if self.drafter is not None:
                self.drafter.prefill(chunk, states)
        for prompt in prompts:
            self.state.start(prompt.seat, prompt.tokens, len(prompt.tokens) - 1)
            self.pool.remember(prompt.tokens[:-1], prompt.pages)

    @torch.inference_mode()
    def leave(self, texts: Sequence[Text]) -> None:
        """These texts have ended or are removed; their pages become free."""
        for text in texts:
            seat, last = self.texts.index(text), len(self.texts) - 1
            pages = self._pages.pop(text)
            done = len(text.tokens) - 1 - self.state.pending  # tokens whose columns the drafter has, too
            self.pool.remember(text.tokens[: max(done, 0)], pages)
            self.pool.release(pages)
            if seat != last:
                self.state.move(last, seat)
                self.texts[seat] = self.texts[last]
            self.texts.pop()
        self.state.write(live=len(self.texts))

    def _take(self, count: int) -> list[int]:
        pages = self.pool.take(count) if count > 0 else []
        if len(pages) < count:
            raise MemoryError(f"the KV cache has {self.pool.available} free pages, and {count} are needed")
        return pages

    # rounds

    def round(self) -> dict[Text, Step]:
        """Launch the next round, and return the Steps of the oldest one in flight."""
        while self.texts and len(self._launched) < MAX_FLIGHT:
            self._launch()
        return self._collect() if self._launched else {}

    @torch.inference_mode()
    def _launch(self) -> None:
        state, work = self.state, self.round_work
        (sizes, rule), kind = self.sizes(self.texts), kind_of(self.texts)
        for seat, text in enumerate(self.texts):
            missing = pages_for(self._bound(text)) - len(self._pages[text])
            if missing > 0:
                self._pages[text] += self._take(missing)
                state.set_pages(seat, self._pages[text])
            if text.dice is not None:
                state.set_kappa(seat, text.calibrator.kappa)
        seats = next(size for size in SEAT_SIZES if size >= len(self.texts))
        if sizes.passes:
            sizes = sizes._replace(rows=round_rows(max(sizes.rows, seats)))
        state.send()
        key = ("round", work.results, seats, sizes, rule, kind)
        number = work.results.expect()
        self.gpu_target.graph_cache.run(key, partial(self._run, min(seats, state.seats), sizes, rule, kind))
        self._launched.append(Launched(number, list(self.texts), sizes))

    def _run(self, seats: int, sizes: Sizes, rule: Rule, kind: Kind) -> None:
        if sizes.passes:
            self.round_work.draft(seats, sizes, rule, kind, None)
        self.round_work.verify(seats, sizes, kind)

    def _collect(self) -> dict[Text, Step]:
        launched, results = self._launched.pop(0), self.round_work.results
        arrays = results.arrays[results.wait(launched.number)]
        running = set(map(id, self.texts))
        steps = {}
        for seat, text in enumerate(launched.texts):
            if text.finish is None and id(text) in running:
                steps[text] = self._step(text, seat, arrays, launched.sizes)
        return steps

    def _step(self, text: Text, seat: int, arrays: dict[str, Any], sizes: Sizes) -> Step:
        tree, path = read_tree(arrays, seat, text.tokens[-1], drafted=sizes.passes > 0)
        bonus = int(arrays["tokens"][seat, len(path) - 1])
        tokens, words = text.accept(tree, Verdict(path, bonus))
        every = torch.arange(len(tree))
        step = Step(tokens, words, tree, path, tree, every, sizes.passes, Split(), text.finish)
        text.observe(step)
        return step


def kind_of(texts: list[Text]) -> Kind:
    """How these texts draw their tokens."""
    drawn = [text for text in texts if not text.params.greedy]
    return Kind(not drawn, any(text.dice for text in drawn), any(text.params.filters for text in drawn))


def read_tree(arrays: dict[str, Any], seat: int, root: int, drafted: bool) -> tuple[DraftTree, torch.Tensor]:
    """The verified tree of a request, and its accepted path."""
    start, end = arrays["starts"][seat : seat + 2].tolist()
    count = int(arrays["accepted"][seat])
    path = torch.from_numpy(arrays["path"][seat, :count] - start)
    if not drafted:
        return DraftTree.root(root), path
    tokens, parents, logq, score, depth, rank = (
        arrays[name][start:end].copy() for name in ("row_tokens", "parents", "logq", "score", "depth", "rank")
    )
    parents -= start
    parents[0] = -1
    unknown = np.full(len(tokens), np.nan, np.float32)
    return DraftTree.of(Arrays(tokens, parents, logq, score, depth, rank, unknown)), path
