"""The target on a KV cache in pages: prefill passes, and verify passes over the rows of several requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from windfall.engine.gpu.batch.chunks import Chunk, ChunkBuffers
from windfall.engine.gpu.batch.paged_cache import PagedCache
from windfall.engine.gpu.batch.state import BatchState
from windfall.engine.gpu.forward import Pass, Paths
from windfall.engine.gpu.target import Scored
from windfall.kernels.batch_rows import BatchRows, Outcome
from windfall.kernels.draw import draw
from windfall.kernels.move import move
from windfall.kernels.pages import Pages


class Kind(NamedTuple):
    """How the requests of a round draw their tokens; a captured round depends on it."""

    greedy: bool = True  # none draws at random
    coupled: bool = False  # the drafter sees the noise of the draws
    filtered: bool = False  # some exclude unlikely tokens

    @classmethod
    def of_all(cls, kinds: Sequence[Kind]) -> Kind:
        """The kind of requests of these kinds together."""
        coupled, filtered = any(own.coupled for own in kinds), any(own.filtered for own in kinds)
        return cls(all(own.greedy for own in kinds), coupled, filtered)


class BatchTarget:
    """Scores the rows of several requests, draws their tokens, and commits the accepted ones to their pages.

    Rows of trees are staged after the pages, and accepted ones are copied into the pages. Rows of plain decoding go
    straight into the pages.
    """

    def __init__(self, cache: PagedCache, state: BatchState, tile_rows: int):
        gpu_target = cache.gpu_target
        self.gpu_target, self.state, self.forward = gpu_target, state, cache.forward
        self.taps, self.device, self.tile_rows = gpu_target.taps, gpu_target.device, tile_rows
        self.kv, self.staging = cache.kv, cache.staging
        self.chunk = ChunkBuffers(self.device, state.seats, tile_rows)

    def prefill(self, chunk: Chunk) -> None:
        """Process a chunk of prompts."""
        self.chunk.fill(chunk)
        self._prefill(chunk.size, chunk.alone)

    def capture_prefill(self, size: int) -> None:
        """Capture the passes over chunks of this size, with rows of one request and of several."""
        self.chunk.fill(Chunk([], 0, size))
        for alone in (False, True):
            self._prefill(size, alone)

    def _prefill(self, size: int, alone: bool) -> None:
        key = ("batch prefill", size, alone, self.state.span, self.state)
        self.gpu_target.graph_cache.run(key, partial(self._run_chunk, size, alone))

    def states_of(self, chunk: Chunk) -> Tensor | None:
        """The tapped states of the rows of the last processed chunk."""
        states = self.gpu_target.chunk_states
        return None if states is None else states[: chunk.rows]

    def _run_chunk(self, size: int, alone: bool) -> None:
        given = self.chunk.given(size, alone, self.state.lengths, self.state.tables)
        states = self.forward.prefill(given, self.kv, self.taps, 0)
        if self.gpu_target.chunk_states is not None and states is not None:
            self.gpu_target.chunk_states[:size] = states

    def score(self, rows: BatchRows, seats: int, trees: bool, prompts: int = 0) -> Scored:
        """Score the rows of trees, or with `trees=False` the root of each request.

        prompts: rows of the chunk in its buffers that share the pass; they get no logits.
        """
        if prompts:
            return self._score_with_prompts(rows, trees, prompts)
        pages = Pages(rows.owners, self.state.lengths[:seats], self.state.tables[:seats], rows.tiles)
        paths = Paths(rows.reach, rows.lineage if trees else None, pages)
        given = Pass.in_pages(rows.tokens, rows.positions, rows.slots, paths)
        logits, states = self.forward(given, self.kv, self.taps, 0)
        return Scored(logits, states, rows.positions)

    def _score_with_prompts(self, rows: BatchRows, trees: bool, prompts: int) -> Scored:
        count = len(rows.tokens)
        given = self.chunk.pass_after(rows, prompts, self.state.lengths, self.state.tables, trees)
        logits, states = self.forward(given, self.kv, self.taps, 0, count)
        if states is None:
            return Scored(logits, None, rows.positions)
        if self.gpu_target.chunk_states is not None:
            self.gpu_target.chunk_states[:prompts] = states[count:]
        return Scored(logits, states[:count], rows.positions)

    def draw(self, scored: Scored, owners: Tensor, kind: Kind) -> Tensor:
        """The target's token after each row."""
        state, logits = self.state, scored.logits[: len(scored.positions)]
        cutoff = state.cutoffs(logits, owners) if kind.filtered else None
        given = logits, scored.positions, state["seed"], state["temperature"], kind.greedy, 1
        return draw(*given, owners=owners, cutoff=cutoff)

    def commit(self, outcome: Outcome, states: Tensor | None, seats: int) -> Tensor | None:
        """Copy the accepted rows into the pages; returns their states [seats * P, F] if the drafter has features."""
        kv = self.kv.view(-1, *self.kv.shape[-2:])
        source, goal, path = (x[:seats].flatten() for x in (outcome.source, outcome.goal, outcome.path))
        if states is None or self.state.features is None:
            move(kv, source, goal, disjoint=True)
            return None
        kept = states.new_empty(len(path), states.shape[1])
        move(kv, source, goal, states, path, kept, disjoint=True)
        return kept
