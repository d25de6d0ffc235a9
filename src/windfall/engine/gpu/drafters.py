"""Drafters on fixed buffers. The first pass of a cycle also adds the newly committed columns to the KV cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from windfall.core.types import SamplingParams
from windfall.drafters.base import BlockForm, Drafter, GpuForm, HeadForm, ModelForm
from windfall.engine.gpu.block import BlockNetwork, block_unsupported
from windfall.engine.gpu.eagle3 import FusedEagle3
from windfall.engine.gpu.forward import Pass, Unsupported
from windfall.engine.gpu.fused import FusedForward
from windfall.engine.gpu.target import (
    PREFILL_CHUNK_TOKENS,
    GpuTarget,
    PrefillChunk,
    SamplingBuffers,
    fastest_forward,
    sampling_key,
)
from windfall.engine.gpu.transfer import place
from windfall.heads.base import DraftHead
from windfall.heads.layers import head_dim
from windfall.kernels.levels import Carries, Levels
from windfall.kernels.pair_children import PairCandidates
from windfall.kernels.rows import append_block, append_rows
from windfall.kernels.scatter import Scatter
from windfall.kernels.top import LazyLogits, top_children

Drafted = Tensor | LazyLogits | PairCandidates  # what a draft pass gives: logits, or candidates


class ChildSampler:
    """Chooses the children of nodes from a drafter's logits, for one kind of sampling, coupled or not."""

    def __init__(self, params: SamplingParams, coupled: bool, sampling: SamplingBuffers, noise: Tensor | None = None):
        self.params, self.sampling, self.noise = params, sampling, noise
        self.coupled = coupled and not params.greedy

    @property
    def key(self) -> tuple[object, ...]:
        """What a captured draft pass depends on."""
        return ("coupled", *sampling_key(self.params)) if self.coupled else ("alone",)

    def children(
        self,
        logits: Drafted,
        positions: Tensor,
        offset: int,
        k: int,
        tokens: Tensor | None,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and tokens [w, k]; the target draws after these rows at `positions` [w] + `offset`.

        Those of logits are written to `out`, if it is given.
        """
        if isinstance(logits, PairCandidates):  # which were chosen for this sampling
            return logits.children(k)
        coupling: dict[str, Any] = {}
        if self.coupled:
            coupling = {
                "positions": positions,
                "offset": offset,
                "seed": self.sampling.seed,
                "temperature": self.sampling.temperature,
                "kappa": self.sampling.kappa,
                "noise": self.noise,
            }
            if self.params.filters:
                logits = as_logits(logits)
                coupling["cutoff"] = self.sampling.cutoffs(logits)
        columns = len(logits.weight) if isinstance(logits, LazyLogits) else logits.shape[-1]
        return top_children(logits, min(k, columns), tokens=tokens, out=out, **coupling)


def as_logits(logits: Tensor | LazyLogits) -> Tensor:
    """The logits, computed if they are given as a product."""
    return logits.logits if isinstance(logits, LazyLogits) else logits


def with_entropy(logits: Drafted) -> tuple[Drafted, Tensor]:
    """The same, as logits if they were a product, and the entropy of the drafter's distribution after each row."""
    if isinstance(logits, PairCandidates):
        return logits, logits.entropy()
    logits = as_logits(logits)
    return logits, entropy(logits)


def entropy(logits: Tensor) -> Tensor:
    """Entropy of the drafter's distribution after each row, [w] nats."""
    found: Tensor = torch.special.entr(logits.float().softmax(-1)).sum(-1)
    return found


class GpuDrafter:
    """Base class. Committed columns are pending until the next first pass adds them to the KV cache."""

    draw_offset: int  # position of the draw after a node, relative to the node's column
    max_positions: int | None = None  # nothing is drafted after these; None: no limit
    features: Tensor | None = None  # [pending, taps * H] the target's states for each pending column, if needed
    levels = 0  # levels that the first pass predicts at once

    def __init__(self, gpu_target: GpuTarget, pending: int):
        device, long = gpu_target.device, torch.long
        self.gpu_target, self.pending = gpu_target, pending
        self.buffers_id = object()  # a unique id of its buffers, part of the keys of its graphs
        self.tokens = torch.zeros(pending, dtype=long, device=device)  # of the pending columns
        self.pending_count = torch.zeros(1, dtype=long, device=device)
        self.length = torch.zeros(1, dtype=long, device=device)  # columns in the KV cache
        self.chunk = PrefillChunk(device)
        self.chunk_states: Tensor | None = None  # features of the chunk's columns, if the drafter has features
        self._causal = torch.ones(pending, pending, dtype=torch.bool, device=device).tril()

    @property
    def vocabulary(self) -> Tensor | None:
        """[M] the token of each column of the logits; None: the target's vocabulary."""
        return None

    @property
    def columns(self) -> int:
        """The bound on KV columns that its passes read; captured passes depend on it."""
        return self.gpu_target.capacity

    def start(self) -> None:
        """Drop the text of the last request."""
        self.length.zero_()

    def prefill(self, tokens: Tensor, following: Tensor, states: Tensor | None, last: bool) -> None:
        """Add a chunk of the prompt: n tokens, the token after each, and the target's states of the n tokens.

        The last column of the last chunk stays pending.
        """
        raise NotImplementedError

    def prefill_chunk(self, text: Tensor, at: int, states: Tensor | None) -> int:
        """Call `prefill` for the chunk that starts at `at`; returns the start of the next chunk."""
        until = min(at + PREFILL_CHUNK_TOKENS, len(text) - 1)
        self.prefill(text[at:until], text[at + 1 : until + 1], states, until == len(text) - 1)
        return until

    def _add_columns(self, tokens: Tensor, features: Tensor | None) -> None:
        """Add columns to the KV cache, without logits."""
        if not len(tokens):
            return
        size = self.chunk.fill(tokens)
        if features is not None and self.chunk_states is not None:
            self.chunk_states[: len(tokens)] = features
        key = ("take in", self.buffers_id, size, self._chunk_columns(size))
        self.gpu_target.graph_cache.run(key, partial(self._add_chunk, size))

    def _add_chunk(self, size: int) -> None:
        self._run_columns(
            self.chunk.rows(size, self.length), None if self.chunk_states is None else self.chunk_states[:size]
        )
        self.length.add_(self.chunk.count)

    def _chunk_columns(self, size: int) -> int:
        """The bound on KV columns that a chunk of this size reads."""
        return self.columns

    def _run_columns(self, rows: Pass, features: Tensor | None) -> None:
        raise NotImplementedError

    def first_pass(self, rows: int, sampler: ChildSampler) -> Drafted:
        """Add the pending columns, at most `rows`, to the KV cache; returns the logits [1, V] after the last one.

        The position of the draw after it is the new `length` + `draw_offset` - 1. A drafter that chooses candidates
        does so for `sampler`.
        """
        slots, last, before = append_rows(self.length, self.pending_count, rows)
        return self._first_logits(Pass(self.tokens[:rows], slots, slots, self._causal[:rows, :rows], before), last)

    def next_pass(self, rows: Pass, above: Tensor, here: Tensor, sampler: ChildSampler) -> Drafted:
        """Run nodes with the slots `here`, whose parents have the slots `above`; returns logits [w, V]."""
        raise NotImplementedError

    def _first_logits(self, rows: Pass, last: Tensor) -> Drafted:
        raise NotImplementedError


class StatesDrafter(GpuDrafter):
    """The base of drafters that read the target's hidden states. Column t has the state of token t, and token t + 1."""

    draw_offset = 2

    def __init__(self, head: DraftHead, gpu_target: GpuTarget, pending: int):
        super().__init__(gpu_target, pending)
        layer, device, dtype = head.config.layer, gpu_target.device, head.dtype
        heads, width = layer.num_key_value_heads, head_dim(layer)
        self.draft_tokens = head.draft_tokens
        self.kv = gpu_target.cache((layer.num_hidden_layers, heads, width), dtype)
        self.features = torch.zeros(pending, gpu_target.width, dtype=dtype, device=device)
        self.chunk_states = torch.zeros(PREFILL_CHUNK_TOKENS, gpu_target.width, dtype=dtype, device=device)

    @property
    def vocabulary(self) -> Tensor | None:
        return self.draft_tokens

    def prefill(self, tokens: Tensor, following: Tensor, states: Tensor | None, last: bool) -> None:
        assert states is not None and self.features is not None
        count = len(following) - last
        self._add_columns(following[:count], states[:count])
        if last:
            self.tokens[:1] = following[-1:]
            self.features[:1] = states[-1]
            self.pending_count.fill_(1)


class GpuHeadDrafter(StatesDrafter):
    """A draft head whose passes extend the tree level by level."""

    def __init__(self, form: HeadForm, gpu_target: GpuTarget, pending: int, staged: int):
        super().__init__(form.head, gpu_target, pending)
        self.network = HeadNetwork(form, self.kv, gpu_target.capacity, staged + 1)
        self._first = torch.zeros(1, dtype=torch.long, device=gpu_target.device)

    def _run_columns(self, rows: Pass, features: Tensor | None) -> None:
        assert features is not None
        self.network(rows, self.network.fuse(features))

    def _first_logits(self, rows: Pass, last: Tensor) -> Tensor | LazyLogits:
        assert self.features is not None
        hidden = self.network.fuse(self.features[: len(rows.tokens)])
        return self.network.logits(self.network(rows, hidden, pick=last, here=self._first))

    def next_pass(self, rows: Pass, above: Tensor, here: Tensor, sampler: ChildSampler) -> Tensor | LazyLogits:
        return self.network.logits(self.network(rows, self.network.recycled, index=above, here=here))


class GpuBlockDrafter(StatesDrafter):
    """A block head: its first pass predicts all levels, and later ones only score pairs of tokens."""

    def __init__(self, form: BlockForm, gpu_target: GpuTarget, pending: int, staged: int, entropies: bool):
        """`entropies`: whether those of its distributions are asked for."""
        head = form.head
        super().__init__(head, gpu_target, pending)
        config, device = head.config, gpu_target.device
        self.head, self.levels = head, config.depth
        self.network = BlockNetwork(head, self.kv, gpu_target.capacity)
        seen = torch.ones(config.block, config.block, dtype=torch.bool, device=device)
        self._seen = seen if config.flag("bidirectional") else seen.tril()
        self._alone, self._coupled = self.network.level_buffers(1, *form[1:])
        self._carries = self.network.carry_buffer(staged + 2)  # by staged row; the last is that of the anchor
        self._root = torch.zeros(1, dtype=torch.long, device=device)
        self._entropy_levels = self._alone._replace(rest=torch.zeros(self.levels, device=device)) if entropies else None

    def _run_columns(self, rows: Pass, features: Tensor | None) -> None:
        assert features is not None
        self.network.remember(features, rows.positions, rows.slots)

    def first_pass(self, rows: int, sampler: ChildSampler) -> Drafted:
        assert self.features is not None
        size = self.head.config.block
        slots, root, places = append_block(self.length, self.pending_count, self.tokens, rows, size)
        self.network.remember(self.features[:rows], slots, slots)
        whole = self.network(Pass(root, places, places, self._seen, self.length))
        normed = whole[self.head.config.first_row :]
        logits = self.network.logits(normed)
        if self._entropy_levels is not None:
            logits = as_logits(logits)
            top_children(logits, self._alone.candidates, tokens=self.vocabulary, out=self._alone[:2])
            self._entropy_levels.fill_rest(logits)
        if sampler.coupled or self._entropy_levels is None:
            levels, before = self._levels(sampler), self.draw_offset - 1
            given = (places[: self.levels], before, levels.candidates, self.vocabulary)
            sampler.children(logits, *given, out=levels[:2])
        self.network.store_pair_states(normed, self._alone)
        above = None
        if self._carries is not None and self.head.config.first_row:
            self._carries[-1:] = self.network.first_carry(root, whole[:1])
            above = self._root + len(self._carries) - 1
        return self._candidates(None, root, above, self._root, sampler)

    def next_pass(self, rows: Pass, above: Tensor, here: Tensor, sampler: ChildSampler) -> Drafted:
        return self._candidates(rows.positions, rows.tokens, above, here, sampler)

    def _levels(self, sampler: ChildSampler) -> Levels:
        """The buffers for this sampling, which all passes of a cycle use, as these may be captured apart."""
        return self._coupled if sampler.coupled else self._alone

    def _candidates(
        self, columns: Tensor | None, tokens: Tensor, above: Tensor | None, here: Tensor, sampler: ChildSampler
    ) -> PairCandidates:
        """The children of nodes in these columns; None: of the root. `above` and `here` are their parents' slots and
        their own."""
        sampling = sampler.sampling
        return PairCandidates(
            self._levels(sampler),
            tokens,
            columns,
            self.length,
            -1,
            self.network.tables,
            (sampling.temperature, sampling.kappa) if sampler.coupled else None,
            carries=None if self._carries is None else Carries(self._carries, above, here),
            entropy_levels=self._entropy_levels,
        )


class HeadNetwork:
    """A draft head over rows in fixed buffers, with fused kernels where it has them."""

    def __init__(self, form: HeadForm, kv: Tensor, positions: int, slots: int):
        """`kv` is its KV cache, `positions` the longest text, `slots` the number of its own features that are kept."""
        head = form.head
        self.head, self.kv = head, kv
        # the head's own features, by slot: the input of the next level
        self.recycled = torch.zeros(slots, head.config.layer.hidden_size, dtype=head.dtype, device=kv.device)
        try:
            self.fused: FusedEagle3 | None = FusedEagle3(head, positions, form.eight_bits)
        except Unsupported:
            self.fused = None

    def fuse(self, features: Tensor) -> Tensor:
        """The target's states [n, taps * H] as input features [n, H]."""
        return self.head.fuse(features) if self.fused is None else self.fused.fuse(features)

    def __call__(
        self,
        rows: Pass,
        hidden: Tensor,
        index: Tensor | None = None,
        pick: Tensor | None = None,
        here: Tensor | None = None,
    ) -> Tensor:
        """Run the head over these rows; returns the states [n, H] of all rows or of those in `pick`.

        The input features are `hidden`, or its rows `index`. The output features are stored in `recycled` at `here`.
        """
        if self.fused is not None:
            keep = None if here is None else Scatter(self.recycled, here, self.fused.recycles_normed)
            return self.fused(rows, hidden, index, self.kv, pick, keep)
        hidden = hidden if index is None else hidden.index_select(0, index)
        memory = HeadBuffer(self.kv, rows, self.head.config.windows)
        guess = self.head(rows.tokens[None], hidden[None], rows.positions[None], memory)
        state: Tensor = guess.state[0]
        recycled: Tensor = guess.recycled[0]
        if pick is not None:
            state, recycled = state.index_select(0, pick), recycled.index_select(0, pick)
        if here is not None:
            self.recycled.index_copy_(0, here, recycled)
        return state

    def logits(self, state: Tensor) -> Tensor | LazyLogits:
        """The logits after these states, or the product that gives them."""
        return self.head.logits(state) if self.fused is None else self.fused.logits(state)


class HeadBuffer:
    """The KV cache of a head in a fixed buffer, for one pass."""

    def __init__(self, kv: Tensor, rows: Pass, windows: tuple[int | None, ...]):
        self.kv, self.rows, self.windows = kv, rows, windows

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        kept, rows = self.kv[:, layer], self.rows
        kept[0].index_copy_(1, rows.slots, keys[0])
        kept[1].index_copy_(1, rows.slots, values[0])
        window = self.windows[layer] if self.windows else None
        out = rows.attend(queries[0].transpose(0, 1), kept, window)  # [n, heads, d]
        return out.transpose(0, 1)[None]


class GpuModelDrafter(GpuDrafter):
    """A smaller language model. Column t holds token t."""

    draw_offset = 1

    def __init__(self, form: ModelForm, gpu_target: GpuTarget, pending: int, staged: int):
        super().__init__(gpu_target, pending)
        self.form, self.staged = form, staged
        self.max_positions = form.decoder.context
        self.forward = fastest_forward(form.decoder.model)
        if isinstance(self.forward, FusedForward):
            self.forward.require_capture(gpu_target.graph_cache)
        self.kv = gpu_target.cache(self.forward.shape, form.decoder.dtype)

    @property
    def columns(self) -> int:
        return self.gpu_target.column_bound(self.pending + self.staged, self.forward)

    def _chunk_columns(self, size: int) -> int:
        return self.gpu_target.column_bound(size, self.forward)

    def prefill(self, tokens: Tensor, following: Tensor, states: Tensor | None, last: bool) -> None:
        self._add_columns(tokens, None)
        if last:
            self.tokens[:1] = following[-1:]
            self.pending_count.fill_(1)

    def _run_columns(self, rows: Pass, features: Tensor | None) -> None:
        known = rows.up_to(self.form.last_token)
        self.forward.prefill(known, self.kv, (), self._chunk_columns(len(rows.tokens)))

    def _first_logits(self, rows: Pass, last: Tensor) -> Tensor:
        return self._logits(rows).index_select(0, last)

    def next_pass(self, rows: Pass, above: Tensor, here: Tensor, sampler: ChildSampler) -> Tensor:
        return self._logits(rows)

    def _logits(self, rows: Pass) -> Tensor:
        known = rows.up_to(self.form.last_token)
        return self.forward(known, self.kv, (), self.columns)[0][:, : self.form.vocab_size]


def drafter_form(drafter: Drafter, device: torch.device) -> GpuForm | str:
    """The drafter's `gpu_form`, or a reason if it cannot run in fixed buffers on this device."""
    form = drafter.gpu_form()
    if isinstance(form, BlockForm) and (reason := block_unsupported(form.head)):
        return f"its drafter works on the host: {reason}"
    if isinstance(form, str | HeadForm | BlockForm):
        return form
    if form.decoder.device != device:
        return f"its drafter is on {form.decoder.device}, the target on {device}"
    try:
        fastest_forward(form.decoder.model)
    except Unsupported as reason:
        return f"its drafter works on the host: {reason}"
    return form


def gpu_drafter(form: GpuForm, gpu_target: GpuTarget, pending: int, staged: int, entropies: bool = True) -> GpuDrafter:
    """A drafter of this form with buffers for `pending` columns and `staged` rows; `entropies`: if they are needed."""
    if isinstance(form, BlockForm):
        return GpuBlockDrafter(form, gpu_target, pending, staged, entropies)
    if isinstance(form, HeadForm):
        return GpuHeadDrafter(form, gpu_target, pending, staged)
    return GpuModelDrafter(form, gpu_target, pending, staged)


def prefill(prompt: list[int], gpu_target: GpuTarget, draft: GpuDrafter | None) -> None:
    """Start a new request: target and drafter process the prompt except for its last token."""
    given = place(prompt, gpu_target.device)
    if draft is not None:
        draft.start()
    at = 0
    for states in gpu_target.prefill(given[:-1]):
        if draft is not None:
            at = draft.prefill_chunk(given, at, states)
