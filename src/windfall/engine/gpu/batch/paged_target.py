"""A target for the host loop that decodes several sequences on the KV cache in pages.

The trees of all sequences are verified in one pass, which is a CUDA graph. The rows of a tree lie in the pages of its
sequence, after the committed ones; committing a path moves its rows to the front of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from windfall.core.sampling import signed
from windfall.core.tree import DraftTree, Integers
from windfall.core.types import InputError, SamplingParams, Scores
from windfall.engine.gpu.batch.chunks import Chunk, ChunkBuffers, Prompt, PromptQueue
from windfall.engine.gpu.batch.paged_cache import PagedCache
from windfall.engine.gpu.batch.round import MAX_ROUND_ROWS, round_rows
from windfall.engine.gpu.batch.state import ALL_COMMITTED
from windfall.engine.gpu.forward import Pass, Paths
from windfall.engine.gpu.target import MAX_VERIFY_ROWS
from windfall.engine.gpu.transfer import PackedBuffer, QueuedBuffer, place
from windfall.kernels.cutoff import cutoffs
from windfall.kernels.draw import draw
from windfall.kernels.move import move
from windfall.kernels.pages import PAGE_TOKENS, UNUSED_PAGE, Pages, max_tiles, pages_for, tile_rows

DEPTHS = (16, MAX_VERIFY_ROWS)  # levels of trees in captured passes; longer lineages take longer to send
SPANS = (32, 128, 512, 2048, 8192)  # pages of a sequence that captured passes read
NO_TREE = 0  # levels in a pass whose rows are chains
ROWS = ("tokens", "parents", "depth")  # the arrays of a tree that describe its rows
LOGIT_ROWS = (64, 256, MAX_ROUND_ROWS)  # of buffers for logits; a large one is made when it is first needed
MOVES = (16, 128, MAX_ROUND_ROWS)  # rows of captured commits


@dataclass(eq=False)
class Text:
    """A sequence that runs."""

    tokens: list[int]  # committed ones
    pages: list[int]


class Draws(NamedTuple):
    """How a pass draws the tokens after its rows."""

    greedy: bool  # none draws at random
    filtered: bool  # some exclude unlikely tokens


class PagedTarget:
    """The part of Target that the host loop uses, for several sequences in pages."""

    def __init__(self, cache: PagedCache, seats: int, longest: int, keeps_prompts: bool):
        """At most `seats` sequences of up to `longest` tokens. `keeps_prompts`: whether later sequences may use the
        pages of sequences with the same beginning; those pages have no keys of a drafter."""
        gpu_target, device, long, number = cache.gpu_target, cache.gpu_target.device, torch.long, torch.float32
        self.cache, self.gpu_target, self.seats = cache, gpu_target, seats
        self._buffers_id = object()  # part of the keys of its graphs, which would otherwise keep the KV cache
        self._keeps_prompts = keeps_prompts and not gpu_target.taps  # states of known pages are not kept
        self.longest, self.max_pages = longest, pages_for(longest + MAX_VERIFY_ROWS)
        self.params: list[SamplingParams] = []  # of the sequences, for the next pass
        self._texts: list[Text] = []
        self._trees: list[DraftTree] = []  # of the last pass
        self.tree_rows = 1  # of the largest tree so far, or of the trees for which there should be room
        self._tile_rows, rows = tile_rows(cache.forward.group), MAX_ROUND_ROWS
        self._tables = QueuedBuffer(device, tables=(torch.int32, (seats, self.max_pages)))
        self._tables_changed = True
        self._settings = QueuedBuffer(
            device,
            lengths=(long, (seats,)),  # committed tokens
            seed=(long, (seats,)),
            temperature=(number, (seats,)),
            top_k=(long, (seats,)),
            top_p=(number, (seats,)),
            min_p=(number, (seats,)),
        )
        self._rows = QueuedBuffer(
            device,
            tokens=(long, (rows,)),
            positions=(long, (rows,)),
            slots=(long, (rows,)),
            reach=(long, (rows,)),
            owners=(torch.int32, (rows,)),
            tiles=(torch.int32, (max_tiles(rows, seats + 1, self._tile_rows) + 1,)),
        )
        self._lineages = {depth: QueuedBuffer(device, slots=(torch.int32, (rows, depth))) for depth in DEPTHS}
        self._moves = QueuedBuffer(device, source=(long, (rows,)), goal=(long, (rows,)))
        self._drawn = PackedBuffer(device, tokens=(long, (rows,)))
        width, dtype = gpu_target.width, gpu_target.dtype
        self._states = torch.zeros(rows, width, dtype=dtype, device=device) if gpu_target.taps else None
        self._chunk = ChunkBuffers(device, seats, self._tile_rows)
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
        first = len(self._texts)
        try:
            return self._join(prompts, first)
        except BaseException:  # pages of the new sequences may hold no keys yet: they are not remembered
            for text in self._texts[first:]:
                self.cache.pool.release(text.pages)
            del self._texts[first:]
            raise

    def _join(self, prompts: list[list[int]], first: int) -> list[Tensor] | None:
        """Add sequences from seat `first` on."""
        queue = PromptQueue()
        for seat, prompt in enumerate(prompts, first):
            known = self.cache.pool.find(prompt[:-1]) if self._keeps_prompts else []
            text = Text(prompt[:-1], list(known))
            self._texts.append(text)
            self._take_pages(seat, len(prompt))
            queue.add(Prompt(seat, prompt, text.pages, len(known) * PAGE_TOKENS))
        self._settings.host["lengths"][:] = ALL_COMMITTED
        self._send_settings()
        states: list[list[Tensor]] = [[] for _ in prompts]
        while queue:
            chunk, _ = queue.take()
            if chunk is None:
                continue
            found = self._prefill(chunk)
            if found is not None:
                for part in chunk.parts:
                    states[part.prompt.seat - first].append(found[part.rows].clone())
        for text in self._texts[first:]:
            self._remember(text)
        if self._states is None:
            return None
        return [torch.cat(pieces) if pieces else self._states[:0] for pieces in states]

    def _prefill(self, chunk: Chunk) -> Tensor | None:
        """Process a chunk of prompts; returns the tapped states of its rows, valid until the next pass."""
        self._chunk.fill(chunk)
        key = ("host prefill", chunk.size, chunk.alone, self._span, self._buffers_id)
        self.gpu_target.graph_cache.run(key, partial(self._run_chunk, chunk.size, chunk.alone))
        return self.gpu_target.chunk_states

    def _run_chunk(self, size: int, alone: bool) -> None:
        there, gpu_target = self._settings.device, self.gpu_target
        given = self._chunk.given(size, alone, there["lengths"], self._device_tables)
        states = self.cache.forward.prefill(given, self.cache.kv, gpu_target.taps, 0)
        if gpu_target.chunk_states is not None and states is not None:
            gpu_target.chunk_states[:size] = states

    def _remember(self, text: Text) -> None:
        if self._keeps_prompts:
            self.cache.pool.remember(text.tokens, text.pages)

    def retain(self, keep: list[int]) -> None:
        """Keep these sequences only."""
        kept = [self._texts[place] for place in keep]
        for text in self._texts:
            if text not in kept:
                self._remember(text)
                self.cache.pool.release(text.pages)
        self._texts = kept
        tables = self._tables.wait_writable()["tables"]
        tables[: len(keep)] = tables[keep]
        self._tables_changed = True

    def _take_pages(self, seat: int, tokens: int) -> None:
        """Give a sequence the pages for this number of tokens; raises a MemoryError if there are none left."""
        text = self._texts[seat]
        text.pages += self.cache.take(max(pages_for(tokens) - len(text.pages), 0))
        table = self._tables.wait_writable()["tables"][seat]
        table[: len(text.pages)] = text.pages
        table[len(text.pages) :] = UNUSED_PAGE
        self._tables_changed = True

    @property
    def _span(self) -> int:
        """Pages of each sequence that the next pass reads."""
        most = max(len(text.pages) for text in self._texts)
        return min(next((span for span in SPANS if span >= most), most), self.max_pages)

    @property
    def _device_tables(self) -> Tensor:
        return self._tables.device["tables"][:, : self._span]

    def _send_settings(self) -> None:
        self._settings.send()
        if self._tables_changed:
            self._tables.send()
            self._tables_changed = False

    # passes

    @torch.inference_mode()
    def score(self, trees: list[DraftTree]) -> list[Scores]:
        """Scores include the target's draws for sequences whose sampling depends on the logits alone."""
        if (most := max(map(len, trees))) > MAX_VERIFY_ROWS:
            raise InputError(f"a verify pass takes {MAX_VERIFY_ROWS} rows at the most on a GPU, not {most}")
        self.tree_rows = max(self.tree_rows, most)
        for seat, (text, tree) in enumerate(zip(self._texts, trees, strict=True)):
            if pages_for(len(text.tokens) + len(tree)) > len(text.pages):
                self._take_pages(seat, len(text.tokens) + len(tree))
        self._trees = trees
        parts = [*parts_of(trees)]
        return [scores for part in parts for scores in self._score(part, trees[part.start : part.stop], len(parts) > 1)]

    def _score(self, seats: range, trees: list[DraftTree], copies: bool) -> list[Scores]:
        """One pass over the trees of these seats. `copies`: another pass follows, and uses the same memory."""
        cache, draws = self.gpu_target.graph_cache, self._write_sampling(seats)
        size, depth = self._write_rows(seats, trees)
        key = ("host verify", size, depth, draws, self._span, self._buffers_id)
        cache.run(key, partial(self._run_rows, size, depth, draws))
        cache.wait()
        count, logits = sum(map(len, trees)), self._logits[buffer_rows(size)]
        drawn = self._drawn.host["tokens"][:count].tolist() if draws else []
        found, row = [], 0
        for seat, tree in zip(seats, trees, strict=True):
            own, params = slice(row, row + len(tree)), self.params[seat]
            alone = draws_alone(params)
            rows = logits[own]
            if copies:
                rows = rows.clone() if not alone or needs_logits(params) else rows[:0]
            states = None if self._states is None else self._states[own].clone() if copies else self._states[own]
            found.append(Scores(rows, states, drawn[own] if alone else None))
            row += len(tree)
        return found

    def _write_sampling(self, seats: range) -> Draws | None:
        """Write how these sequences draw their tokens; None if none of them can draw on the device."""
        host = self._settings.wait_writable()
        able = [(seat, self.params[seat]) for seat in seats if draws_alone(self.params[seat])]
        for seat, params in able:
            host["seed"][seat] = signed(params.noise_seed)
            host["temperature"][seat] = 0.0 if params.greedy else params.temperature
            for name in ("top_k", "top_p", "min_p"):
                host[name][seat] = getattr(params, name)
        if not able:
            return None
        drawn = [params for _, params in able if not params.greedy]
        return Draws(not drawn, any(params.filters for params in drawn))

    def _write_rows(self, seats: range, trees: list[DraftTree]) -> tuple[int, int]:
        """Send the rows of a pass; returns its size, and the levels of its lineages."""
        here, (own, row, first) = self._rows.wait_writable(), layout([*map(len, trees)])
        count, owners, starts = len(row), own + seats.start, self._lengths[seats.start : seats.stop]
        size, length, node = round_rows(count), starts[own], row - first
        tokens, parents, depth = (np.concatenate([getattr(each.arrays, name) for each in trees]) for name in ROWS)
        slots = self._slots(owners, length + node)
        values = tokens, length + depth, slots, length + depth + 1, owners
        for name, given in zip(("tokens", "positions", "slots", "reach", "owners"), values, strict=True):
            here[name][:count] = given
            here[name][count:size] = UNUSED_PAGE * PAGE_TOKENS if name == "slots" else 0
        padding = np.arange(count, size, self._tile_rows)
        tiles = np.concatenate([np.flatnonzero(node % self._tile_rows == 0), padding])
        here["tiles"][:] = size
        here["tiles"][: len(tiles)] = tiles
        chains = bool((parents == node - 1).all())  # each node is the parent of the next one
        levels = NO_TREE if chains else DEPTHS[bisect_left(DEPTHS, int(depth.max()) + 1)]
        self._settings.host["lengths"][seats.start : seats.stop] = ALL_COMMITTED if chains else starts
        self._send_settings()
        self._rows.send()
        if not chains:
            buffer, above = self._lineages[levels], np.maximum(parents, 0) + first
            lineage, ancestor = buffer.wait_writable()["slots"], row
            for _ in range(int(depth.max()) + 1):  # up to the root, which is its own parent here
                lineage[row, depth[ancestor]] = slots[ancestor]
                ancestor = above[ancestor]
            buffer.send()
        return size, levels

    @property
    def _lengths(self) -> Integers:
        """The number of committed tokens of each sequence."""
        return np.array([len(text.tokens) for text in self._texts])

    def _slots(self, owners: Integers, positions: Integers) -> Integers:
        """The slots of these positions of these sequences."""
        pages = self._tables.host["tables"][owners, positions // PAGE_TOKENS].astype(np.int64)
        found: Integers = pages * PAGE_TOKENS + positions % PAGE_TOKENS
        return found

    def _run_rows(self, size: int, depth: int, draws: Draws | None) -> None:
        gpu_target, there = self.gpu_target, {name: array[:size] for name, array in self._rows.device.items()}
        tiles = self._rows.device["tiles"][: max_tiles(size, self.seats + 1, self._tile_rows) + 1]
        pages = Pages(there["owners"], self._settings.device["lengths"], self._device_tables, tiles)
        paths = Paths(there["reach"], self._lineages[depth].device["slots"][:size] if depth else None, pages)
        given = Pass.in_pages(there["tokens"], there["positions"], there["slots"], paths)
        logits, states = self.cache.forward(given, self.cache.kv, gpu_target.taps, 0)
        logits = logits[:size]
        buffer = buffer_rows(size)
        if buffer not in self._logits:  # in an eager run: the first run of a graph's work is not captured
            self._logits[buffer] = logits.new_empty(buffer, logits.shape[1])
        self._logits[buffer][:size].copy_(logits)  # graphs share this memory: there are many, and logits are large
        if self._states is not None and states is not None:  # other graphs may reuse the memory
            self._states[:size].copy_(states[:size])
        if draws is not None:
            self._drawn.device["tokens"][:size].copy_(self._draw(logits, there, draws))
            self._drawn.publish()

    def _draw(self, logits: Tensor, rows: dict[str, Any], draws: Draws) -> Tensor:
        """The target's token after each row, which means nothing for sequences that cannot draw on the device."""
        settings, owners, cutoff = self._settings.device, rows["owners"], None
        if draws.filtered:
            names = ("temperature", "top_k", "top_p", "min_p")
            cutoff = cutoffs(logits, **{name: settings[name] for name in names}, owners=owners)
        given = logits, rows["positions"], settings["seed"], settings["temperature"], draws.greedy, 1
        return draw(*given, owners=owners, cutoff=cutoff)

    @torch.inference_mode()
    def commit(self, paths: list[Tensor]) -> None:
        """Keep the rows of these nodes of the trees last scored."""
        owners, row, first = layout([*map(len, paths)])
        nodes, places, starts = np.concatenate([path.numpy() for path in paths]), row - first, self._lengths[owners]
        moved = np.flatnonzero(nodes != places)
        source, goal = (self._slots(owners[moved], (starts + each)[moved]) for each in (nodes, places))
        for start in range(0, len(source), MAX_ROUND_ROWS):
            self._move(source[start : start + MAX_ROUND_ROWS], goal[start : start + MAX_ROUND_ROWS])
        for text, tree, path in zip(self._texts, self._trees, paths, strict=True):  # now their keys are in place
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

    def states(self, hidden: Tensor, path: Tensor) -> Tensor:
        """The hidden states [N, taps * H] of a committed path."""
        return hidden.index_select(0, place(path.tolist(), hidden.device))


def buffer_rows(size: int) -> int:
    """Rows of the buffer for the logits of a pass of this size."""
    return LOGIT_ROWS[bisect_left(LOGIT_ROWS, size)]


def draws_alone(params: SamplingParams) -> bool:
    """Whether the draws of a sequence depend on the logits of the row alone."""
    return not (params.reads_prefix or params.logit_bias)


def needs_logits(params: SamplingParams) -> bool:
    """Whether the host reads logits although the pass drew the tokens."""
    return params.logprobs is not None or params.constraint is not None


def layout(counts: list[int]) -> tuple[Integers, Integers, Integers]:
    """Rows of several groups, one group after the other: the group of each row, its number among all rows, and the
    number of the first row of its group."""
    ends: Integers = np.cumsum(np.array(counts, np.int64))
    group: Integers = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return group, np.arange(len(group), dtype=np.int64), (ends - counts)[group]


def parts_of(trees: list[DraftTree]) -> Iterator[range]:
    """Successive trees whose rows fit into one pass."""
    start = rows = 0
    for number, tree in enumerate(trees):
        if rows + len(tree) > MAX_ROUND_ROWS:
            yield range(start, number)
            start, rows = number, 0
        rows += len(tree)
    yield range(start, len(trees))
