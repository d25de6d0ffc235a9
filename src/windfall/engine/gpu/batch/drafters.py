"""Drafters on a KV cache in pages: one draft pass serves all requests."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from windfall.drafters.base import BlockForm, GpuForm, HeadForm, ModelForm
from windfall.engine.gpu.batch.chunks import Chunk, ChunkBuffers, Part
from windfall.engine.gpu.batch.sampler import SeatSampler
from windfall.engine.gpu.batch.target import BatchTarget
from windfall.engine.gpu.block import BlockNetwork
from windfall.engine.gpu.drafters import Drafted, HeadNetwork
from windfall.engine.gpu.forward import PagedForward, Pass, Paths
from windfall.engine.gpu.fused import FusedForward
from windfall.engine.gpu.target import fastest_forward, in_pages
from windfall.heads.base import DraftHead
from windfall.heads.layers import head_dim
from windfall.kernels.batch import append_to_pages
from windfall.kernels.levels import Carries, Levels
from windfall.kernels.pages import Pages, tile_rows, tiles_of
from windfall.kernels.pair_children import PairCandidates
from windfall.kernels.top import LazyLogits
from windfall.kernels.trees import NextPass, first_rows


class BatchDrafter:
    """Base class. The drafter's pages have the numbers of the target's pages.

    `first` is 1 for heads, whose column of a token has the state of the token before it: the first token of a text has
    no column. A column's key has the number of its token, so that a page depends on the tokens up to its end.
    """

    first: int
    levels = 0  # levels that the first pass predicts at once

    def __init__(self, batch: BatchTarget, heads: int, shared: int, layers: int, width: int, dtype: torch.dtype):
        """`heads` of queries and `shared` of keys."""
        self.batch, self.state, self.device = batch, batch.state, batch.device
        self.tile_rows = tile_rows(heads // shared)
        self._size = (2, layers, shared, width)
        self.dtype = dtype
        self.chunk = ChunkBuffers(self.device, self.state.seats, self.tile_rows)
        self._owners: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def reserve(self, staged: int) -> None:
        """Make room for this number of expanded nodes of each request."""
        self.staged, self.staging = staged, self.batch.staging
        two, layers, shared, width = self._size
        rows = self._kv_rows(staged)
        size = (two, layers, shared, self.staging + self.state.seats * rows, width)
        self.kv = torch.zeros(size, dtype=self.dtype, device=self.device)
        seats = torch.arange(self.state.seats, device=self.device)
        self.base = self.staging + seats * rows  # the slot of each request's first staged row

    def _kv_rows(self, staged: int) -> int:
        """Rows of the KV cache that a request needs beside its pages."""
        return staged

    @property
    def vocabulary(self) -> Tensor | None:
        """[M] the token of each column of the logits; None: the target's vocabulary."""
        return None

    def prefill(self, chunk: Chunk, states: Tensor | None) -> None:
        """Add the columns of a chunk that the target has processed."""
        self.chunk.fill(chunk, self.first)
        self._take(chunk, states)
        self._prefill(chunk.size, chunk.alone)

    def capture_prefill(self, size: int) -> None:
        """Capture the passes over chunks of this size, with rows of one request and of several."""
        self.chunk.fill(Chunk([], 0, size), self.first)
        for alone in (False, True):
            self._prefill(size, alone)

    def _prefill(self, size: int, alone: bool) -> None:
        key = ("batch draft prefill", size, alone, self.state.span, self.state)
        self.batch.gpu_target.graph_cache.run(key, partial(self._run_chunk, size, alone))

    def _take(self, chunk: Chunk, states: Tensor | None) -> None:
        """Keep what later passes need of the target's states of a chunk."""

    def _run_chunk(self, size: int, alone: bool) -> None:
        raise NotImplementedError

    def first_pass(self, seats: int, pending: int, sampler: SeatSampler) -> Drafted:
        """Add the pending columns of each request, at most `pending`; returns the logits [seats, V] after the last.

        A drafter that chooses candidates does so for `sampler`.
        """
        given, last = self._pending(seats, pending)
        return self._first_logits(given, last, seats, pending)

    def take_in(self, seats: int, pending: int) -> None:
        """Add the pending columns of each request, at most `pending`, without logits."""
        self._run_columns(self._pending(seats, pending)[0], seats, pending)
        self.state.pending_count[:seats].zero_()

    def _pending(self, seats: int, pending: int) -> tuple[Pass, Tensor]:
        """The pending columns as rows of a pass, and the last row of each request."""
        state = self.state
        lengths, tables = state.draft_lengths[:seats], state.tables[:seats]
        counts = state.pending_count[:seats] * (torch.arange(seats, device=self.device) < state["live"])
        rows = append_to_pages(lengths, counts, tables, pending)
        owners, tiles = self.rows_of(seats, pending)
        paths = Paths(rows.reach, None, Pages(owners, lengths, tables, tiles), self.first)
        positions = (rows.positions - self.first).clamp(min=0)
        tokens = state.tokens[:seats, :pending].contiguous().flatten()
        return Pass.in_pages(tokens, positions, rows.slots, paths), rows.last

    def next_pass(self, rows: NextPass, seats: int, sampler: SeatSampler) -> Drafted:
        """Run the chosen nodes of each request; returns logits [seats * W, V]."""
        assert rows.lineage is not None
        state, width = self.state, rows.nodes.shape[1]
        owners, tiles = self.rows_of(seats, width)
        pages = Pages(owners, state.draft_lengths[:seats], state.tables[:seats], tiles)
        nodes, positions = rows.nodes[:seats].flatten(), rows.positions[:seats].flatten()
        reach = torch.where(nodes >= 0, positions + 1 + self.first, 0)
        paths = Paths(reach, rows.lineage[:seats].flatten(0, 1), pages, self.first)
        given = Pass.in_pages(rows.tokens[:seats].flatten(), positions, rows.slots[:seats].flatten(), paths)
        return self._next_logits(given, rows, seats)

    def rows_of(self, seats: int, width: int) -> tuple[Tensor, Tensor]:
        """Owners and tiles of `width` rows for each request."""
        if (seats, width) not in self._owners:
            owners = torch.arange(seats, device=self.device).repeat_interleave(width)
            tiles = tiles_of(owners, self.tile_rows, seats * -(-width // self.tile_rows))
            self._owners[seats, width] = owners.int(), tiles
        return self._owners[seats, width]

    def _first_logits(self, rows: Pass, last: Tensor, seats: int, pending: int) -> Tensor | LazyLogits:
        raise NotImplementedError

    def _run_columns(self, rows: Pass, seats: int, pending: int) -> None:
        raise NotImplementedError

    def _next_logits(self, given: Pass, rows: NextPass, seats: int) -> Tensor | LazyLogits:
        raise NotImplementedError


class BatchStatesDrafter(BatchDrafter):
    """The base of drafters that read the target's hidden states."""

    first = 1

    def __init__(self, head: DraftHead, batch: BatchTarget):
        layer = head.config.layer
        heads, shared, width = layer.num_attention_heads, layer.num_key_value_heads, head_dim(layer)
        super().__init__(batch, heads, shared, layer.num_hidden_layers, width, head.dtype)
        state, taps = self.state, batch.gpu_target.width
        self.draft_tokens = head.draft_tokens
        state.features = torch.zeros(state.rows, state.backlog, taps, dtype=head.dtype, device=self.device)

    @property
    def vocabulary(self) -> Tensor | None:
        return self.draft_tokens

    def _take(self, chunk: Chunk, states: Tensor | None) -> None:
        assert states is not None and self.state.features is not None
        for part in chunk.parts:
            if is_last(part):
                self.state.features[part.prompt.seat, 0] = states[part.rows.stop - 1]

    def _features(self, seats: int, pending: int) -> Tensor:
        """The target's states of the pending columns [seats * pending, taps * H]."""
        assert self.state.features is not None
        return self.state.features[:seats, :pending].contiguous().flatten(0, 1)


class BatchHeadDrafter(BatchStatesDrafter):
    """A draft head whose passes extend the trees level by level."""

    def __init__(self, form: HeadForm, batch: BatchTarget):
        super().__init__(form.head, batch)
        self.form, self.head = form, form.head

    def reserve(self, staged: int) -> None:
        super().reserve(staged)
        self.network = HeadNetwork(self.form, self.kv, self.state.longest, self.state.seats * (staged + 1))
        self._roots = torch.arange(self.state.seats, device=self.device) * (staged + 1)

    def _run_chunk(self, size: int, alone: bool) -> None:
        given = self.chunk.given(size, alone, self.state.draft_lengths, self.state.tables, self.first)
        states = self.batch.gpu_target.chunk_states
        assert states is not None
        self.network(given, self.network.fuse(states[:size].to(self.dtype)))

    def _first_logits(self, rows: Pass, last: Tensor, seats: int, pending: int) -> Tensor | LazyLogits:
        features = self.network.fuse(self._features(seats, pending))
        return self.network.logits(self.network(rows, features, pick=last, here=self._roots[:seats]))

    def _run_columns(self, rows: Pass, seats: int, pending: int) -> None:
        self.network(rows, self.network.fuse(self._features(seats, pending)))

    def _next_logits(self, given: Pass, rows: NextPass, seats: int) -> Tensor | LazyLogits:
        offset = self._roots[:seats, None]
        above, here = ((slots[:seats] + offset).flatten() for slots in (rows.parent_slots, rows.own_slots))
        return self.network.logits(self.network(given, self.network.recycled, index=above, here=here))


class BatchBlockDrafter(BatchStatesDrafter):
    """A block head: its first pass predicts all levels, and later ones only score pairs of tokens."""

    def __init__(self, form: BlockForm, batch: BatchTarget):
        head = form.head
        super().__init__(head, batch)
        self.form, self.head, self.levels = form, head, head.config.depth
        self._places = torch.arange(head.config.block, device=self.device)
        self._offset = -1 - self.first  # from a request's number of columns to the column of its root

    def _kv_rows(self, staged: int) -> int:
        return self.head.config.block

    def reserve(self, staged: int) -> None:
        super().reserve(staged)
        self.network = BlockNetwork(self.head, self.kv, self.state.longest)
        self._alone, self._coupled = self.network.level_buffers(self.state.seats, *self.form[1:])
        slots = staged + 2  # of a request: its staged rows and, in the last, its anchor
        self._carries = self.network.carry_buffer(self.state.seats * slots)
        self._roots = torch.arange(self.state.seats, device=self.device) * slots
        self._anchors = self._roots + slots - 1

    def _run_chunk(self, size: int, alone: bool) -> None:
        given = self.chunk.given(size, alone, self.state.draft_lengths, self.state.tables, self.first)
        states = self.batch.gpu_target.chunk_states
        assert states is not None
        self.network.remember(states[:size].to(self.dtype), given.positions, given.slots)

    def _run_columns(self, rows: Pass, seats: int, pending: int) -> None:
        self.network.remember(self._features(seats, pending), rows.positions, rows.slots)

    def first_pass(self, seats: int, pending: int, sampler: SeatSampler) -> Drafted:
        given, last = self._pending(seats, pending)
        self._run_columns(given, seats, pending)
        roots = given.tokens.index_select(0, last)
        whole = self.network(self._block(roots, seats))
        whole = whole.view(seats, -1, whole.shape[1])
        normed = whole[:, self.head.config.first_row :].flatten(0, 1)
        levels, owners = self._levels(seats, sampler), self.rows_of(seats, self.levels)[0]
        columns = (self.state.draft_lengths[:seats, None] + self._places[: self.levels] + self._offset).flatten()
        names, offset = self.vocabulary, self.first + 1
        asked = (levels.candidates, owners, columns, names, offset)
        sampler.children(self.network.logits(normed), *asked, out=levels[:2])
        self.network.store_pair_states(normed, levels)
        above = None
        if self._carries is not None and self.head.config.first_row:
            above = self._anchors[:seats]
            self._carries[above] = self.network.first_carry(roots, whole[:, 0])
        return self._candidates(roots, above, seats, sampler)

    def next_pass(self, rows: NextPass, seats: int, sampler: SeatSampler) -> Drafted:
        return self._candidates(rows.tokens[:seats, 0], None, seats, sampler).after(
            first_rows(rows, seats), self.rows_of(seats, rows.nodes.shape[1])[0]
        )

    def _block(self, roots: Tensor, seats: int) -> Pass:
        """The rows of a block for each request."""
        size, lengths = len(self._places), self.state.draft_lengths[:seats]
        owners, tiles = self.rows_of(seats, size)
        slots = self.base[:seats, None] + self._places
        seen = self._places.new_full((size,), size) if self.head.config.flag("bidirectional") else self._places + 1
        reach, positions = lengths[:, None] + seen, lengths[:, None] - self.first + self._places
        pages = Pages(owners, lengths, self.state.tables[:seats], tiles)
        lineage = slots.int().repeat_interleave(size, 0)
        paths = Paths(reach.flatten(), lineage, pages, self.first)
        return Pass.in_pages(roots, positions.flatten(), slots.flatten(), paths)

    def _levels(self, seats: int, sampler: SeatSampler) -> Levels:
        levels = self._coupled if sampler.kind.coupled else self._alone
        count = seats * self.levels
        hidden = None if levels.hidden is None else levels.hidden[:count]
        return levels._replace(logq=levels.logq[:count], tokens=levels.tokens[:count], hidden=hidden)

    def _candidates(self, tokens: Tensor, above: Tensor | None, seats: int, sampler: SeatSampler) -> PairCandidates:
        """The children of the roots, whose paths carry what the slots `above` hold."""
        levels, lengths = self._levels(seats, sampler), self.state.draft_lengths[:seats]
        carries = None if self._carries is None else Carries(self._carries, above, self._roots[:seats])
        given = (lengths, self._offset, self.network.tables, sampler.warmth)
        return PairCandidates(levels, tokens, None, *given, self.rows_of(seats, 1)[0], carries)


class BatchModelDrafter(BatchDrafter):
    """A smaller language model."""

    first = 0

    def __init__(self, form: ModelForm, forward: PagedForward, batch: BatchTarget):
        self.forward, self.form = forward, form
        if isinstance(self.forward, FusedForward):
            self.forward.require_capture(batch.gpu_target.graph_cache)
        layers, shared, width = self.forward.shape
        super().__init__(batch, self.forward.group * shared, shared, layers, width, form.decoder.dtype)

    def _run_chunk(self, size: int, alone: bool) -> None:
        given = self.chunk.given(size, alone, self.state.draft_lengths, self.state.tables)
        self.forward.prefill(given.up_to(self.form.last_token), self.kv, (), 0)

    def _first_logits(self, rows: Pass, last: Tensor, seats: int, pending: int) -> Tensor:
        return self._logits(rows).index_select(0, last)

    def _run_columns(self, rows: Pass, seats: int, pending: int) -> None:
        self.forward.prefill(rows.up_to(self.form.last_token), self.kv, (), 0)

    def _next_logits(self, given: Pass, rows: NextPass, seats: int) -> Tensor:
        return self._logits(given)

    def _logits(self, rows: Pass) -> Tensor:
        known = rows.up_to(self.form.last_token)
        return self.forward(known, self.kv, (), 0)[0][:, : self.form.vocab_size]


def is_last(part: Part) -> bool:
    """Whether this part ends its prompt."""
    return part.end == len(part.prompt.tokens) - 1


def drafter_forward(form: GpuForm | None) -> PagedForward | None:
    """The forward of a drafter that is a model; None for others. Raises Unsupported if it cannot run on pages."""
    return in_pages(fastest_forward(form.decoder.model)) if isinstance(form, ModelForm) else None


def batch_drafter(form: GpuForm, forward: PagedForward | None, batch: BatchTarget) -> BatchDrafter:
    """A drafter of this form, with its `drafter_forward`."""
    if isinstance(form, BlockForm):
        return BatchBlockDrafter(form, batch)
    if isinstance(form, HeadForm):
        return BatchHeadDrafter(form, batch)
    assert forward is not None
    return BatchModelDrafter(form, forward, batch)
