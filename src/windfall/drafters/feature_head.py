"""Draft with a feature head: EAGLE-1/2, EAGLE-3 or GRIFFIN.

Committed tokens have the target's true features, drafted ones the head's own. Therefore the KV rows of drafted tokens
are dropped after each cycle and computed again from true features in the next one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.core.errors import HeadWarning
from windfall.core.options import option
from windfall.core.sampling import Dice
from windfall.core.tree import DraftTree
from windfall.core.types import Grow
from windfall.drafters.base import Drafter, GpuForm, HeadForm, add_children
from windfall.heads.base import DraftHead, FeatureHead, Guess
from windfall.heads.layers import masked_attention, within
from windfall.model.batch import Packed, Rows, pack
from windfall.model.decoder import estimated_numbers_per_row
from windfall.model.kv_cache import KVCache
from windfall.model.target import Target

MAX_CHUNK = 1024  # columns of one catch-up pass
WINDOW_HINT = " (drafter option window=N: the last N, in every text)"
FOLLOWS_LENGTH = "its head's rotary angles depend on the length of the text"
MAX_PENDING = 32  # pending columns that run with the first draft pass; more run before it


@dataclass
class FeatureHeadDrafter(Drafter):
    """A draft head: a folder, a hub id or a loaded head; by default the bundled head of the embedded model."""

    model: Any = option(
        None, "folder or hub id of a head, or a loaded one; none: the bundled head of the embedded model"
    )

    whole: bool = option(
        False, "draft from the target's whole vocabulary if the head borrows it: slower passes, longer accepted paths"
    )

    vocabulary_precision: str = option(
        "auto",
        "precision of the vocabulary head; auto: int8 on a CPU if that is faster, else full",
        choices=("auto", "int8", "full"),
    )

    window: int | None = option(None, "the last positions that the head sees; none: as many as it was made for", low=1)

    def attach(self, target: Target) -> None:
        from windfall.heads.fitting import in_precision, with_vocabulary
        from windfall.heads.loading import find_head

        self._reach = Reach(find_head(self.model, target, "head"), self.window, target.context, WINDOW_HINT)
        head = self._reach.head
        head = with_vocabulary(head, target, None) if self.whole else head
        self.head: FeatureHead = in_precision(head, self.vocabulary_precision)

    @property
    def longest(self) -> int | None:
        """The number of positions after which nothing can be drafted; None: no limit."""
        return self._reach.longest

    def expect(self, length: int) -> None:
        self._reach.expect(length)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.head.config.taps

    def start(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Sequence[Dice | None]) -> None:
        config = self.head.config
        self._dice: list[Dice | None] = []
        self._memory = HeadMemory(config.layer.num_hidden_layers, 0, config.windows)
        self._tokens: list[list[int]] = []  # pending columns: committed, but not in the KV cache
        self._features: list[Tensor] = []  # of the position before each pending token
        self._slots: list[dict[int, int]] = []  # expanded node → its staged row
        self._recycled: list[list[Tensor]] = []  # per staged row, [rows of a pass, H]
        self.join(prompts, hidden, dice)

    @torch.inference_mode()
    def join(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Sequence[Dice | None]) -> None:
        assert hidden is not None
        self._dice += dice
        self._memory.cache.append(len(prompts))
        self._tokens += [prompt[1:] for prompt in prompts]
        self._features += hidden
        self._slots += [{} for _ in prompts]
        self._recycled += [[] for _ in prompts]

    @property
    def row_bytes(self) -> int:
        return head_row_bytes(self.head)

    @torch.inference_mode()
    def expand(self, trees: list[DraftTree], grows: Sequence[Grow | None]) -> list[DraftTree]:
        grows = [self._fitting(b, tree, grow) for b, (tree, grow) in enumerate(zip(trees, grows, strict=True))]
        if not any(grows):
            return trees
        self._catch_up(grows)
        first = self._memory.cache.staged
        rows = [self._rows(b, tree, grow) for b, (tree, grow) in enumerate(zip(trees, grows, strict=True))]
        hidden = [self._hidden(b, tree, grow) for b, (tree, grow) in enumerate(zip(trees, grows, strict=True))]
        guess = self._feed(rows, hidden)
        return [
            tree if grow is None else self._add_children(b, tree, grow, guess, len(rows[b].tokens), first)
            for b, (tree, grow) in enumerate(zip(trees, grows, strict=True))
        ]

    def commit(
        self, trees: list[DraftTree], paths: list[Tensor], bonus: list[int], hidden: list[Tensor] | None
    ) -> None:
        assert hidden is not None
        keep = []
        for b, (tree, path) in enumerate(zip(trees, paths, strict=True)):
            seen = bool(self._slots[b])  # the root was expanded, and every pending column with it
            last = self._slots[b].get(0, 0)
            keep.append(list(range(last - len(self._tokens[b]) + 1, last + 1)) if seen else [])
            fresh = [*tree.tokens[path[1:]].tolist(), bonus[b]]
            self._tokens[b] = fresh if seen else self._tokens[b] + fresh
            self._features[b] = hidden[b] if seen else torch.cat([self._features[b], hidden[b]])
            self._slots[b], self._recycled[b] = {}, []
        self._memory.cache.commit(keep)

    def retain(self, keep: list[int]) -> None:
        self._memory.cache.retain(keep)
        self._tokens, self._features = [self._tokens[b] for b in keep], [self._features[b] for b in keep]
        self._slots, self._recycled = [self._slots[b] for b in keep], [self._recycled[b] for b in keep]
        self._dice = [self._dice[b] for b in keep]

    def gpu_form(self) -> GpuForm | str:
        return HeadForm(self.head) if self.longest is None else FOLLOWS_LENGTH

    def _fitting(self, b: int, tree: DraftTree, grow: Grow | None) -> Grow | None:
        """None if there is no feature to start from, or if the head has too few positions for all of these nodes."""
        used = self._memory.cache.lengths[b] + len(self._tokens[b])
        if not grow or not used:
            return None
        deepest = int(tree.arrays.depth[grow.nodes.numpy()].max())
        return grow if self.longest is None or used + deepest <= self.longest else None

    def _catch_up(self, grows: Sequence[Grow | None]) -> None:
        """Before the first pass of a cycle, run all pending columns but the root's where there are many."""
        if self._memory.cache.staged:
            return
        while many := [b for b, grow in enumerate(grows) if grow and len(self._tokens[b]) > MAX_PENDING]:
            takes = [min(len(self._tokens[b]) - 1, MAX_CHUNK) for b in many]
            with self._memory.only(many) as cache:
                starts = zip(many, takes, cache.lengths, strict=True)
                rows = [Rows.chain(self._tokens[b][:n], at) for b, n, at in starts]
                self._feed(rows, [self.head.fuse(self._features[b][:n]) for b, n in zip(many, takes, strict=True)])
                cache.commit([list(range(n)) for n in takes])
            for b, n in zip(many, takes, strict=True):
                self._tokens[b], self._features[b] = self._tokens[b][n:], self._features[b][n:]

    def _rows(self, b: int, tree: DraftTree, grow: Grow | None) -> Rows:
        """The pending columns if the root is expanded, else the nodes."""
        staged, length, pending = self._memory.cache.staged, self._memory.cache.lengths[b], len(self._tokens[b])
        if grow is None:
            return Rows.chain([], 0, staged)
        slots = self._slots[b]
        if not slots:
            assert grow.nodes.tolist() == [0], "the root comes first"
            return Rows.chain(self._tokens[b], length, staged)
        return Rows.branch(
            tree, grow.nodes, slots, range(slots[0] - pending + 1, slots[0]), length + pending - 1, staged
        )

    def _hidden(self, b: int, tree: DraftTree, grow: Grow | None) -> Tensor:
        """[n, H]: the target's features of the pending columns, or the head's own features of the nodes' parents."""
        if grow is None:
            return self._features[b].new_zeros(0, self.head.config.layer.hidden_size)
        slots = self._slots[b]
        if not slots:
            return self.head.fuse(self._features[b])
        places = [slots[parent] - slots[0] for parent in tree.parents[grow.nodes].tolist()]
        return torch.cat(self._recycled[b])[torch.tensor(places, device=self.head.device)]

    def _add_children(self, b: int, tree: DraftTree, grow: Grow, guess: Guess, size: int, first: int) -> DraftTree:
        fresh = len(grow.nodes)
        slots = range(first + size - fresh, first + size)
        self._slots[b].update(zip(grow.nodes.tolist(), slots, strict=True))
        width = guess.recycled.shape[1]
        self._recycled[b].append(guess.recycled[b, size - fresh : width])
        logq = torch.log_softmax(self.head.logits(guess.state[b, size - fresh : size]).float(), -1)
        return add_children(tree, grow, logq, self._dice[b], self.head.draft_tokens)

    def _feed(self, rows: list[Rows], hidden: list[Tensor]) -> Guess:
        """One pass over these rows, which are staged after the existing ones."""
        cache, device = self._memory.cache, self.head.device
        packed = pack(rows, cache.lengths, cache.staged, device)
        width = packed.tokens.shape[1]
        padded = torch.stack([torch.cat([own, own.new_zeros(width - len(own), own.shape[1])]) for own in hidden])
        cache.reserve(width)
        self._memory.prepare(packed)
        guess: Guess = self.head(packed.tokens, padded, packed.positions, self._memory)
        cache.staged += width
        return guess


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
        if queries.device.type == "cpu" and mask is not None:  # needs no copies of shared keys
            return F.scaled_dot_product_attention(queries, keys, values, mask[:, None], enable_gqa=True)
        return masked_attention(queries, keys, values, mask)
