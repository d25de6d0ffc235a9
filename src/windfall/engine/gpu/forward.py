"""A model's forward over fixed buffers, from the rows of a tree to logits and tapped states.

Models of the families in families.py run as `FusedForward` (fused.py), which launches far fewer kernels. Others run
their own modules: with windfall's attention where they use transformers' attention interface (`InterfaceForward` in
interface.py), else under an explicit mask (`MaskedForward` in modules.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from windfall.kernels.attention import path_attention, tree_attention
from windfall.kernels.pages import Pages
from windfall.kernels.rows import ancestors


class Unsupported(Exception):
    """This model cannot run in fixed buffers; the message says why."""


class Paths(NamedTuple):
    """Where the keys that each row sees lie: those of positions 0 to `reach` - 1 of its own text."""

    reach: Tensor  # [n] long: the number of keys, its own included; 0 for padding
    lineage: Tensor | None  # [n, S] int32: the slot of its ancestor at each depth; None: the rows are a chain
    pages: Pages | None = None  # the requests of the rows, in a batch
    first: int = 0  # keys of earlier positions are not seen


class Pass(NamedTuple):
    """The rows of one forward. Committed rows [0, length) are seen by all; `mask` says which staged ones are."""

    tokens: Tensor  # [n] long
    positions: Tensor  # [n] long
    slots: Tensor  # [n] long, where keys and values go
    mask: Tensor  # [n, S] bool, over the slots from `length` on
    length: Tensor  # [1] long
    paths: Paths | None = None  # the same as `mask`, for attention in the order of positions

    @classmethod
    def in_pages(cls, tokens: Tensor, positions: Tensor, slots: Tensor, paths: Paths) -> Pass:
        """The rows of several requests, which have paths and no mask."""
        assert paths.pages is not None
        return cls(tokens, positions, slots, torch.empty(0, 0, dtype=torch.bool), paths.pages.lengths, paths)

    def up_to(self, last_token: int | None) -> Pass:
        """With this token in place of larger ones; None: as it is."""
        return self if last_token is None else self._replace(tokens=self.tokens.clamp(max=last_token))

    def attend(self, queries: Tensor, kv: Tensor, window: int | None = None) -> Tensor:
        """Attention of a drafter's rows, queries [n, heads, d], over its layer of the KV cache [2, kv_heads, …]."""
        given = queries, kv[0], kv[1], self.length
        if self.paths is None or self.paths.pages is None:
            return tree_attention(*given, self.mask, positions=self.positions, window=window)
        reach, lineage, pages, first = self.paths
        return path_attention(*given, reach, lineage, window=window, pages=pages, first=first)


class Forward(Protocol):
    """Runs rows through a model whose keys and values lie in `kv`, [2, layers, kv_heads, capacity, d]."""

    bucketed: bool  # whether a pass reads the KV cache up to a bound that the host must give

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, kv_heads, d."""
        ...

    def __call__(self, rows: Pass, kv: Tensor, taps: tuple[int, ...], columns: int) -> tuple[Tensor, Tensor | None]:
        """Logits [n, V] and the states at `taps` (see windfall.model.hidden_states), side by side [n, taps * H]."""
        ...

    def prefill(self, rows: Pass, kv: Tensor, taps: tuple[int, ...], columns: int) -> Tensor | None:
        """The same without logits."""
        ...


class PagedForward(Forward, Protocol):
    """A forward that also runs rows of several requests, whose keys and values lie in pages."""

    group: int  # query heads for each key head

    def __call__(
        self, rows: Pass, kv: Tensor, taps: tuple[int, ...], columns: int, scored: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """With `scored`, only the first `scored` rows get logits."""
        ...


def check_devices(model: Any) -> None:
    """Raise Unsupported if a model's weights lie on several devices."""
    if len({weight.device for weight in model.parameters()}) > 1:
        raise Unsupported("its weights lie on several devices")


def paths_of(mask: Tensor, length: Tensor) -> Paths:
    """The paths that a mask [n, S] describes, if each row sees its ancestors in the order of their slots."""
    seen = mask.cumsum(1)  # how many rows a row sees, up to each slot
    return Paths(length + seen[:, -1], length.int() + ancestors(mask, seen - 1))
