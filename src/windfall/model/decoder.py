"""A transformers model with our cache: feed it rows of any tree shape, then say which rows to keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from windfall.model.batch import Packed, Rows, pack, unpack
from windfall.model.hidden_states import with_states
from windfall.model.kv_cache import KVCache

CHUNK = 1024  # rows a prefill pass takes at the most
TAKES_MASKS = ("sdpa", "eager")  # attention implementations; flash and flex kernels take no tree's mask
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}  # kind of layer: size
TREE_ROOM = 512  # rows that the cache keeps free for a tree where its size is limited
UNMASKED = (  # names of windows that our masks do not apply
    "keep_window_size",
    "attention_window_size",
    "attn_window_size",
    "local_window_size",
    "sliding_window_size",
    "window_size",
)


class Decoder:
    """Feeds rows and keeps some: the one way in which targets and language-model drafters run their models."""

    def __init__(self, model: Any, taps: tuple[int, ...] = ()):
        self.model = model
        self.taps = taps  # which states to hand out, side by side: see windfall.model.hidden_states
        self.config = model.config.get_text_config()
        self.windows = attention_windows(self.config)
        self.reach = exact_reach(self.config)
        self.reset(0)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.get_input_embeddings().weight.dtype
        return dtype

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def context(self) -> int | None:
        """The longest sequence the model takes, or None if its configuration names none.

        Where the rotary factors depend on the length of a pass (LongRoPE), only as far as they stay the same.
        """
        limits = getattr(self.config, "max_position_embeddings", None), self.reach
        limit: int | None = min(filter(None, limits), default=None)
        rope = getattr(self.config, "rope_parameters", None) or getattr(self.config, "rope_scaling", None) or {}
        if rope.get("rope_type") == "longrope":
            first = rope.get("original_max_position_embeddings")
            first = first or getattr(self.config, "original_max_position_embeddings", None)
            return min(filter(None, (limit, first)), default=None)
        return limit

    def limit_to_windows(self) -> None:
        """Take no texts longer than the smallest window, up to which windows hide nothing."""
        self.reach = min(filter(None, (*self.windows.values(), self.reach)), default=None)

    def reset(self, batch: int) -> None:
        """Drop everything and make place for this many sequences."""
        self.cache = KVCache(self.config.num_hidden_layers, batch)
        self._staged_positions = torch.zeros(batch, 0, dtype=torch.long, device=self.device)

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    @property
    def staged(self) -> int:
        return self.cache.staged

    @torch.inference_mode()
    def feed(
        self, rows: list[Rows], logits: bool = True, causal: bool = False
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """One forward over these rows, staged behind what is there: logits [n, V] (or none) and tapped states [n, H].

        `causal` says that the rows of each sequence are a chain.
        """
        packed = pack(rows, self.lengths, self.staged, self.device)
        self.cache.reserve(packed.tokens.shape[1])
        forward = self.model if logits else self.model.base_model
        with tree_attention(self.model):
            outputs, states = with_states(
                forward,
                self.model,
                self.taps,
                input_ids=packed.tokens,
                position_ids=packed.positions,
                attention_mask=self._mask(packed, causal or self._sees_all(rows)),
                past_key_values=self.cache,
                use_cache=True,
            )
        self.cache.staged += packed.tokens.shape[1]
        self._staged_positions = torch.cat([self._staged_positions, packed.positions], 1)
        hidden = None if states is None else unpack(states, rows)
        return (unpack(outputs.logits, rows) if logits else []), hidden

    def extend(self, tokens: list[list[int]]) -> list[Tensor] | None:
        """Commit these known tokens to each sequence, without logits; returns their tapped states."""
        states: list[list[Tensor]] = [[] for _ in tokens]
        for start in range(0, max(map(len, tokens)), CHUNK):
            parts = [part[start : start + CHUNK] for part in tokens]
            rows = [Rows.chain(part, at) for part, at in zip(parts, self.lengths, strict=True)]
            _, hidden = self.feed(rows, logits=False, causal=True)
            self.commit([list(range(len(p))) for p in parts])
            for kept, new in zip(states, hidden or [], strict=False):
                kept.append(new)
        if not self.taps:
            return None
        empty = torch.zeros(0, len(self.taps) * self.config.hidden_size, device=self.device, dtype=self.dtype)
        return [torch.cat([empty, *kept]) for kept in states]

    @torch.inference_mode()
    def commit(self, keep: list[list[int]]) -> None:
        """Keep these staged rows of each sequence and drop the others."""
        self.cache.commit(keep)
        self._staged_positions = self._staged_positions[:, :0]

    @torch.inference_mode()
    def retain(self, keep: list[int]) -> None:
        """Go on with these sequences only."""
        self.cache.retain(keep)
        self._staged_positions = self._staged_positions[keep]

    def _sees_all(self, rows: list[Rows]) -> bool:
        """Whether this pass is a single row that sees every staged row: then it is the end of a chain."""
        return len(rows) == 1 and len(rows[0].tokens) == 1 and bool(rows[0].visible.all())

    def _mask(self, packed: Packed, causal: bool) -> Any:
        """What transformers wants as `attention_mask`: a 4-D mask, one for each kind of layer, or None for its own.

        None spares the kernels a mask where transformers' causal one is the same: for a single row that sees
        everything, and for chains in an empty cache.
        """
        if causal and not self.windows and (packed.mask.shape[:2] == (1, 1) or self.cache.end == 0):
            return None
        full = as_given(packed.mask[:, None], self.model)
        if not self.windows:
            return full
        committed = torch.arange(self.cache.top, device=self.device).expand(len(packed.tokens), -1)
        columns = torch.cat([committed, self._staged_positions, packed.positions], 1)
        masks = {
            kind: full
            if window is None
            else as_given((packed.mask & within(kind, window, packed.positions, columns))[:, None], self.model)
            for kind, window in self.windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))


def attention_of(model: Any) -> str:
    """The attention implementation of passes over trees: the model's own, if that takes any mask, else sdpa."""
    own: str = model.config._attn_implementation
    return own if own in TAKES_MASKS else "sdpa"


