"""Run a transformers model with windfall's KV cache: feed rows of any tree shape, then choose the rows to keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from windfall.model.batch import Packed, Rows, pack, unpack
from windfall.model.cpu_layers import all_states
from windfall.model.grouped_attention import grouped_sdpa
from windfall.model.hidden_states import at_taps, with_states
from windfall.model.kv_cache import KVCache
from windfall.model.pass_lock import pass_lock

MAX_PREFILL_ROWS = 1024  # of one pass
MIN_SPLIT_ROWS = 128  # prompts shorter than this share one pass
MASKED_ATTENTION = ("sdpa", "eager")  # implementations that take a tree's mask; flash and flex do not
WINDOWS = {
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}  # kind of layer: config key of its size
RESERVED_TREE_ROWS = 512  # rows kept free for a tree in a cache of limited size
UNKNOWN_WINDOWS = (  # config keys of windows that the masks here do not apply
    "keep_window_size",
    "attention_window_size",
    "attn_window_size",
    "local_window_size",
    "sliding_window_size",
    "window_size",
)


class Decoder:
    """Runs the model of a target or of a language-model drafter."""

    def __init__(self, model: Any, taps: tuple[int, ...] = ()):
        self.model = model
        self.taps = taps  # hidden states to return, concatenated: see windfall.model.hidden_states
        self.config = model.config.get_text_config()
        self.windows = attention_windows(self.config)
        self.max_length = max_exact_length(self.config)
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
        return vocabulary_size(self.model)

    @property
    def embedded(self) -> int:
        """The number of token ids that the model can read; a larger id has no row in its embedding."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def context(self) -> int | None:
        """The longest sequence that the model takes, or None if its config names none.

        If the rotary factors depend on the length of a pass (LongRoPE), the length up to which they stay the same.
        """
        limits = getattr(self.config, "max_position_embeddings", None), self.max_length
        return min(filter(None, (*limits, longrope_positions(self.config))), default=None)

    def limit_to_windows(self) -> None:
        """Limit texts to the smallest window; up to this length windows hide nothing."""
        self.max_length = min(filter(None, (*self.windows.values(), self.max_length)), default=None)

    def reset(self, batch: int) -> None:
        """Drop all sequences and start this many empty ones."""
        self.cache = KVCache(self.config.num_hidden_layers, batch)
        self._staged_positions = torch.zeros(batch, 0, dtype=torch.long, device=self.device)

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    @property
    def row_bytes(self) -> int:
        """Bytes that a token takes in the KV cache; before the first pass, an estimate from the config."""
        return self.cache.row_bytes or self._estimated_row_bytes

    @cached_property
    def _estimated_row_bytes(self) -> int:
        return estimated_numbers_per_row(self.config) * self.dtype.itemsize

    @property
    def staged(self) -> int:
        return self.cache.staged

    @torch.inference_mode()
    def feed(
        self, rows: list[Rows], logits: bool = True, causal: bool = False
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """One forward over these rows, staged after the existing ones: logits [n, V] (or none), tapped states [n, H].

        `causal` says that the rows of each sequence are a chain.
        """
        packed = pack(rows, self.lengths, self.staged, self.device)
        self.cache.reserve(packed.tokens.shape[1])
        mask = self._mask(packed, causal or self._sees_all(rows))
        with pass_lock(self.model):
            scores, states = self._forward(packed, mask, logits)
        self.cache.staged += packed.tokens.shape[1]
        self._staged_positions = torch.cat([self._staged_positions, packed.positions], 1)
        hidden = None if states is None else unpack(states, rows)
        return ([] if scores is None else unpack(scores, rows)), hidden

    def _forward(self, packed: Packed, mask: Any, logits: bool) -> tuple[Tensor | None, Tensor | None]:
        """Logits [B, n, V] (or none) and tapped states [B, n, taps * H]."""
        known = all_states(self.model, packed.tokens, packed.positions, mask, self.cache)
        if known is not None:
            return (self.model.lm_head(known[-1]) if logits else None), at_taps(known, self.taps)
        with tree_attention(self.model), grouped_sdpa(self.device):
            outputs, states = with_states(
                self.model if logits else self.model.base_model,
                self.model,
                self.taps,
                input_ids=packed.tokens,
                position_ids=packed.positions,
                attention_mask=mask,
                past_key_values=self.cache,
                use_cache=True,
            )
        return (outputs.logits if logits else None), states

    @torch.inference_mode()
    def join(self, tokens: list[list[int]]) -> list[Tensor] | None:
        """Add sequences of these tokens, which run in passes of their own; returns their tapped states."""
        running = len(self.lengths)
        self.cache.append(len(tokens))
        self._staged_positions = self._staged_positions.new_zeros(len(self.lengths), 0)
        states = self.extend([*([] for _ in range(running)), *tokens])
        return None if states is None else states[running:]

    @torch.inference_mode()
    def extend(self, tokens: list[list[int]]) -> list[Tensor] | None:
        """Commit these tokens to each sequence, without logits; returns their tapped states.

        Sequences of very different numbers of new tokens run in different passes, those without any in none.
        """
        groups = similar_lengths(tokens)
        if len(groups) == 1 and len(groups[0]) == len(tokens):
            return self._extend_together(tokens)
        states = self._extend_together([[] for _ in tokens])  # empty
        for places in groups:
            with self._only(places):
                found = self._extend_together([tokens[b] for b in places])
            for b, own in zip(places, found or (), strict=False):
                assert states is not None
                states[b] = own
        return states

    @contextmanager
    def _only(self, places: list[int]) -> Iterator[None]:
        """In this block there are these sequences only; what is committed to them is kept."""
        whole, positions = self.cache, self._staged_positions
        self.cache, self._staged_positions = whole.part(places), positions[places]
        try:
            yield
            whole.put(places, self.cache)
        finally:
            self.cache, self._staged_positions = whole, positions

    def _extend_together(self, tokens: list[list[int]]) -> list[Tensor] | None:
        """`extend` in passes that all sequences share."""
        states: list[list[Tensor]] = [[] for _ in tokens]
        for start in range(0, max(map(len, tokens), default=0), MAX_PREFILL_ROWS):
            parts = [part[start : start + MAX_PREFILL_ROWS] for part in tokens]
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
        """Keep these sequences only."""
        self.cache.retain(keep)
        self._staged_positions = self._staged_positions[keep]

    def _sees_all(self, rows: list[Rows]) -> bool:
        """Whether this pass is a single row that sees every staged row: the end of a chain."""
        return len(rows) == 1 and len(rows[0].tokens) == 1 and bool(rows[0].visible.all())

    def _mask(self, packed: Packed, causal: bool) -> Any:
        """transformers' `attention_mask`: a 4-D mask, a dict with one for each kind of layer, or None.

        None, which is faster, means a causal mask; it is the same for a single row that sees everything and for chains
        in an empty cache.
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


def similar_lengths(tokens: list[list[int]]) -> list[list[int]]:
    """The places of non-empty lists, grouped so that padding at most doubles a long list; short ones go together."""
    groups: dict[int, list[int]] = {}
    for place, own in enumerate(tokens):
        if own:
            groups.setdefault((max(len(own), MIN_SPLIT_ROWS) - 1).bit_length(), []).append(place)
    return list(groups.values())


def attention_of(model: Any) -> str:
    """The attention implementation of passes over trees: the model's own if it takes any mask, else sdpa."""
    own: str = model.config._attn_implementation
    return own if own in MASKED_ATTENTION else "sdpa"


@contextmanager
def tree_attention(model: Any) -> Iterator[None]:
    """In this block the model uses an attention implementation that takes a tree's mask."""
    with pass_lock(model):
        suits = model.config._attn_implementation in MASKED_ATTENTION
        configs = [] if suits else configs_of(model)
        own = [config._attn_implementation for config in configs]
        if not suits:
            model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        with pass_lock(model):
            for config, implementation in zip(configs, own, strict=True):
                config._attn_implementation = implementation


def configs_of(model: Any) -> list[Any]:
    """The configurations of a model and its parts."""
    return [*{id(part.config): part.config for part in model.modules() if hasattr(part, "config")}.values()]


def as_given(mask: Tensor, model: Any) -> Tensor:
    """The mask in the model's form: boolean for sdpa; eager attention adds it to the scores."""
    if model.config._attn_implementation == "sdpa":
        return mask
    lowest = torch.finfo(model.dtype).min
    return torch.zeros(mask.shape, dtype=model.dtype, device=mask.device).masked_fill(~mask, lowest)


def within(kind: str, size: int, positions: Tensor, columns: Tensor) -> Tensor:
    """Whether columns [B, m] are in the window (or chunk) of rows at these positions [B, n]."""
    rows, columns = positions[:, :, None], columns[:, None]
    return rows // size == columns // size if kind == "chunked_attention" else rows - columns < size


def max_exact_length(config: Any) -> int | None:
    """The length of text up to which masks and positions alone decide what a row sees; None: no limit."""
    names = UNKNOWN_WINDOWS if getattr(config, "layer_types", None) else (*UNKNOWN_WINDOWS, "attention_chunk_size")
    sizes = [getattr(config, name, None) for name in names]
    if rows := max_plain_rows(config):
        sizes.append(max(rows - RESERVED_TREE_ROWS, 1))
    return min((size for size in sizes if isinstance(size, int) and size > 0), default=None)


def longrope_positions(config: Any) -> int | None:
    """The positions up to which LongRoPE's factors stay the same; None: unknown, or the model has no LongRoPE."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    found: int | None = rope.get("original_max_position_embeddings")
    return found or getattr(config, "original_max_position_embeddings", None)


def vocabulary_size(model: Any) -> int:
    """The number of logits. Weights of quantised layers may have another shape, and those of packed ones are decoded
    when they are read."""
    output = model.get_output_embeddings()
    size = getattr(output, "out_features", None)
    return int(output.weight.shape[0] if size is None else size)


def max_plain_rows(config: Any) -> int | None:
    """Rows of the cache before Llama 4 scales queries by their cache index, which differs in a tree; None: no limit."""
    return config.floor_scale - 1 if getattr(config, "attn_temperature_tuning", False) else None


def estimated_numbers_per_row(config: Any) -> int:
    """Numbers in the keys and values of a token in all layers, as the config says, or at most if it does not."""
    names = ("num_key_value_heads", "num_attention_heads", "head_dim")
    per_layer: int = config.hidden_size
    try:
        heads, queries, width = (getattr(config, name, None) for name in names)
    except RuntimeError:  # layers differ in one of them
        return 2 * int(config.num_hidden_layers) * per_layer
    if isinstance(heads, int) and isinstance(queries, int) and queries:
        per_layer = heads * (width or config.hidden_size // queries)
    return 2 * int(config.num_hidden_layers) * per_layer


def attention_windows(config: Any) -> dict[str, int | None]:
    """The window of each kind of layer; None for a kind without one; {} if no layer has a window."""
    sizes = {kind: getattr(config, name, None) for kind, name in WINDOWS.items()}
    if getattr(config, "use_sliding_window", True) is False:
        sizes["sliding_attention"] = None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention"] if sizes["sliding_attention"] else []
    return {kind: sizes.get(kind) for kind in kinds} if any(map(sizes.get, kinds)) else {}
