"""A drafter for the host loop that drafts for several sequences on a KV cache in pages.

Each pass serves all sequences, and is a CUDA graph. The host chooses the nodes of a pass and reads their children. The
columns of a sequence lie in the pages that the target's keys have, too; those of drafted nodes come after the committed
ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from windfall.core.sampling import Dice
from windfall.core.tree import DraftTree, Integers
from windfall.core.types import Grow
from windfall.drafters.base import Drafter, add_child_arrays
from windfall.engine.gpu.batch.draft_passes import DraftPasses
from windfall.engine.gpu.batch.paged_target import PagedTarget
from windfall.engine.gpu.batch.round import MAX_ROUND_ROWS
from windfall.engine.gpu.batch.row_buffers import HostRows, RowBuffers, Shape, layout
from windfall.engine.gpu.batch.sampler import SeatSampler
from windfall.engine.gpu.batch.seat_sampling import SeatSampling
from windfall.engine.gpu.batch.target import Kind
from windfall.engine.gpu.children import CHILDREN_SIZES, ChildrenBuffers, publish_children
from windfall.engine.gpu.drafters import Drafted, with_entropy
from windfall.engine.gpu.transfer import PackedBuffer

LEVELS = (16, 128)  # of trees in captured passes; deeper nodes are not expanded
EXPANDED = 64  # nodes that a cycle expands for each sequence, on average
LEAST_EXPANDED = 1024  # for all sequences together
MAX_PENDING = 16  # columns of a sequence in a pass that drafts; more are added before it
PICKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, MAX_ROUND_ROWS)  # rows of a captured pass whose children are drafted


@dataclass(eq=False)
class Columns:
    """The columns of a sequence, and the nodes of its tree that are expanded."""

    taken: int  # position of the first pending token: the columns before it are in the KV cache
    pending: list[int]  # tokens without a column
    features: list[Tensor]  # the target's states before the pending tokens, in pieces
    dice: Dice | None
    expanded: dict[int, int] = field(default_factory=dict)  # node of the current tree → its number in the cycle

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return self.taken + len(self.pending)


class Picks(NamedTuple):
    """Rows of a pass whose children are drafted."""

    rows: Integers
    numbers: Integers  # of these nodes in the cycle


class PagedDrafter(Drafter):
    """A drafter for sequences in pages. Its tables and seats are those of the target."""

    def __init__(self, passes: DraftPasses, target: PagedTarget):
        device, long, gpu_target = target.gpu_target.device, torch.long, target.gpu_target
        self.passes, self.target, self.texts = passes, target, target.texts
        self._graphs, self._buffers_id = gpu_target.graph_cache, object()  # the id is a part of the keys of its graphs
        self._sampling = SeatSampling(device, target.seats)
        self._rows = RowBuffers(device, target.seats, passes.tile_rows, LEVELS, passes.first)
        names = dict.fromkeys(("rows", "numbers", "above"), (long, (MAX_ROUND_ROWS,)))
        self._picks = PackedBuffer(device, **names)
        self._children = ChildrenBuffers(device)
        self._columns: list[Columns] = []
        self._numbered = 0  # nodes that are expanded in this cycle: the next number
        self._most = most_expanded(target.seats)
        self._lineages = np.zeros((self._most + 1, LEVELS[-1]), np.int64)  # by number: slots of drafted ancestors
        self._graphs.independent.add(self._buffers_id)

    def close(self) -> None:
        """Drop the graphs."""
        self._graphs.forget(self._buffers_id)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.target.gpu_target.taps

    # sequences

    def start(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Many[Dice | None]) -> None:
        self._columns = []
        self.join(prompts, hidden, dice)

    def join(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Many[Dice | None]) -> None:
        first = self.passes.first
        for place, (prompt, own) in enumerate(zip(prompts, dice, strict=True)):
            features = [hidden[place]] if hidden and first else []
            self._columns.append(Columns(first, prompt[first:], features, own))

    def retain(self, keep: list[int]) -> None:
        self._columns = [self._columns[place] for place in keep]

    # cycles

    @torch.inference_mode()
    def begin(self, tokens: list[int]) -> list[DraftTree]:
        self._numbered = 0
        self._take_in(list(range(len(self._columns))))  # of sequences that do not draft, states would pile up
        for seat, columns in enumerate(self._columns):
            columns.expanded = {}
            if columns.dice is None:
                self._sampling.write_greedy(seat)
            else:
                self._sampling.write(seat, columns.dice.params, columns.dice.kappa)
        self._sampling.send()
        drawn = [columns.dice.params for columns in self._columns if columns.dice]
        self._kind = Kind(not drawn, bool(drawn), any(params.filters for params in drawn))
        return super().begin(tokens)

    @torch.inference_mode()
    def expand(self, trees: list[DraftTree], grows: Many[Grow | None]) -> list[DraftTree]:
        asked, numbered = dict[int, Grow](), self._numbered
        for seat, (tree, grow) in enumerate(zip(trees, grows, strict=True)):
            if grow is not None and self._fits(seat, tree, grow, numbered):
                asked[seat] = grow
                numbered += len(grow.nodes)
        if not asked:
            return trees
        grown, entropy = list(trees), any(grow.entropy for grow in asked.values())
        k = min(max(grow.k for grow in asked.values()), self.passes.choices, CHILDREN_SIZES[-1])
        k = CHILDREN_SIZES[bisect_left(CHILDREN_SIZES, k)]
        first = [seat for seat in asked if not self._columns[seat].expanded]
        self._take_in(first)
        counts = {seat: len(self._columns[seat].pending) for seat in first}
        for seats in passes_over(counts):
            self._add_children(grown, asked, seats, self._first_pass(seats, k, entropy))
        counts = {seat: len(grow.nodes) for seat, grow in asked.items() if seat not in counts}
        for seats in passes_over(counts):
            self._add_children(grown, asked, seats, self._next_pass(grown, asked, seats, k, entropy))
        return grown

    def _fits(self, seat: int, tree: DraftTree, grow: Grow, numbered: int) -> bool:
        """Whether there are pages, positions and numbers for these nodes, after `numbered` others in this cycle.

        A sequence gets pages for as many nodes as the largest tree has rows: there is room for those.
        """
        columns, count = self._columns[seat], len(grow.nodes)
        if not columns.pending or count > MAX_ROUND_ROWS or numbered + count > self._most:
            return False
        deepest, most = int(tree.arrays.depth[grow.nodes.numpy()].max()), self.passes.max_positions
        if deepest > LEVELS[-1] or (most is not None and columns.length + deepest > most):
            return False
        rows = len(columns.expanded) + count
        if rows > self.target.tree_rows:
            return False
        if not self.texts.has_pages(seat, columns.length + rows):
            try:
                self.texts.take_pages(seat, columns.length + rows)
            except MemoryError:
                return False
        return True

    def _take_in(self, seats: list[int]) -> None:
        """Add pending columns of these sequences, without children, until one pass has room for the rest of each."""
        limit = max(min(MAX_PENDING, MAX_ROUND_ROWS // max(len(seats), 1)), 1)
        while many := [seat for seat in seats if len(self._columns[seat].pending) > limit]:
            counts, room = dict[int, int](), MAX_ROUND_ROWS
            for seat in many:
                if take := min(len(self._columns[seat].pending) - 1, room):
                    counts[seat], room = take, room - take
            shape = self._write_columns(counts)
            key = ("host take in", shape, self.texts.span, self._buffers_id)
            self._graphs.run(key, partial(self._run_columns, shape))
            for seat, count in counts.items():
                columns = self._columns[seat]
                columns.taken, columns.pending = columns.taken + count, columns.pending[count:]
                columns.features = [torch.cat(columns.features)[count:]] if columns.features else []

    def _write_columns(self, counts: dict[int, int]) -> Shape:
        """Send the first pending columns of these sequences."""
        own, row, first = layout([*counts.values()])
        seats, known = np.array([*counts]), [self._columns[seat] for seat in counts]
        owners, numbers = seats[own], row - first
        places = np.array([columns.taken for columns in known])[own] + numbers
        tokens = [columns.pending[:count] for columns, count in zip(known, counts.values(), strict=True)]
        self.texts.send()
        if self.passes.features is not None:
            pieces = [piece for columns in known for piece in columns.features]
            # one copy for all sequences, unless some of their states are left for a later pass
            if any(len(columns.pending) > count for columns, count in zip(known, counts.values(), strict=True)):
                pieces = [torch.cat(each.features)[:n] for each, n in zip(known, counts.values(), strict=True)]
            self.passes.features[: len(row)].copy_(torch.cat(pieces))
        rows = HostRows(owners, numbers, np.concatenate(tokens), places, self.texts.slots(owners, places))
        return self._rows.send(rows)

    def _run_columns(self, shape: Shape) -> None:
        self.passes.take_in(self._rows.given(shape, self.texts.tables))

    def _first_pass(self, seats: list[int], k: int, entropy: bool) -> PackedBuffer:
        """Add all pending columns of these sequences, and draft the children of their roots."""
        counts = {seat: len(self._columns[seat].pending) for seat in seats}
        shape = self._write_columns(counts)
        numbers = self._new_numbers(len(seats))
        for seat, number in zip(seats, numbers.tolist(), strict=True):
            self._columns[seat].expanded[0] = number
        ends = np.cumsum([*counts.values()]) - 1
        return self._run(shape, Picks(ends, numbers), None, k, entropy)

    def _next_pass(
        self, trees: list[DraftTree], grows: dict[int, Grow], seats: list[int], k: int, entropy: bool
    ) -> PackedBuffer:
        """Draft the children of drafted nodes."""
        nodes = [grows[seat].nodes.numpy() for seat in seats]
        own, row, first = layout([*map(len, nodes)])
        owners, numbers = np.array(seats)[own], row - first
        arrays = [trees[seat].arrays for seat in seats]
        tokens, parents, depth = (
            np.concatenate([getattr(each, name)[which] for each, which in zip(arrays, nodes, strict=True)])
            for name in ("tokens", "parents", "depth")
        )
        known = [self._columns[seat].expanded for seat in seats]  # the numbers of earlier nodes
        above = np.array([known[place][parent] for place, parent in zip(own.tolist(), parents.tolist(), strict=True)])
        lengths = np.array([columns.length for columns in self._columns])
        staged = np.array([len(each) - 1 for each in known])[own] + numbers  # the root has no row of its own
        slots, new = self.texts.slots(owners, lengths[owners] + staged), self._new_numbers(len(row))
        lineages = self._lineages[above, : depth.max()]
        lineages[row, depth - 1] = slots
        self._lineages[new, : depth.max()] = lineages
        fresh = iter(new.tolist())
        for expanded, which in zip(known, nodes, strict=True):
            expanded.update((node, next(fresh)) for node in which.tolist())
        self.texts.send()
        rows = HostRows(owners, numbers, tokens, lengths[owners] - 1 + depth, slots)
        shape = self._rows.send(rows, lineages, lengths)
        return self._run(shape, Picks(row, new), above, k, entropy)

    def _new_numbers(self, count: int) -> Integers:
        """Numbers for nodes that are expanded now."""
        self._numbered += count
        numbers: Integers = np.arange(self._numbered - count, self._numbered, dtype=np.int64)
        return numbers

    def _run(self, shape: Shape, picks: Picks, above: Integers | None, k: int, entropy: bool) -> PackedBuffer:
        """Run a pass; `above` are the numbers of the nodes' parents, None if the rows are pending columns."""
        here, count = self._picks.wait_writable(), len(picks.rows)
        size = PICKS[bisect_left(PICKS, count)] if above is None else shape.size
        for name, values, padding in (
            ("rows", picks.rows, 0),
            ("numbers", picks.numbers, self._most),
            ("above", 0 if above is None else above, self._most),
        ):
            here[name][:count], here[name][count:size] = values, padding
        self._picks.send()
        found = self._children.buffer(size, k)
        key = ("host draft", above is None, shape, size, k, entropy, self._kind, self.texts.span, self._buffers_id)
        self._graphs.run(key, partial(self._run_pass, shape, size, above is None, k, entropy, found))
        self._graphs.wait()
        return found

    def _run_pass(self, shape: Shape, size: int, first: bool, k: int, entropy: bool, found: PackedBuffer) -> None:
        rows, there = self._rows.given(shape, self.texts.tables), self._picks.device
        picked, here, above = (there[name][:size] for name in ("rows", "numbers", "above"))
        logits: Drafted
        if first:
            logits = self.passes.first_pass(rows, picked, here)
            positions, owners = (each.index_select(0, picked) for each in (rows.positions, self._owners(shape)))
        else:
            logits, positions, owners = self.passes.next_pass(rows, above, here), rows.positions, self._owners(shape)
        if entropy:
            logits, uncertainty = with_entropy(logits)
            found.device["entropy"].copy_(uncertainty)
        k = min(k, self.passes.choices)
        sampler = SeatSampler(self._sampling, self._kind)
        values, tokens = sampler.children(logits, k, owners, positions, self.passes.vocabulary, self.passes.first + 1)
        publish_children(found, values, tokens)

    def _owners(self, shape: Shape) -> Tensor:
        return self._rows.device["owners"][: shape.size]

    def _add_children(
        self, trees: list[DraftTree], grows: dict[int, Grow], seats: list[int], found: PackedBuffer
    ) -> None:
        """Add what a pass has drafted to the trees of these sequences."""
        host, end = found.host, 0
        for seat in seats:
            grow, start = grows[seat], end
            end = start + len(grow.nodes)
            if grow.entropy:
                trees[seat] = trees[seat].measure(grow.nodes, torch.from_numpy(host["entropy"][start:end].copy()))
            drafted = (host[name][start:end, : grow.k] for name in ("tokens", "values"))
            trees[seat] = add_child_arrays(trees[seat], grow.nodes.numpy(), *drafted)

    def commit(
        self, trees: list[DraftTree], paths: list[Tensor], bonus: list[int], hidden: list[Tensor] | None
    ) -> None:
        for place, (columns, tree, path) in enumerate(zip(self._columns, trees, paths, strict=True)):
            if columns.expanded:  # the pending columns are in the KV cache
                columns.taken, columns.pending, columns.features = columns.length, [], []
            columns.pending += [*tree.arrays.tokens[path.numpy()[1:]].tolist(), bonus[place]]
            if hidden and self.passes.first:
                columns.features.append(hidden[place])


def most_expanded(seats: int) -> int:
    """Nodes that a cycle expands at most, for this number of sequences."""
    return max(EXPANDED * seats, LEAST_EXPANDED)


def passes_over(counts: dict[int, int]) -> Iterator[list[int]]:
    """Successive sequences whose rows fit into one pass."""
    part, rows = list[int](), 0
    for seat, count in counts.items():
        if rows + count > MAX_ROUND_ROWS:
            yield part
            part, rows = [], 0
        part.append(seat)
        rows += count
    if part:
        yield part
