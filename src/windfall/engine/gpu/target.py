"""The target on fixed buffers: scores the rows of a tree, and commits the accepted path to the KV cache."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from windfall.core.sampling import signed
from windfall.core.tree import DraftTree
from windfall.core.types import GpuOptions, InputError, SamplingParams
from windfall.engine.gpu.forward import Forward, PagedForward, Pass, Paths, Unsupported
from windfall.engine.gpu.fused import FusedForward
from windfall.engine.gpu.graphs import GraphCache
from windfall.engine.gpu.interface import InterfaceForward
from windfall.engine.gpu.modules import MaskedForward
from windfall.engine.gpu.transfer import PackedBuffer
from windfall.kernels.cutoff import cutoffs
from windfall.kernels.draw import draw, update_noise
from windfall.kernels.move import move
from windfall.kernels.rows import place_rows
from windfall.model.decoder import vocabulary_size

VERIFY_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320)  # rows of captured verify passes
MAX_VERIFY_ROWS = VERIFY_SIZES[-1]
PREFILL_SIZES = (16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512)  # rows of captured prefill passes
PREFILL_CHUNK_TOKENS = PREFILL_SIZES[-1]
INITIAL_CAPACITY_ROWS = 2048 - MAX_VERIFY_ROWS  # of the KV cache, in addition to the rows of a pass
CAPACITY_STEP_ROWS = 1024
COLUMN_STEP = 256  # of the bound on KV columns, for forwards that need a bound


class SamplingBuffers(NamedTuple):
    """Sampling settings on the device, so that a captured pass works for all their values."""

    seed: Tensor  # [1] long
    temperature: Tensor  # [1] fp32
    kappa: Tensor  # [1] fp32
    top_k: Tensor  # [1] long
    top_p: Tensor  # [1] fp32
    min_p: Tensor  # [1] fp32

    @classmethod
    def create(cls, device: torch.device) -> SamplingBuffers:
        """Settings without filters."""
        zero, one = torch.zeros(1, device=device), torch.ones(1, device=device)
        return cls(zero.long(), one, one.clone(), zero.long(), one.clone(), zero)

    def cutoffs(self, logits: Tensor) -> Tensor:
        """The lowest logit of each row [n, V] that the filters keep, [n]."""
        return cutoffs(logits, self.temperature, self.top_k, self.top_p, self.min_p)


class PrefillChunk:
    """Consecutive tokens of a prompt, in fixed buffers."""

    def __init__(self, device: torch.device):
        self.tokens = torch.zeros(PREFILL_CHUNK_TOKENS, dtype=torch.long, device=device)
        self.count = torch.zeros(1, dtype=torch.long, device=device)
        self._places = torch.arange(PREFILL_CHUNK_TOKENS, device=device)
        self._causal = torch.ones(PREFILL_CHUNK_TOKENS, PREFILL_CHUNK_TOKENS, dtype=torch.bool, device=device).tril()

    def fill(self, tokens: Tensor) -> int:
        """Write the next tokens; returns the size of the pass that processes them."""
        self.tokens[: len(tokens)] = tokens
        self.count.fill_(len(tokens))
        return PREFILL_SIZES[bisect_left(PREFILL_SIZES, len(tokens))]

    def rows(self, size: int, length: Tensor) -> Pass:
        """The rows of the pass: a chain after `length` committed rows, padded to its size."""
        positions, slots, reach, lineage = place_rows(length, self._places[:size], self.count, None)
        return Pass(self.tokens[:size], positions, slots, self._causal[:size, :size], length, Paths(reach, lineage))


class Scored(NamedTuple):
    """The output of a pass over n rows; the memory belongs to the graph, and other graphs may reuse it."""

    logits: Tensor  # [n, V], then the rows of the padding
    states: Tensor | None  # [n, taps * H]
    positions: Tensor  # [n] long, of the rows


class GpuTarget:
    """Scores the rows of one tree, draws the target's tokens, and commits the accepted path."""

    def __init__(self, model: Any, taps: tuple[int, ...], graph_cache: GraphCache, options: GpuOptions):
        self.forward, self.inexact_reason = choose_forward(model, options)  # the reason is empty if passes are exact
        self.exact = not self.inexact_reason  # whether rounding of a row must not depend on the other rows
        self.taps, self.graph_cache = taps, graph_cache
        if isinstance(self.forward, FusedForward):
            self.forward.require_capture(graph_cache)
        self.weights = list(model.parameters())
        embedding = model.get_input_embeddings().weight
        self.device, self.dtype = embedding.device, embedding.dtype
        width = model.config.get_text_config().hidden_size
        long, device = torch.long, self.device
        self.rows = PackedBuffer(
            device,
            tokens=(long, (MAX_VERIFY_ROWS,)),
            parents=(long, (MAX_VERIFY_ROWS,)),  # as rows of the pass; the root's is 0
            depth=(long, (MAX_VERIFY_ROWS,)),
            count=(long, (1,)),  # rows that are not padding
            mask=(torch.bool, (MAX_VERIFY_ROWS, MAX_VERIFY_ROWS)),
        )
        self.length = torch.zeros(1, dtype=long, device=device)  # committed rows
        self.width = len(taps) * width  # of the tapped states
        self.move_source, self.move_goal = (torch.zeros(MAX_VERIFY_ROWS, dtype=long, device=device) for _ in range(2))
        self.accepted = torch.zeros(1, dtype=long, device=device)
        self.bonus = torch.zeros(1, dtype=long, device=device)
        self.sampling = SamplingBuffers.create(device)
        self._sent: dict[str, float] = {}  # the settings that the device has
        self.chunk = PrefillChunk(device)
        self.chunk_states: Tensor | None = None  # tapped states of the chunk
        if taps:
            self.chunk_states = torch.zeros(PREFILL_CHUNK_TOKENS, self.width, dtype=self.dtype, device=device)
        self._places = torch.arange(MAX_VERIFY_ROWS, device=device)
        self._vocabulary = vocabulary_size(model)
        self._noise: dict[int, Tensor] = {}
        self.length_bound = 0  # an upper bound on `length` that the host knows
        self._caches: dict[tuple[tuple[int, int, int], torch.dtype], Tensor] = {}  # of drafters, by shape and dtype
        self.capacity = 0  # rows of the KV cache
        self.buffers_version = 0  # grows when the KV cache is allocated anew
        self.reserve(INITIAL_CAPACITY_ROWS)

    @torch.inference_mode()
    def reserve(self, rows: int) -> None:
        """Make room for texts of this length; if the buffers grow, all graphs that use them are dropped."""
        if rows + MAX_VERIFY_ROWS > self.capacity:
            self.resize(-(-max(rows + MAX_VERIFY_ROWS, 2 * self.capacity) // CAPACITY_STEP_ROWS) * CAPACITY_STEP_ROWS)

    @torch.inference_mode()
    def resize(self, capacity: int) -> None:
        """Allocate an empty KV cache of this number of rows, and drop all graphs that use the old one."""
        layers, heads, width = self.forward.shape
        self.graph_cache.clear()
        self.kv, self._caches = torch.empty(0, device=self.device), {}  # frees the old ones first
        self.capacity = 0  # if there is not enough memory
        self.buffers_version += 1
        self.kv = torch.zeros(2, layers, heads, capacity, width, dtype=self.dtype, device=self.device)
        self.capacity = capacity

    @torch.inference_mode()
    def cache(self, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        """The KV cache of a drafter with these layers, heads and dimensions, [2, layers, heads, capacity, d].

        All plans share it, as there is one request at a time.
        """
        layers, heads, width = shape
        if (shape, dtype) not in self._caches:
            size = (2, layers, heads, self.capacity, width)
            self._caches[shape, dtype] = torch.zeros(size, dtype=dtype, device=self.device)
        return self._caches[shape, dtype]

    @torch.inference_mode()
    def prefill(self, text: Tensor, chunk_tokens: int = PREFILL_CHUNK_TOKENS) -> Iterator[Tensor | None]:
        """Prefill a new text [n] in chunks; yields the tapped states of each chunk, valid until the next."""
        self.length.zero_()
        self.length_bound = 0
        for chunk in torch.split(text, chunk_tokens):
            size = self.chunk.fill(chunk)
            columns = self.columns(size)
            self.graph_cache.run(("read", size, columns, self.capacity), partial(self._run_chunk, size, columns))
            self.length_bound += len(chunk)
            yield None if self.chunk_states is None else self.chunk_states[: len(chunk)]

    def _run_chunk(self, size: int, columns: int) -> None:
        given = self.chunk.rows(size, self.length)
        states = self.forward.prefill(given, self.kv, self.taps, columns)
        if self.chunk_states is not None and states is not None:
            self.chunk_states[:size] = states
        self.length.add_(self.chunk.count)

    @torch.inference_mode()
    def set_sampling(self, params: SamplingParams, kappa: float = 1.0) -> None:
        """Write the sampling settings of a request to the device, as far as they have changed."""
        given: dict[str, float] = {
            "seed": signed(params.noise_seed),
            "temperature": params.temperature or 1.0,
            "kappa": kappa,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
        }
        for name, value in given.items():
            if self._sent.get(name) != value:
                getattr(self.sampling, name).fill_(value)
        self._sent = given

    def set_kappa(self, kappa: float) -> None:
        """The weight of the noise in drafts, which may change between cycles."""
        if self._sent.get("kappa") != kappa:
            self.sampling.kappa.fill_(kappa)
            self._sent["kappa"] = kappa

    def write_rows(self, tree: DraftTree) -> int:
        """Write a tree's rows into the host's arrays of `rows`; returns the size of the pass."""
        count, known, here = len(tree), tree.arrays, self.rows.host
        if count > MAX_VERIFY_ROWS:
            raise InputError(f"a verify pass takes {MAX_VERIFY_ROWS} rows at the most on a GPU, not {count}")
        size = VERIFY_SIZES[bisect_left(VERIFY_SIZES, count)]
        for name, given in (("tokens", known.tokens), ("parents", known.parents), ("depth", known.depth)):
            here[name][:count] = given
            here[name][count:size] = 0
        here["parents"][0] = 0
        here["count"][0] = count
        mask, padding = here["mask"], np.arange(count, size)
        mask[:size, :size] = False
        mask[:count, :count] = tree.ancestry()
        mask[padding, padding] = True
        return size

    @torch.inference_mode()
    def send_rows(self, tree: DraftTree) -> int:
        """Write a tree's rows and send them to the device; returns the size of the pass."""
        size = self.write_rows(tree)
        self.rows.send()
        return size

    def columns(self, size: int) -> int:
        """The bound on KV columns that a pass of this size reads."""
        return self.column_bound(size, self.forward)

    def column_bound(self, size: int, forward: Forward) -> int:
        """The same for the forward of another model on the same text."""
        if not forward.bucketed:
            return self.capacity
        return min(-(-(self.length_bound + size) // COLUMN_STEP) * COLUMN_STEP, self.capacity)

    def score(self, size: int, columns: int) -> Scored:
        """Run the rows through the model; their keys and values are staged after the committed ones."""
        given = self._rows(size)
        logits, states = self.forward(given, self.kv, self.taps, columns)
        return Scored(logits, states, given.positions)

    def _rows(self, size: int) -> Pass:
        """The rows on the device."""
        rows = self.rows.device
        tokens, depth, mask = rows["tokens"][:size], rows["depth"][:size], rows["mask"][:size, :size]
        branches = mask if size > 1 else None  # a single row is a chain
        positions, slots, reach, lineage = place_rows(self.length, depth, rows["count"], branches)
        return Pass(tokens, positions, slots, mask, self.length, Paths(reach, lineage))

    def noise_buffer(self, positions: int) -> Tensor:
        """The fixed buffer for the noise of this number of positions, [positions, V]."""
        if positions not in self._noise:
            self._noise[positions] = torch.zeros(positions, self._vocabulary, device=self.device)
        return self._noise[positions]

    def update_noise(self, noise: Tensor) -> None:
        """Update the noise for the current positions; once per cycle."""
        update_noise(noise, self.length, self.accepted, self.sampling.seed)

    def draw(self, scored: Scored, params: SamplingParams, noise: Tensor | None = None) -> Tensor:
        """The target's token after each row, [n]; with `noise` if it is in a buffer, else it is computed."""
        logits, sampling = scored.logits[: len(scored.positions)], self.sampling
        cutoff = sampling.cutoffs(logits) if params.filters and not params.greedy else None
        given = logits, scored.positions, sampling.seed, sampling.temperature, params.greedy, 1
        return draw(*given, noise, cutoff=cutoff)

    def commit_host_path(self, verdict: PackedBuffer, deepest: int) -> None:
        """Commit a path that the host chose."""
        path = verdict.device["path"][:deepest]
        goal = self.length + self._places[:deepest]
        move(self._flat, torch.where(path >= 0, self.length + path, goal), goal)
        self.length.add_(verdict.device["accepted"])

    def commit_path(self, deepest: int, states: Tensor | None, path: Tensor, features: Tensor | None) -> None:
        """Move the KV rows of a path from `move_source` to `move_goal`, and copy its states to `features` if given."""
        states = None if features is None else states
        move(self._flat, self.move_source[:deepest], self.move_goal[:deepest], states, path[:deepest], features)

    @property
    def _flat(self) -> Tensor:
        """[2 * layers * kv_heads, capacity, d]"""
        return self.kv.view(-1, *self.kv.shape[-2:])


def sampling_key(params: SamplingParams) -> tuple[object, ...]:
    """The part of the sampling settings that a captured pass depends on."""
    if params.greedy:
        return ("greedy",)
    return ("filtered",) if params.filters else ("sampled",)


def fastest_forward(model: Any, compiled: bool = False) -> Forward:
    """The fastest forward that supports this model; raises Unsupported if there is none."""
    try:
        return FusedForward(model)
    except Unsupported:
        return modules_forward(model, compiled)


def modules_forward(model: Any, compiled: bool = False) -> Forward:
    """A forward that runs the model's own modules, compiled or with windfall's attention if possible."""
    masked = partial(MaskedForward, compiled=compiled)
    reasons: list[str] = []
    for make in (masked, InterfaceForward) if compiled else (InterfaceForward, masked):
        try:
            return make(model)
        except Unsupported as error:
            reasons.append(str(error))
    raise Unsupported(" and ".join(dict.fromkeys(reasons)))


def in_pages(forward: Forward) -> PagedForward:
    """This forward, if it can read a KV cache in pages; otherwise raises Unsupported."""
    if getattr(forward, "group", None) is None:
        raise Unsupported("its attention does not read a KV cache in pages")
    return cast(PagedForward, forward)


def exact_forward(model: Any) -> FusedForward:
    """A forward that rounds a row alike in every pass; raises Unsupported if there is none."""
    return FusedForward(model, exact=True)


def choose_forward(model: Any, options: GpuOptions) -> tuple[Forward, str]:
    """An exact forward if the options ask for it and the model has one, else the fastest; and why it is not exact."""
    reason = "exact passes are off"
    if options.exact:
        try:
            return exact_forward(model), ""
        except Unsupported as error:
            reason = str(error)
    return fastest_forward(model, options.compiled), reason
