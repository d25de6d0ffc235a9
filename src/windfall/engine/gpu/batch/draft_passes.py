"""The models of drafters in passes whose rows the host chooses, on a KV cache in pages."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from windfall.drafters.base import GpuForm, HeadForm, ModelForm
from windfall.engine.gpu.batch.drafters import BatchDrafter, BatchHeadDrafter, BatchModelDrafter, drafter_forward
from windfall.engine.gpu.batch.paged_cache import PagedCache
from windfall.engine.gpu.batch.round import MAX_ROUND_ROWS
from windfall.engine.gpu.drafters import HeadNetwork
from windfall.engine.gpu.forward import PagedForward, Pass
from windfall.engine.gpu.fused import FusedForward
from windfall.heads.layers import head_dim
from windfall.kernels.pages import tile_rows
from windfall.kernels.top import LazyLogits


class DraftPasses:
    """The base class. For `first` see `BatchDrafter`."""

    first: int
    tile_rows: int
    choices: int  # tokens that can be drafted
    max_positions: int | None = None  # nothing is drafted after these; None: no limit
    features: Tensor | None = None  # [rows, taps * H]: the target's states before the pending tokens
    vocabulary: Tensor | None = None  # [M] the token of each column of the logits; None: the target's vocabulary

    def take_in(self, rows: Pass) -> None:
        """Add columns to the KV cache."""
        raise NotImplementedError

    def first_pass(self, rows: Pass, last: Tensor, here: Tensor) -> Tensor | LazyLogits:
        """Add columns, and return the logits after the rows `last`, which are the nodes with the numbers `here`."""
        raise NotImplementedError

    def next_pass(self, rows: Pass, above: Tensor, here: Tensor) -> Tensor | LazyLogits:
        """The logits after nodes with the numbers `here`, whose parents have the numbers `above`."""
        raise NotImplementedError


class HeadPasses(DraftPasses):
    """A draft head."""

    first = 1

    def __init__(self, form: HeadForm, cache: PagedCache, longest: int, numbers: int, rounds: BatchDrafter | None):
        """`rounds` is the drafter of the rounds on the same pages: its weights and memory are used if it is the same
        head."""
        head, layer, device = form.head, form.head.config.layer, cache.gpu_target.device
        self.tile_rows = tile_rows(layer.num_attention_heads // layer.num_key_value_heads)
        self.vocabulary = head.draft_tokens
        self.choices = head.config.vocab_size if self.vocabulary is None else len(self.vocabulary)
        width = cache.gpu_target.width
        self.features = torch.zeros(MAX_ROUND_ROWS, width, dtype=head.dtype, device=device)
        if isinstance(rounds, BatchHeadDrafter) and rounds.form == form:
            self._network = copy.copy(rounds.network)
            self._network.recycled = rounds.network.recycled.new_zeros(numbers, rounds.network.recycled.shape[1])
        else:
            size = (2, layer.num_hidden_layers, layer.num_key_value_heads, cache.staging, head_dim(layer))
            self._network = HeadNetwork(form, torch.zeros(size, dtype=head.dtype, device=device), longest, numbers)

    def _fused(self, rows: Pass) -> Tensor:
        assert self.features is not None
        return self._network.fuse(self.features[: len(rows.tokens)])

    def take_in(self, rows: Pass) -> None:
        self._network(rows, self._fused(rows))

    def first_pass(self, rows: Pass, last: Tensor, here: Tensor) -> Tensor | LazyLogits:
        return self._network.logits(self._network(rows, self._fused(rows), pick=last, here=here))

    def next_pass(self, rows: Pass, above: Tensor, here: Tensor) -> Tensor | LazyLogits:
        return self._network.logits(self._network(rows, self._network.recycled, index=above, here=here))


class ModelPasses(DraftPasses):
    """A smaller language model."""

    first = 0

    def __init__(self, form: ModelForm, forward: PagedForward, cache: PagedCache, rounds: BatchDrafter | None):
        self._form, self._forward, self.choices = form, forward, form.vocab_size
        self.tile_rows, self.max_positions = tile_rows(forward.group), form.decoder.context
        if isinstance(rounds, BatchModelDrafter) and rounds.form == form:
            self._forward, self._kv = rounds.forward, rounds.kv
            return
        if isinstance(forward, FusedForward):
            forward.require_capture(cache.gpu_target.graph_cache)
        layers, shared, width = forward.shape
        size = (2, layers, shared, cache.staging, width)
        self._kv = torch.zeros(size, dtype=form.decoder.dtype, device=cache.gpu_target.device)

    def take_in(self, rows: Pass) -> None:
        self._forward.prefill(rows.up_to(self._form.last_token), self._kv, (), 0)

    def first_pass(self, rows: Pass, last: Tensor, here: Tensor) -> Tensor:
        return self._logits(rows).index_select(0, last)

    def next_pass(self, rows: Pass, above: Tensor, here: Tensor) -> Tensor:
        return self._logits(rows)

    def _logits(self, rows: Pass) -> Tensor:
        known = rows.up_to(self._form.last_token)
        return self._forward(known, self._kv, (), 0)[0][:, : self._form.vocab_size]


def draft_passes(
    form: GpuForm | None, cache: PagedCache, longest: int, numbers: int, rounds: BatchDrafter | None
) -> DraftPasses | None:
    """The passes of a drafter of this form; None if there are none.

    `longest` is that of a text, and `numbers` one more than those of nodes. Raises Unsupported if its model cannot run
    on pages.
    """
    if isinstance(form, HeadForm):
        return HeadPasses(form, cache, longest, numbers, rounds)
    forward = drafter_forward(form)
    return ModelPasses(form, forward, cache, rounds) if isinstance(form, ModelForm) and forward is not None else None
