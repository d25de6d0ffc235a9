"""The target on fixed buffers: a tree's rows go in, the accepted path comes out, and the cache keeps its rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from windfall.core.sampling import process, signed
from windfall.core.tree import DraftTree
from windfall.core.types import GpuOptions, InputError, SamplingParams
from windfall.engine.gpu.forward import Forward, Pass, Paths, Unsupported, Whole
from windfall.engine.gpu.graphs import GraphCache
from windfall.engine.gpu.llama import FusedLlama
from windfall.engine.gpu.transfer import PackedBuffer
from windfall.kernels.attention import PART, lineage
from windfall.kernels.draw import draw, update_noise
from windfall.kernels.move import move
from windfall.kernels.rows import positions_and_slots

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320)  # sizes of recorded verify passes
MAX_VERIFY_ROWS = ROWS[-1]
PIECE = 128  # tokens of a text that are read at a time
EXACT = 64  # rows of every pass where rounding must not depend on them; larger trees take several passes
CAPACITY = 2048 - MAX_VERIFY_ROWS  # rows of the cache to begin with, beside those of a pass
STEP = 1024
COLUMNS = 256  # step of the bound on columns, for forwards that need one


class Dials(NamedTuple):
    """What sampling needs on the device, so that a recorded pass serves every seed and temperature."""

    seed: Tensor  # [1] long
    temperature: Tensor  # [1] fp32
    kappa: Tensor  # [1] fp32


class Piece:
    """Consecutive tokens of a text that is read, in buffers that stay in their place."""

    def __init__(self, device: torch.device):
        self.tokens = torch.zeros(PIECE, dtype=torch.long, device=device)
        self.count = torch.zeros(1, dtype=torch.long, device=device)
        self._places = torch.arange(PIECE, device=device)
        self._causal = torch.ones(PIECE, PIECE, dtype=torch.bool, device=device).tril()

    def take(self, tokens: Tensor) -> int:
        """These tokens come next; returns the size of the pass that takes them."""
        self.tokens[: len(tokens)] = tokens
        self.count.fill_(len(tokens))
        return ROWS[bisect_left(ROWS, len(tokens))]

    def rows(self, size: int, length: Tensor) -> Pass:
        """The pass: a chain behind `length` rows, padded to its size."""
        slots = length + self._places[:size]
        return Pass(self.tokens[:size], slots, slots, self._causal[:size, :size], length)


class Scored(NamedTuple):
    """What a pass over n rows gave; in recorded work it lies where other work may write later."""

    logits: Tensor  # [n, V], and the pass's padding behind
    states: Tensor | None  # [n, taps * H]
    positions: Tensor  # [n] long, of the rows


class GpuTarget:
    """Scores the rows of one tree, follows the target's draws through it, and commits what was accepted."""

    def __init__(self, model: Any, taps: tuple[int, ...], recorder: GraphCache, launch: GpuOptions):
        self.exact = launch.exact  # whether a row must depend on its own text alone, to the bit
        self.forward = invariant(model) if self.exact else fitting(model, launch.compiled)
        self.taps, self.recorder = taps, recorder
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
        self.source, self.goal = (torch.zeros(MAX_VERIFY_ROWS, dtype=long, device=device) for _ in range(2))
        self.accepted = torch.zeros(1, dtype=long, device=device)
        self.bonus = torch.zeros(1, dtype=long, device=device)
        self.dials = Dials(
            torch.zeros(1, dtype=long, device=device), torch.ones(1, device=device), torch.ones(1, device=device)
        )
        self.piece = Piece(device)
        self.taken_in = torch.zeros(PIECE, self.width, dtype=self.dtype, device=device) if taps else None  # its states
        self._places = torch.arange(MAX_VERIFY_ROWS, device=device)
        self._vocabulary = len(model.get_output_embeddings().weight)
        self._noise: dict[int, Tensor] = {}
        self.known = 0  # the host's bound on `length`
        self._caches: dict[tuple[tuple[int, int, int], torch.dtype], Tensor] = {}  # of drafters
        self.capacity = self.resized = 0  # rows, and how often they were made anew
        self.reserve(CAPACITY)

    @torch.inference_mode()
    def reserve(self, rows: int) -> None:
        """Make room for texts of this length; where the buffer grows, whatever was recorded points at the old one."""
        if rows + MAX_VERIFY_ROWS > self.capacity:
            self.resize(-(-max(rows + MAX_VERIFY_ROWS, 2 * self.capacity) // STEP) * STEP)

    @torch.inference_mode()
    def resize(self, capacity: int) -> None:
        """A buffer of so many rows, with nothing in it."""
        layers, heads, width = self.forward.shape
        self.recorder.clear()
        self.kv, self._caches = torch.empty(0, device=self.device), {}  # what was there goes first
        self.kv = torch.zeros(2, layers, heads, capacity, width, dtype=self.dtype, device=self.device)
        self.capacity = capacity
        self.resized += 1

    @torch.inference_mode()
    def cache(self, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        """Keys and values for a drafter with so many layers, heads and dimensions, [2, layers, heads, capacity, d]: one
        buffer for all plans, of which one at a time has a text."""
        layers, heads, width = shape
        if (shape, dtype) not in self._caches:
            size = (2, layers, heads, self.capacity, width)
            self._caches[shape, dtype] = torch.zeros(size, dtype=dtype, device=self.device)
        return self._caches[shape, dtype]

    @torch.inference_mode()
    def read(self, text: Tensor) -> Iterator[Tensor | None]:
        """Take in a new text [n], piece by piece; yields the tapped states of each piece, good until the next."""
        self.length.zero_()
        self.known = 0
        for piece in torch.split(text, PIECE):
            size = self.piece.take(piece)
            columns = self.columns(size)
            self.recorder.run(("read", size, columns, self.capacity), partial(self._read, size, columns))
            self.known += len(piece)
            yield None if self.taken_in is None else self.taken_in[: len(piece)]

    def _read(self, size: int, columns: int) -> None:
        given = self.piece.rows(size, self.length)
        _, states = self.forward(given, self.kv, self.taps, columns)
        if self.taken_in is not None and states is not None:
            self.taken_in[:size] = states
        self.length.add_(self.piece.count)

    @torch.inference_mode()
    def sample(self, params: SamplingParams, kappa: float = 1.0) -> None:
        """Set the dials."""
        self.dials.seed.fill_(signed(params.noise_seed))
        self.dials.temperature.fill_(params.temperature or 1.0)
        self.dials.kappa.fill_(kappa)

    def lay(self, tree: DraftTree) -> int:
        """Write a tree's rows on the host's side of `rows`; returns the size of the pass that takes them."""
        count, known, here = len(tree), tree.arrays, self.rows.host
        if count > MAX_VERIFY_ROWS:
            raise InputError(f"a verify pass takes {MAX_VERIFY_ROWS} rows at the most on a GPU, not {count}")
        size = ROWS[bisect_left(ROWS, count)]
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
    def place(self, tree: DraftTree) -> int:
        """The same, and send them to the device."""
        size = self.lay(tree)
        self.rows.send()
        return size

    def columns(self, size: int) -> int:
        """The bound on columns of a pass of this size, for forwards that read up to a bound."""
        return self.bound(size, self.forward)

    def bound(self, size: int, forward: Forward) -> int:
        """The same for another model that reads this text."""
        if not forward.bucketed:
            return self.capacity
        return min(-(-(self.known + size) // COLUMNS) * COLUMNS, self.capacity)

    def score(self, size: int, columns: int) -> Scored:
        """The rows through the model; keys and values are staged behind the committed ones."""
        given = self._rows(size)
        parts = self._parts(given) if self.exact else [given]
        found = [self.forward(part, self.kv, self.taps, columns) for part in parts]
        states = _joined([states for _, states in found if states is not None])[:size] if self.taps else None
        return Scored(_joined([logits for logits, _ in found]), states, given.positions[:size])

    def _rows(self, size: int) -> Pass:
        """What is in `rows`, padded where passes have a size of their own."""
        rows, more = self.rows.device, self.padding(size)
        tokens, depth, mask = rows["tokens"][:size], rows["depth"][:size], rows["mask"][:size, :size]
        if more:
            tokens, depth, mask = pad(tokens, (0, more)), pad(depth, (0, more)), pad(mask, (0, more, 0, more))
        positions, slots = positions_and_slots(self.length, depth)
        given = Pass(tokens, positions, slots, mask, self.length)
        if not self.exact:
            return given
        reach = (positions + 1) * (self._places[: size + more] < rows["count"])
        return given._replace(paths=Paths(reach, lineage(mask, depth)))

    def _parts(self, rows: Pass) -> Iterator[Pass]:
        """Passes of the one size. Parents come before their children, so what a row sees is there by then."""
        assert rows.paths is not None
        for start in range(0, len(rows.tokens), EXACT):
            own = slice(start, start + EXACT)
            tokens, positions, slots, mask = (x[own] for x in (rows.tokens, rows.positions, rows.slots, rows.mask))
            yield Pass(tokens, positions, slots, mask, rows.length, Paths(*(x[own] for x in rows.paths)))

    def padding(self, size: int) -> int:
        """Rows that the passes of so many have beside them."""
        return -size % EXACT if self.exact else 0

    def noise(self, positions: int) -> Tensor:
        """Where the noise of so many positions can lie, [positions, V]: the same place every time."""
        if positions not in self._noise:
            self._noise[positions] = torch.zeros(positions, self._vocabulary, device=self.device)
        return self._noise[positions]

    def roll(self, noise: Tensor) -> None:
        """Bring it up to date, once a cycle."""
        update_noise(noise, self.length, self.accepted, self.dials.seed)

    def draw(self, scored: Scored, params: SamplingParams, noise: Tensor | None = None) -> Tensor:
        """The target's own token after each row, [n]; by the noise as it was looked up, if it was."""
        logits, temperature, size = scored.logits, self.dials.temperature, len(scored.positions)
        if not params.greedy and params.filters:
            parts = torch.split(logits, EXACT if self.exact else size)  # here, too, the number of rows is one
            logits, temperature = _joined([process(x, None, 0, params) for x in parts]), torch.ones_like(temperature)
        return draw(logits[:size], scored.positions, self.dials.seed, temperature, params.greedy, 1, noise)

    def keep(self, verdict: PackedBuffer, deepest: int) -> None:
        """Commit a path that the host walked."""
        path = verdict.device["path"][:deepest]
        goal = self.length + self._places[:deepest]
        move(self._flat, torch.where(path >= 0, self.length + path, goal), goal)
        self.length.add_(verdict.device["accepted"])

    def advance(self, deepest: int, states: Tensor | None, path: Tensor, features: Tensor | None) -> None:
        """Move the rows of a path as `source` and `goal` say, and hand out its states, where they are wanted."""
        states = None if features is None else states
        move(self._flat, self.source[:deepest], self.goal[:deepest], states, path[:deepest], features)

    @property
    def _flat(self) -> Tensor:
        """[2 * layers * kv_heads, capacity, d]"""
        return self.kv.view(-1, *self.kv.shape[-2:])


def shape_of(params: SamplingParams) -> tuple[object, ...]:
    """What of the sampling a recorded pass depends on."""
    if params.greedy:
        return ("greedy",)
    if not params.filters:
        return ("sampled",)
    return ("warped", params.temperature, params.top_k, params.top_p, params.min_p)


def fitting(model: Any, compiled: bool = False) -> Forward:
    """The fastest forward that this model can run as."""
    try:
        return FusedLlama(model)
    except Unsupported:
        return Whole(model, compiled)


def invariant(model: Any) -> FusedLlama:
    """A forward whose rows do not depend on the rows beside them, if all passes have the same number."""
    try:
        forward = FusedLlama(model)
    except Unsupported as reason:
        raise InputError(f"exact passes are for models with Llama's skeleton, and not here: {reason}") from None
    forward.split = PART
    return forward


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
