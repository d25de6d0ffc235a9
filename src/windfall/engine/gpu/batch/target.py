"""The target on a KV cache in pages: prefill passes, and verify passes over the rows of several requests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from windfall.engine.gpu.batch.chunks import Chunk, ChunkBuffers, Prompt, chunks
from windfall.engine.gpu.batch.state import BatchState
from windfall.engine.gpu.forward import Pass, Paths
from windfall.engine.gpu.target import GpuTarget, Scored
from windfall.kernels.batch import BatchRows, Outcome
from windfall.kernels.draw import draw
from windfall.kernels.move import move
from windfall.kernels.pages import PAGE_TOKENS, Pages


class BatchTarget:
    """Scores the rows of several requests, draws their tokens, and commits the accepted ones to their pages.

    Rows of trees are staged after the pages, and accepted ones are copied into the pages. Rows of plain decoding go
    straight into the pages.
    """

    def __init__(self, gpu_target: GpuTarget, state: BatchState, pages: int, staged: int, tile_rows: int):
        """`pages` of the KV cache, the unused one included, and `staged` rows after them."""
        self.gpu_target, self.state, self.forward = gpu_target, state, gpu_target.forward
        self.taps, self.device, self.tile_rows = gpu_target.taps, gpu_target.device, tile_rows
        layers, heads, width = self.forward.shape
        self.staging = pages * PAGE_TOKENS
        size = (2, layers, heads, self.staging + staged, width)
        self.kv = torch.zeros(size, dtype=gpu_target.dtype, device=self.device)
        self.chunk = ChunkBuffers(self.device, state.seats, tile_rows)

    def prefill(self, prompts: list[Prompt]) -> Iterator[tuple[Chunk, Tensor | None]]:
        """Process prompts; yields each chunk and the tapped states of its rows, which are valid until the next."""
        cache, target = self.gpu_target.graph_cache, self.gpu_target
        for chunk in chunks(prompts):
            self.chunk.fill(chunk)
            key = ("batch prefill", chunk.size, chunk.alone, self)
            cache.run(key, partial(self._run_chunk, chunk.size, chunk.alone))
            yield chunk, None if target.chunk_states is None else target.chunk_states[: chunk.rows]

    def _run_chunk(self, size: int, alone: bool) -> None:
        given = self.chunk.given(size, alone, self.state.lengths, self.state["tables"])
        states = self.forward.prefill(given, self.kv, self.taps, 0)
        if self.gpu_target.chunk_states is not None and states is not None:
            self.gpu_target.chunk_states[:size] = states

    def score(self, rows: BatchRows, seats: int, trees: bool) -> Scored:
        """Score the rows of trees, or with `trees=False` the root of each request."""
        pages = Pages(rows.owners, self.state.lengths[:seats], self.state["tables"][:seats], rows.tiles)
        paths = Paths(rows.reach, rows.lineage if trees else None, pages)
        given = Pass.in_pages(rows.tokens, rows.positions, rows.slots, paths)
        logits, states = self.forward(given, self.kv, self.taps, 0)
        return Scored(logits, states, rows.positions)

    def draw(self, scored: Scored, owners: Tensor, greedy: bool) -> Tensor:
        """The target's token after each row. `greedy`: no request draws at random."""
        size = len(scored.positions)
        sampling = self.state["seed"], self.state["temperature"]
        return draw(scored.logits[:size], scored.positions, *sampling, greedy, 1, owners=owners)

    def commit(self, outcome: Outcome, states: Tensor | None, seats: int) -> None:
        """Copy the accepted rows into the pages, and their states to the drafter's features."""
        features = self.state.features
        kv = self.kv.view(-1, *self.kv.shape[-2:])
        source, goal, path = (x[:seats].flatten() for x in (outcome.source, outcome.goal, outcome.path))
        if states is None or features is None:
            move(kv, source, goal)
        else:
            move(kv, source, goal, states, path, features[:seats].flatten(0, 1))
