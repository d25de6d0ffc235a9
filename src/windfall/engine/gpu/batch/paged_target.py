"""A target for the host loop that decodes several sequences on the KV cache in pages.

The trees of all sequences are verified in one pass, which is a CUDA graph. The rows of a tree lie in the pages of its
sequence, after the committed ones; committing a path moves its rows to the front of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from windfall.core.tree import DraftTree, Integers
from windfall.core.types import InputError, SamplingParams, Scores
from windfall.engine.gpu.batch.chunks import Chunk, ChunkBuffers, Prompt, PromptQueue
from windfall.engine.gpu.batch.paged_cache import PagedCache
from windfall.engine.gpu.batch.paged_texts import PagedTexts, Text
from windfall.engine.gpu.batch.round import MAX_ROUND_ROWS, ROUND_ROWS
from windfall.engine.gpu.batch.row_buffers import NO_TREE, HostRows, RowBuffers, Shape, layout
from windfall.engine.gpu.batch.seat_sampling import SeatSampling
from windfall.engine.gpu.batch.state import ALL_COMMITTED
from windfall.engine.gpu.target import MAX_VERIFY_ROWS
from windfall.engine.gpu.transfer import PackedBuffer, QueuedBuffer, place
from windfall.kernels.draw import draw
from windfall.kernels.move import move
from windfall.kernels.pages import PAGE_TOKENS, UNUSED_PAGE, tile_rows

LEVELS = (16, MAX_VERIFY_ROWS)  # of trees in captured passes
ROWS = ("tokens", "parents", "depth")  # the arrays of a tree that describe its rows
LOGIT_ROWS = (64, 256, MAX_ROUND_ROWS)  # of buffers for logits; a large one is made when it is first needed
PREPARED_ROWS = 256  # of the largest pass that is captured before requests run
MOVES = (16, 128, MAX_ROUND_ROWS)  # rows of captured commits


class PagedTarget:
    """The part of Target that the host loop uses, for several sequences in pages."""

    def __init__(self, cache: PagedCache, seats: int, longest: int, keeps_prompts: bool):
        """At most `seats` sequences of up to `longest` tokens. `keeps_prompts`: whether later sequences may use the
        pages of sequences with the same beginning; those pages have no keys of a drafter."""
        gpu_target, device, long = cache.gpu_target, cache.gpu_target.device, torch.long
        self.cache, self.gpu_target = cache, gpu_target
        self._buffers_id = object()  # part of the keys of its graphs, which would otherwise keep the KV cache
        self._keeps_prompts = keeps_prompts and not gpu_target.taps  # states of known pages are not kept
        self.seats, self.longest = seats, longest
        self.texts = PagedTexts(cache, seats, longest + MAX_VERIFY_ROWS)
        self.params: list[SamplingParams] = []  # of the sequences, for the next pass
        self._trees: list[DraftTree] = []  # of the last pass
        self.tree_rows = 1  # of the largest verified tree so far, or of the trees for which there should be room
        rows, group = MAX_ROUND_ROWS, tile_rows(cache.forward.group)
        self._sampling = SeatSampling(device, seats)
        self._rows = RowBuffers(device, seats, group, LEVELS)
        self._moves = QueuedBuffer(device, source=(long, (rows,)), goal=(long, (rows,)))
        self._drawn = PackedBuffer(device, tokens=(long, (rows,)))
        width, dtype = gpu_target.width, gpu_target.dtype
        self._states = torch.zeros(rows, width, dtype=dtype, device=device) if gpu_target.taps else None
        self._all_states = self._states  # of all rows of the last passes
        self._chunk = ChunkBuffers(device, seats, group)
        self._chunk_lengths = torch.full((seats,), ALL_COMMITTED, device=device)
        self._logits: dict[int, Tensor] = {}  # those of the last pass, by the rows of the buffer
        gpu_target.graph_cache.independent.add(self._buffers_id)

    def close(self) -> None:
        """Drop the graphs and their logits."""
        self.gpu_target.graph_cache.forget(self._buffers_id)
        self._logits = {}

    @property
    def recordings(self) -> int:
        """CUDA graphs captured so far."""
        return self.gpu_target.graph_cache.captures

    # sequences

    def prefill(self, prompts: list[list[int]], taps: tuple[int, ...] = ()) -> list[Tensor] | None:
        """Start new sequences, and drop all others; returns the states at `taps` of all tokens but the last."""
        self.retain([])
        return self.join(prompts) if prompts else [] if taps else None

    @torch.inference_mode()
    def join(self, prompts: list[list[int]]) -> list[Tensor] | None:
        """Add sequences to those that run; returns what `prefill` returned for them."""
        self.cache.forget_outdated()
        first = len(self.texts)
        try:
            return self._join(prompts, first)
        except BaseException:  # pages of the new sequences may hold no keys yet: they are not remembered
            self.texts.release(first)
            raise

    def _join(self, prompts: list[list[int]], first: int) -> list[Tensor] | None:
        """Add sequences from seat `first` on."""
        queue = PromptQueue()
        for seat, prompt in enumerate(prompts, first):
            known = self.cache.pool.find(prompt[:-1]) if self._keeps_prompts else []
            text = self.texts.add(prompt[:-1], list(known))
            self.texts.take_pages(seat, len(prompt))
            queue.add(Prompt(seat, prompt, text.pages, len(known) * PAGE_TOKENS))
        self.texts.send()
        states: list[list[Tensor]] = [[] for _ in prompts]
        while queue:
            chunk, _ = queue.take()
            if chunk is None:
                continue
            found = self._prefill(chunk)
            if found is not None:
                for part in chunk.parts:
                    states[part.prompt.seat - first].append(found[part.rows].clone())
        for seat in range(first, len(self.texts)):
            self._remember(self.texts[seat])
        if self._states is None:
            return None
        return [torch.cat(pieces) if pieces else self._states[:0] for pieces in states]

    def _prefill(self, chunk: Chunk) -> Tensor | None:
        """Process a chunk of prompts; returns the tapped states of its rows, valid until the next pass."""
        self._chunk.fill(chunk)
        key = ("host prefill", chunk.size, chunk.alone, self.texts.span, self._buffers_id)
        self.gpu_target.graph_cache.run(key, partial(self._run_chunk, chunk.size, chunk.alone))
        return self.gpu_target.chunk_states

    def _run_chunk(self, size: int, alone: bool) -> None:
        gpu_target = self.gpu_target
        given = self._chunk.given(size, alone, self._chunk_lengths, self.texts.tables)
        states = self.cache.forward.prefill(given, self.cache.kv, gpu_target.taps, 0)
        if gpu_target.chunk_states is not None and states is not None:
            gpu_target.chunk_states[:size] = states

    def _remember(self, text: Text) -> None:
        if self._keeps_prompts:
            self.cache.pool.remember(text.tokens, text.pages)

    def retain(self, keep: list[int]) -> None:
        """Keep these sequences only."""
        for seat in set(range(len(self.texts))).difference(keep):
            self._remember(self.texts[seat])
        self.texts.retain(keep)

    # passes

    @torch.inference_mode()
    def score(self, trees: list[DraftTree]) -> list[Scores]:
        """Scores include the target's draws for sequences whose sampling depends on the logits alone."""
        if (most := max(map(len, trees))) > MAX_VERIFY_ROWS:
            raise InputError(f"a verify pass takes {MAX_VERIFY_ROWS} rows at the most on a GPU, not {most}")
        self.tree_rows = max(self.tree_rows, most)
        for seat, (text, tree) in enumerate(zip(self.texts, trees, strict=True)):
            if not self.texts.has_pages(seat, rows := len(text.tokens) + len(tree)):
                self.texts.take_pages(seat, rows)
        self._trees, parts = trees, [*parts_of(trees)]
        if len(parts) == 1:
            self._all_states = self._states
            return self._score(parts[0], trees)
        found, pieces = list[Scores](), list[Tensor]()
        for part in parts:  # each uses the memory of the one before it
            found += self._score(part, trees[part.start : part.stop], copies=True)
            if self._states is not None:
                pieces.append(self._states[: sum(map(len, trees[part.start : part.stop]))].clone())
        self._all_states = torch.cat(pieces) if pieces else None
        return found

    def _score(self, seats: range, trees: list[DraftTree], copies: bool = False) -> list[Scores]:
        """One pass over the trees of these seats. `copies`: of the logits that the host reads."""
        filtered, shape = self._write_sampling(seats), self._write_rows(seats, trees)
        self._run(shape, filtered)
        self.gpu_target.graph_cache.wait()
        count, logits = sum(map(len, trees)), self._logits[buffer_rows(shape.size)]
        drawn = self._drawn.host["tokens"][:count].tolist()
        if copies:
            read = any(not draws_alone(self.params[seat]) or needs_logits(self.params[seat]) for seat in seats)
            logits = logits[: count if read else 0].clone()
        found, row = [], 0
        for seat, tree in zip(seats, trees, strict=True):
            own = slice(row, row + len(tree))
            found.append(Scores(logits[own], None, drawn[own] if draws_alone(self.params[seat]) else None))
            row += len(tree)
        return found

    def _write_sampling(self, seats: range) -> bool:
        """Send how these sequences draw their tokens; returns whether some exclude unlikely tokens."""
        able = [(seat, self.params[seat]) for seat in seats if draws_alone(self.params[seat])]
        for seat, params in able:
            self._sampling.write(seat, params)
        if able:
            self._sampling.send()
        return any(params.filters and not params.greedy for _, params in able)

    def _write_rows(self, seats: range, trees: list[DraftTree]) -> Shape:
        """Send the rows of a pass."""
        own, row, first = layout([*map(len, trees)])
        owners, lengths, node = own + seats.start, self.texts.lengths, row - first
        tokens, parents, depth = (np.concatenate([getattr(each.arrays, name) for each in trees]) for name in ROWS)
        slots = self.texts.slots(owners, lengths[owners] + node)
        rows = HostRows(owners, node, tokens, lengths[owners] + depth, slots)
        self.texts.send()
        if (parents == node - 1).all():  # each node is the parent of the next one
            return self._rows.send(rows)
        lineages, above, ancestor = np.zeros((len(row), depth.max() + 1), np.int64), np.maximum(parents, 0) + first, row
        for _ in range(lineages.shape[1]):  # up to the root, which is its own parent here
            lineages[row, depth[ancestor]] = slots[ancestor]
            ancestor = above[ancestor]
        return self._rows.send(rows, lineages, lengths)

    @torch.inference_mode()
    def capture(self, rows: int = PREPARED_ROWS) -> None:
        """Capture the passes over up to this number of rows; no sequence may run."""
        for size in ROUND_ROWS[: bisect_left(ROUND_ROWS, rows) + 1]:
            for levels in (NO_TREE, LEVELS[0]):
                self._run(self._rows.send_padding(size, levels), False)

    def _run(self, shape: Shape, filtered: bool) -> None:
        key = ("host verify", shape, filtered, self.texts.span, self._buffers_id)
        self.gpu_target.graph_cache.run(key, partial(self._run_rows, shape, filtered))

    def _run_rows(self, shape: Shape, filtered: bool) -> None:
        gpu_target, size = self.gpu_target, shape.size
        given = self._rows.given(shape, self.texts.tables)
        logits, states = self.cache.forward(given, self.cache.kv, gpu_target.taps, 0)
        logits = logits[:size]
        buffer = buffer_rows(size)
        if buffer not in self._logits:  # in an eager run: the first run of a graph's work is not captured
            self._logits[buffer] = logits.new_empty(buffer, logits.shape[1])
        self._logits[buffer][:size].copy_(logits)  # graphs share this memory: there are many, and logits are large
        if self._states is not None and states is not None:  # other graphs may reuse the memory
            self._states[:size].copy_(states[:size])
        self._drawn.device["tokens"][:size].copy_(self._draw(logits, size, filtered))
        self._drawn.publish()

    def _draw(self, logits: Tensor, size: int, filtered: bool) -> Tensor:
        """The target's token after each row, which means nothing for sequences that cannot draw on the device."""
        there, sampling = self._rows.device, self._sampling
        owners = there["owners"][:size]
        cutoff = sampling.cutoffs(logits, owners) if filtered else None
        given = logits, there["positions"][:size], sampling["seed"], sampling["temperature"], False, 1
        return draw(*given, owners=owners, cutoff=cutoff)

    @torch.inference_mode()
    def commit(self, paths: list[Tensor]) -> None:
        """Keep the rows of these nodes of the trees last scored."""
        owners, row, first = layout([*map(len, paths)])
        nodes, places = np.concatenate([path.numpy() for path in paths]), row - first
        starts = self.texts.lengths[owners]
        moved = np.flatnonzero(nodes != places)
        source, goal = (self.texts.slots(owners[moved], (starts + each)[moved]) for each in (nodes, places))
        for start in range(0, len(source), MAX_ROUND_ROWS):
            self._move(source[start : start + MAX_ROUND_ROWS], goal[start : start + MAX_ROUND_ROWS])
        for text, tree, path in zip(self.texts, self._trees, paths, strict=True):  # now their keys are in place
            text.tokens += tree.arrays.tokens[path.numpy()].tolist()

    def _move(self, source: Integers, goal: Integers) -> None:
        here, size = self._moves.wait_writable(), MOVES[bisect_left(MOVES, len(source))]
        for name, slots in (("source", source), ("goal", goal)):
            here[name][: len(slots)] = slots
            here[name][len(slots) : size] = UNUSED_PAGE * PAGE_TOKENS
        self._moves.send()
        there, kv = self._moves.device, self.cache.kv.view(-1, *self.cache.kv.shape[-2:])
        work = partial(move, kv, there["source"][:size], there["goal"][:size])
        self.gpu_target.graph_cache.run(("host commit", size, self._buffers_id), work)

    @torch.inference_mode()
    def states(self, scores: list[Scores], paths: list[Tensor]) -> list[Tensor] | None:
        """The hidden states [N, taps * H] of committed paths; None if the passes have none."""
        if self._all_states is None:
            return None
        starts = np.cumsum([0, *map(len, self._trees[:-1])])
        rows = np.concatenate([path.numpy() + start for path, start in zip(paths, starts, strict=True)])
        found = self._all_states.index_select(0, place(rows.tolist(), self._all_states.device))
        return [*torch.split(found, [*map(len, paths)])]


def buffer_rows(size: int) -> int:
    """Rows of the buffer for the logits of a pass of this size."""
    return LOGIT_ROWS[bisect_left(LOGIT_ROWS, size)]


def draws_alone(params: SamplingParams) -> bool:
    """Whether the draws of a sequence depend on the logits of the row alone."""
    return not (params.reads_prefix or params.logit_bias)


def needs_logits(params: SamplingParams) -> bool:
    """Whether the host reads logits although the pass drew the tokens."""
    return params.logprobs is not None or params.constraint is not None


def parts_of(trees: list[DraftTree]) -> Iterator[range]:
    """Successive trees whose rows fit into one pass."""
    start = rows = 0
    for number, tree in enumerate(trees):
        if rows + len(tree) > MAX_ROUND_ROWS:
            yield range(start, number)
            start, rows = number, 0
        rows += len(tree)
    yield range(start, len(trees))
