"""Drafters on fixed buffers: a cycle's first pass takes in what was committed, each later one expands some nodes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from windfall.core.sampling import warp
from windfall.core.types import SamplingParams
from windfall.engine.gpu.eagle3 import FusedEagle3
from windfall.engine.gpu.forward import Pass, Unsupported
from windfall.engine.gpu.target import PIECE, Dials, GpuTarget, Piece, fitting, shape_of
from windfall.heads.base import FeatureHead
from windfall.heads.layers import head_dim
from windfall.kernels.attention import tree_attention
from windfall.kernels.rows import append_rows
from windfall.kernels.scatter import Scatter
from windfall.kernels.top import LazyLogits, top_children
from windfall.model.decoder import Decoder


class Sprouting:
    """From a drafter's logits to children, by one way of sampling: coupled to the coming draws, or not."""

    def __init__(self, params: SamplingParams, coupled: bool, dials: Dials, noise: Tensor | None = None):
        self.params, self.dials, self.noise = params, dials, noise
        self.coupled = coupled and not params.greedy
        self.warped = self.coupled and params.filters

    @property
    def key(self) -> tuple[object, ...]:
        """What a recorded pass depends on."""
        return ("coupled", *shape_of(self.params)) if self.coupled else ("alone",)

    def children(
        self, logits: Tensor | LazyLogits, positions: Tensor, offset: int, k: int, tokens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and tokens [w, k]; the draws after these rows come `offset` after `positions` [w]."""
        dice: dict[str, Any] = {}
        if self.coupled:
            temperature = self.dials.temperature
            if self.warped:
                logits = warp(multiplied(logits).float().log_softmax(-1) / self.params.temperature, self.params)
                temperature = torch.ones_like(temperature)
            dice = {"positions": positions, "offset": offset, "seed": self.dials.seed, "temperature": temperature}
            dice |= {"kappa": self.dials.kappa, "noise": self.noise}
        columns = len(logits.weight) if isinstance(logits, LazyLogits) else logits.shape[-1]
        return top_children(logits, min(k, columns), tokens=tokens, **dice)


def multiplied(logits: Tensor | LazyLogits) -> Tensor:
    return logits.logits if isinstance(logits, LazyLogits) else logits


def entropy(logits: Tensor) -> Tensor:
    """[w] nats, of the drafter's own distribution after each row."""
    found: Tensor = torch.special.entr(logits.float().softmax(-1)).sum(-1)
    return found


class GpuDrafter:
    """What all of them share: the columns that were committed but not taken in, and the length of what was."""

    lag: int  # a node's draw comes so many positions after its column
    features: Tensor | None = None  # [pending, taps * H] the target's states before each pending column, if wanted

    def __init__(self, judge: GpuTarget, pending: int):
        device, long = judge.device, torch.long
        self.judge, self.pending = judge, pending
        self.name = object()  # in keys of recorded work: no other draft, not even one in the same memory, has it
        self.tokens = torch.zeros(pending, dtype=long, device=device)  # committed, but not taken in
        self.waiting = torch.zeros(1, dtype=long, device=device)  # how many of them are
        self.length = torch.zeros(1, dtype=long, device=device)  # columns taken in
        self.piece = Piece(device)
        self.taken_in: Tensor | None = None  # its features, where a drafter has any
        self._causal = torch.ones(pending, pending, dtype=torch.bool, device=device).tril()

    @property
    def vocabulary(self) -> Tensor | None:
        """[M] the token of each column of the logits; None: they are the target's."""
        return None

    @property
    def columns(self) -> int:
        """The bound on columns of its passes, on which recorded ones depend."""
        return self.judge.capacity

    def start(self) -> None:
        """Forget the text before."""
        self.length.zero_()

    def read(self, tokens: Tensor, following: Tensor, states: Tensor | None, last: bool) -> None:
        """Take in a piece of a text: n tokens, the token that follows each, and the target's states of them; of the
        last piece one column stays pending."""
        raise NotImplementedError

    def take_piece(self, text: Tensor, at: int, states: Tensor | None) -> int:
        """`read` for the piece that begins here; returns where the next one does."""
        until = min(at + PIECE, len(text) - 1)
        self.read(text[at:until], text[at + 1 : until + 1], states, until == len(text) - 1)
        return until

    def _take_in(self, tokens: Tensor, features: Tensor | None) -> None:
        """Columns of a text, without logits."""
        if not len(tokens):
            return
        size = self.piece.take(tokens)
        if features is not None and self.taken_in is not None:
            self.taken_in[: len(tokens)] = features
        key = ("take in", self.name, size, self.columns)
        self.judge.recorder.run(key, partial(self._run_piece, size))

    def _run_piece(self, size: int) -> None:
        self._read(self.piece.rows(size, self.length), None if self.taken_in is None else self.taken_in[:size])
        self.length.add_(self.piece.count)

    def _read(self, rows: Pass, features: Tensor | None) -> None:
        raise NotImplementedError

    def open(self, rows: int) -> Tensor | LazyLogits:
        """Take in the pending columns, which are `rows` at the most; logits [1, V] after the last. Its draw's position
        is `lag` - 1 after `length`, as this leaves it."""
        slots, last, before = append_rows(self.length, self.waiting, rows)
        return self._opened(Pass(self.tokens[:rows], slots, slots, self._causal[:rows, :rows], before), last)

    def grow(self, rows: Pass, above: Tensor, here: Tensor) -> Tensor | LazyLogits:
        """Run nodes whose parents have the places `above` and which get the places `here`; logits [w, V]."""
        raise NotImplementedError

    def _opened(self, rows: Pass, last: Tensor) -> Tensor | LazyLogits:
        raise NotImplementedError


class GpuHeadDrafter(GpuDrafter):
    """A head on the target's hidden states. Column t holds token t + 1."""

    lag = 2

    def __init__(self, head: FeatureHead, judge: GpuTarget, pending: int, staged: int):
        super().__init__(judge, pending)
        self.head = head
        layer, device, dtype = head.config.layer, judge.device, head.dtype
        heads, width = layer.num_key_value_heads, head_dim(layer)
        self.kv = judge.cache((layer.num_hidden_layers, heads, width), dtype)
        self.features = torch.zeros(pending, judge.width, dtype=dtype, device=device)
        self.taken_in = torch.zeros(PIECE, judge.width, dtype=dtype, device=device)
        self.own = torch.zeros(staged + 1, layer.hidden_size, dtype=dtype, device=device)  # what the head goes on from
        self._first = torch.zeros(1, dtype=torch.long, device=device)
        try:
            self.swift: FusedEagle3 | None = FusedEagle3(head, judge.capacity)
        except Unsupported:
            self.swift = None

    @property
    def vocabulary(self) -> Tensor | None:
        return self.head.draft_tokens

    def read(self, tokens: Tensor, following: Tensor, states: Tensor | None, last: bool) -> None:
        assert states is not None and self.features is not None
        count = len(following) - last
        self._take_in(following[:count], states[:count])
        if last:
            self.tokens[:1] = following[-1:]
            self.features[:1] = states[-1]
            self.waiting.fill_(1)

    def _read(self, rows: Pass, features: Tensor | None) -> None:
        assert features is not None
        self._run(rows, self._fuse(features), None, None, None)

    def _opened(self, rows: Pass, last: Tensor) -> Tensor | LazyLogits:
        assert self.features is not None
        return self._logits(self._run(rows, self._fuse(self.features[: len(rows.tokens)]), None, last, self._first))

    def grow(self, rows: Pass, above: Tensor, here: Tensor) -> Tensor | LazyLogits:
        return self._logits(self._run(rows, self.own, above, None, here))

    def _fuse(self, features: Tensor) -> Tensor:
        return self.head.fuse(features) if self.swift is None else self.swift.fuse(features)

    def _run(
        self, rows: Pass, hidden: Tensor, index: Tensor | None, pick: Tensor | None, here: Tensor | None
    ) -> Tensor:
        """The states of these rows, or of those picked, [n, H]; what is gone on from becomes their own, at `here`.
        The rows' features lie in `hidden`, at `index`."""
        if self.swift is not None:
            keep = None if here is None else Scatter(self.own, here, self.swift.recycles_normed)
            return self.swift(rows, hidden, index, self.kv, pick, keep)
        hidden = hidden if index is None else hidden.index_select(0, index)
        memory = Static(self.kv, rows, self.head.config.windows)
        guess = self.head(rows.tokens[None], hidden[None], rows.positions[None], memory)
        state: Tensor = guess.state[0]
        recycled: Tensor = guess.recycled[0]
        if pick is not None:
            state, recycled = state.index_select(0, pick), recycled.index_select(0, pick)
        if here is not None:
            self.own.index_copy_(0, here, recycled)
        return state

    def _logits(self, state: Tensor) -> Tensor | LazyLogits:
        return self.head.logits(state) if self.swift is None else self.swift.words(state)


class Static:
    """A head's memory for one pass over the fixed buffer."""

    def __init__(self, kv: Tensor, rows: Pass, windows: tuple[int | None, ...]):
        self.kv, self.rows, self.windows = kv, rows, windows

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        kept, rows = self.kv[:, layer], self.rows
        kept[0].index_copy_(1, rows.slots, keys[0])
        kept[1].index_copy_(1, rows.slots, values[0])
        given = queries[0].transpose(0, 1), kept[0], kept[1], rows.length, rows.mask
        window = self.windows[layer] if self.windows else None
        out = tree_attention(*given, positions=rows.positions, window=window)  # [n, heads, d]
        return out.transpose(0, 1)[None]


class GpuModelDrafter(GpuDrafter):
    """A smaller language model. Column t holds token t."""

    lag = 1

    def __init__(self, decoder: Decoder, vocabulary: int, judge: GpuTarget, pending: int, staged: int):
        super().__init__(judge, pending)
        self.decoder, self.size, self.staged = decoder, vocabulary, staged
        self.forward = fitting(decoder.model)
        self.kv = judge.cache(self.forward.shape, decoder.dtype)

    @property
    def columns(self) -> int:
        return self.judge.bound(max(self.pending + self.staged, PIECE), self.forward)

    def read(self, tokens: Tensor, following: Tensor, states: Tensor | None, last: bool) -> None:
        self._take_in(tokens, None)
        if last:
            self.tokens[:1] = following[-1:]
            self.waiting.fill_(1)

    def _read(self, rows: Pass, features: Tensor | None) -> None:
        self._logits(rows)

    def _opened(self, rows: Pass, last: Tensor) -> Tensor:
        return self._logits(rows).index_select(0, last)

    def grow(self, rows: Pass, above: Tensor, here: Tensor) -> Tensor:
        return self._logits(rows)

    def _logits(self, rows: Pass) -> Tensor:
        return self.forward(rows, self.kv, (), self.columns)[0][:, : self.size]


def read(prompt: list[int], judge: GpuTarget, draft: GpuDrafter | None) -> None:
    """Begin a new text: target and drafter take in a prompt but for its last token."""
    given = torch.tensor(prompt, device=judge.device)
    if draft is not None:
        draft.start()
    at = 0
    for states in judge.read(given[:-1]):
        if draft is not None:
            at = draft.take_piece(given, at, states)