@contextmanager
def tree_attention(model: Any) -> Iterator[None]:
    """Let a model use an attention implementation that takes a tree's mask, then give it back its own."""
    if model.config._attn_implementation in TAKES_MASKS:
        yield
        return
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}.values()
    own = [config._attn_implementation for config in configs]
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        for config, implementation in zip(configs, own, strict=True):
            config._attn_implementation = implementation


def as_given(mask: Tensor, model: Any) -> Tensor:
    """As the model takes it: boolean for sdpa; eager attention adds its mask to the scores."""
    if model.config._attn_implementation == "sdpa":
        return mask
    lowest = torch.finfo(model.dtype).min
    return torch.zeros(mask.shape, dtype=model.dtype, device=mask.device).masked_fill(~mask, lowest)


def within(kind: str, size: int, positions: Tensor, columns: Tensor) -> Tensor:
    """Which columns [B, m] lie in the window of rows at these positions [B, n]: the last ones, or the same chunk's."""
    rows, columns = positions[:, :, None], columns[:, None]
    return rows // size == columns // size if kind == "chunked_attention" else rows - columns < size


def exact_reach(config: Any) -> int | None:
    """How long a text may be until something hides or scales tokens that our masks and positions do not rule."""
    names = UNMASKED if getattr(config, "layer_types", None) else (*UNMASKED, "attention_chunk_size")
    sizes = [getattr(config, name, None) for name in names]
    if places := plain_places(config):
        sizes.append(max(places - TREE_ROOM, 1))
    return min((size for size in sizes if isinstance(size, int) and size > 0), default=None)


def plain_places(config: Any) -> int | None:
    """Rows that the cache may have until Llama 4 scales queries by their places there, which a tree's rows have not."""
    return config.floor_scale - 1 if getattr(config, "attn_temperature_tuning", False) else None


def attention_windows(config: Any) -> dict[str, int | None]:
    """The window of each kind of layer, None for a kind that sees everything; {} if there is no window."""
    sizes = {kind: getattr(config, name, None) for kind, name in WINDOWS.items()}
    if getattr(config, "use_sliding_window", True) is False:
        sizes["sliding_attention"] = None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention"] if sizes["sliding_attention"] else []
    return {kind: sizes.get(kind) for kind in kinds} if any(map(sizes.get, kinds)) else {}
