"""What drafters with a draft head and a KV cache share: their options, the limits of the head, and the cache."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor

from windfall.core.errors import HeadWarning
from windfall.core.options import option
from windfall.drafters.base import Drafter
from windfall.heads.base import DraftHead
from windfall.heads.layers import masked_attention, within
from windfall.kernels.few_rows import use_few_rows
from windfall.model.batch import Packed
from windfall.model.decoder import estimated_numbers_per_row
from windfall.model.grouped_attention import grouped_attention
from windfall.model.kv_cache import KVCache

if TYPE_CHECKING:
    from windfall.model.target import Target

H = TypeVar("H", bound=DraftHead)
PRECISIONS = {"auto": None, "full": False, "int8": True}  # whether large weights are read in int8
MAX_CHUNK = 1024  # columns of one catch-up pass
WINDOW_HINT = " (drafter option window=N: the last N, in every text)"
FOLLOWS_LENGTH = "its head's rotary angles depend on the length of the text"


@dataclass
class HeadDrafter(Drafter, Generic[H]):
    """The base of drafters that run one draft head. Subclasses say which kind of head, and how it drafts."""

    model: Any = option(None, "folder or hub id of a head, or a loaded one")

    whole: bool = option(
        False, "draft from the target's whole vocabulary if the head borrows it: slower passes, longer accepted paths"
    )

    weights: str = option(
        "auto", "precision of the head's large weights; auto: int8 where that is faster", choices=tuple(PRECISIONS)
    )

    window: int | None = option(None, "the last positions that the head sees; none: as many as it was made for", low=1)

    kind: ClassVar[str]  # registry name

    def attach(self, target: Target) -> None:
        from windfall.heads.fitting import with_vocabulary
        from windfall.heads.packed import in_precision

        self._reach = Reach(self.find_head(target), self.window, target.context, WINDOW_HINT)
        head = with_vocabulary(self._reach.head, target, None) if self.whole else self._reach.head
        self.head: H = in_precision(head, self.weights)
        use_few_rows(self.head)

    def find_head(self, target: Target) -> H:
        """The head, with what it borrows from the target."""
        from windfall.heads.loading import find_head

        return cast(H, find_head(self.model, target, self.kind))

    @property
    def longest(self) -> int | None:
        """The number of positions after which nothing can be drafted; None: no limit."""
        return self._reach.longest

    def expect(self, length: int) -> None:
        self._reach.expect(length)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.head.config.taps

    @property
    def row_bytes(self) -> int:
        return head_row_bytes(self.head)


def head_row_bytes(head: DraftHead) -> int:
    """Bytes that a token takes in a head's KV cache."""
    return estimated_numbers_per_row(head.config.layer) * next(head.parameters()).dtype.itemsize


class Reach:
    """Limits a head in texts longer than it was made for to a window of the last positions, and warns once."""

    def __init__(self, head: Any, window: int | None, context: int | None, hint: str = ""):
        from windfall.heads.fitting import max_positions, with_window

        self._hint = hint  # the end of the warning
        self.head: Any = with_window(head, window, context)
        self.longest = max_positions(head, context)
        self._shortened = window is None and self.head.config.windows != head.config.windows
        self._warned = False

    def expect(self, length: int) -> None:
        made_for = self.longest or self.head.config.layer.max_position_embeddings
        positions = length - 1  # the last token is only predicted
        if self._warned or positions <= made_for or not (self.longest or self._shortened):
            return
        then = "in longer texts it stops drafting there"
        if self.longest is None:
            then = f"in longer texts it sees the last {made_for} only{self._hint}"
        warnings.warn(f"this head was made for {made_for} positions: {then}", HeadWarning, stacklevel=3)
        self._warned = True


class HeadMemory:
    """The head's KV cache, committed and staged, and the mask of the current pass."""

    def __init__(self, layers: int, batch: int, windows: tuple[int | None, ...] = ()):
        self.cache = KVCache(layers, batch)
        self.mask: Tensor | None = None  # [B, n, columns] bool
        self._windows = windows  # of each layer
        self._narrowed: dict[int | None, Tensor] = {}  # the mask within each window
        self._staged: Tensor | None = None  # [B, staged] positions, if there are windows

    @contextmanager
    def only(self, places: list[int]) -> Iterator[KVCache]:
        """In this block the cache has these sequences only; what is committed to it is kept."""
        whole = self.cache
        if places == list(range(len(whole.lengths))):
            yield whole
            return
        self.cache = whole.part(places)
        try:
            yield self.cache
            whole.put(places, self.cache)
        finally:
            self.cache = whole

    def prepare(self, packed: Packed) -> None:
        """Set the masks for the rows of the next pass; a committed row's column in the cache is its position."""
        self.mask, cache = packed.mask, self.cache
        if not self._windows:
            return
        before = packed.positions[:, :0] if self._staged is None or not cache.staged else self._staged
        self._staged = torch.cat([before, packed.positions], 1)
        self._narrowed = {}
        reached = cache.end + packed.tokens.shape[1]
        if not any(window is not None and window < reached for window in self._windows):
            return
        committed = torch.arange(cache.top, device=packed.tokens.device).expand(len(packed.tokens), -1)
        columns = torch.cat([committed, self._staged], 1)
        age = packed.positions[:, :, None] - columns[:, None]  # [B, n, columns]
        self._narrowed = {window: within(packed.mask, age, window) for window in {*self._windows}}

    def mask_of(self, layer: int) -> Tensor | None:
        """[B, n, columns] bool: what the rows of the current pass see in this layer; None: everything."""
        return self._narrowed.get(self._windows[layer], self.mask) if self._narrowed else self.mask

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.cache.layers[layer].update(keys, values)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = self.cache.layers[layer].update(keys, values)
        mask = self.mask_of(layer)
        if queries.device.type == "cpu":  # needs no copies of shared keys
            return grouped_attention(queries, keys, values, None if mask is None else mask[:, None])
        return masked_attention(queries, keys, values, mask)
