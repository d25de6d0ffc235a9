"""Runs the unchanged modules of a transformers model with windfall's attention.

transformers' models call a function of `AttentionInterface`, which their configuration names. During a pass this is
`attention` in attention_function.py. It reads the KV cache along the paths of the rows, in slots or in pages, so a pass
needs no mask and no bound on the length of the text.

The masks that a pass gives to a model hold nothing. The object alone says which window a layer has: a model takes a
mask for each kind of its layers, and hands it on to the attention function.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.engine.check_records import known_result, record_result
from windfall.engine.gpu.attention_function import Asked, attending, register
from windfall.engine.gpu.forward import Pass, Paths, Unsupported, paths_of
from windfall.engine.gpu.kv_layout import KvLayout, PassCache
from windfall.engine.gpu.modules import ModulesForward
from windfall.engine.gpu.recorder import Recorder
from windfall.kernels.attention import path_attention, tree_attention
from windfall.kernels.rows import place_rows
from windfall.model.batch import Rows
from windfall.model.decoder import Decoder, attention_windows, configs_of, vocabulary_size
from windfall.model.target import TEST_WINDOW, logit_tolerance, small_tree

CHECK_ROWS = 32  # of the KV cache of a check
MAX_TREE_WIDTH = 256  # of a head for `tree_attention`: wider ones need more shared memory than a program has


class Kind(NamedTuple):
    """The window of a kind of layers; None: it has none."""

    window: int | None
    chunked: bool = False


class InterfaceForward(ModulesForward):
    """Runs a model whose layers attend through transformers' interface."""

    bucketed = False

    def __init__(self, model: Any):
        super().__init__(model)
        register()
        self._configs = configs_of(model)
        self.kinds = kinds_of(model.config.get_text_config())
        found = self._recorded()
        self.layout = KvLayout(tuple(found.layers))
        self.group = found.groups.pop() if len(found.groups) == 1 else None  # None: attention tiles would differ
        windowed = any(kind.window is not None for kind in self.kinds.values())
        self.by_paths = found.special or windowed or self.shape[2] > MAX_TREE_WIDTH
        self._any = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.get_input_embeddings().weight.device)
        if reason := self._known_reason():
            raise Unsupported(reason)

    def __call__(
        self, rows: Pass, kv: Tensor, taps: tuple[int, ...], columns: int, scored: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As `Forward` says; with `scored`, only the first `scored` rows get logits."""
        outputs, states = self._run_attending(self.model, rows, kv, taps)
        return outputs.logits[0, :scored], states

    def prefill(self, rows: Pass, kv: Tensor, taps: tuple[int, ...], columns: int) -> Tensor | None:
        states: Tensor | None = self._run_attending(self.model.base_model, rows, kv, taps)[1]
        return states

    def _run_attending(self, call: Any, rows: Pass, kv: Tensor, taps: tuple[int, ...]) -> tuple[Any, Any]:
        if self.by_paths and rows.paths is None:
            rows = rows._replace(paths=paths_of(rows.mask, rows.length))
        cache = PassCache(self.layout, kv, rows.slots, kv.shape[3])
        masks = {name: self._any.expand(1, 1, len(rows.tokens), kv.shape[3]) for name in self.kinds}
        own = CacheAttention(rows, cache, [(masks[name], kind) for name, kind in self.kinds.items()], self.by_paths)
        return self._run(partial(self._during, own, call), rows, taps, as_model_takes(masks), cache)

    def _during(self, own: CacheAttention, call: Any, **inputs: Any) -> Any:
        with attending(own, self.model, self._configs):
            return call(**inputs)

    def _recorded(self) -> Recorder:
        """What the layers keep, and what they ask of their attention, from a pass over two tokens."""
        device = self.model.get_input_embeddings().weight.device
        masks = {name: torch.ones(1, 1, 2, 2, dtype=torch.bool, device=device) for name in self.kinds}
        recorder = Recorder(self.model.config.get_text_config().num_hidden_layers, list(masks.values()))
        tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
        given = {"input_ids": tokens, "position_ids": torch.arange(2, device=device)[None], "use_cache": True}
        with torch.inference_mode(), refusing(), attending(recorder, self.model, self._configs):
            self.model(**given, attention_mask=as_model_takes(masks), past_key_values=recorder.cache)
        recorder.finish()
        return recorder

    def _known_reason(self) -> str:
        """Why the model cannot run with windfall's attention; empty if it can. The check runs once for each kind of
        model, and again after an error, which may be one of this machine."""
        found = known_result(self.model, "attention")
        if found is None:
            with refusing():
                found = self._check()
            record_result(self.model, "attention", found)
        return found

    def _check(self) -> str:
        """Compare the logits of a small tree with those under a mask. Windows are shorter than the text."""
        usual = self.kinds
        self.kinds = {name: kind._replace(window=kind.window and TEST_WINDOW) for name, kind in usual.items()}
        try:
            with torch.inference_mode():
                wanted, found = self._small_tree_masked(), self._small_tree()
        except Unsupported as unsupported:
            return str(unsupported)
        finally:
            self.kinds = usual
        gap = float((found - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-3)
        if math.isnan(gap):
            raise ValueError("its logits are not finite")
        if gap <= logit_tolerance(self.model.dtype):
            return ""
        return f"with windfall's attention its logits differ by {gap:.1%}"

    def _small_tree_masked(self) -> Tensor:
        """The logits of a small tree after a prompt, by the model's own attention."""
        decoder = Decoder(self.model)
        decoder.windows = {name: size and TEST_WINDOW for name, size in decoder.windows.items()}
        prompt, tree = small_tree(decoder.vocab_size)
        decoder.reset(1)
        decoder.extend([prompt])
        return decoder.feed([Rows(tree.tokens, len(prompt) + tree.depth, tree.mask())])[0][0].float()

    def _small_tree(self) -> Tensor:
        """The same by windfall's attention."""
        prompt, tree = small_tree(vocabulary_size(self.model))
        weight, length = self.model.get_input_embeddings().weight, len(prompt)
        kv = torch.zeros(*(2, *self.shape[:2], CHECK_ROWS, self.shape[2]), dtype=weight.dtype, device=weight.device)
        chain = torch.ones(length, length, dtype=torch.bool).tril()
        self.prefill(rows_after(0, torch.tensor(prompt), torch.arange(length), chain, True, weight.device), kv, (), 0)
        rows = rows_after(length, tree.tokens, tree.depth, tree.mask(), False, weight.device)
        return self(rows, kv, (), 0)[0].float()


class CacheAttention:
    """Attention of the rows of a pass over its KV cache."""

    def __init__(self, rows: Pass, cache: PassCache, kinds: list[tuple[Tensor, Kind]], by_paths: bool):
        self.rows, self.kinds, self.by_paths = rows, kinds, by_paths
        self.layers = [layer for layer in cache.layers if layer.part is not None]

    def attend(self, asked: Asked) -> Tensor:
        layer, kind = self._layer(asked), self._kind(asked.mask)
        keys, values = layer.part
        queries = asked.query[0].transpose(0, 1)
        queries = queries if queries.stride(2) == 1 else queries.contiguous()
        scale = queries.shape[2] ** -0.5 if asked.scale is None else asked.scale
        if queries.shape[2] < keys.shape[2]:  # values are wider; the rest of each key is 0
            queries = F.pad(queries, (0, keys.shape[2] - queries.shape[2]))
        paths, given = self.rows.paths, (queries, keys, values, self.rows.length)
        if paths is None or not (self.by_paths or paths.lineage is None or paths.pages):
            out = tree_attention(*given, self.rows.mask, scale)
        else:
            reach, lineage, pages, _ = paths
            options = kind.window, asked.cap, asked.sinks, pages
            out = path_attention(*given, reach, lineage, scale, *options, chunked=kind.chunked)
        return out[..., : asked.value.shape[3]]

    def _layer(self, asked: Asked) -> Any:
        for layer in self.layers:
            if layer.keys is asked.key and layer.values is asked.value:
                return layer
        raise Unsupported("its attention changes the keys or values of its KV cache")

    def _kind(self, mask: Any) -> Kind:
        for own, kind in self.kinds:
            if own is mask:
                return kind
        raise Unsupported("its attention changes its mask")


@contextmanager
def refusing() -> Iterator[None]:
    """Turn errors of a model's code into Unsupported."""
    try:
        yield
    except (Unsupported, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise Unsupported(f"it does not run with windfall's attention: {str(error).partition(chr(10))[0]}") from error


def kinds_of(config: Any) -> dict[str, Kind]:
    """The kinds of a model's layers by name."""
    windows = attention_windows(config)
    chunked = "chunked_attention"
    return {name: Kind(size, name == chunked) for name, size in windows.items()} or {"full_attention": Kind(None)}


def as_model_takes(masks: dict[str, Tensor]) -> Any:
    """A single mask, or a dictionary of them by the kind of layers."""
    return masks if len(masks) > 1 else next(iter(masks.values()))


def rows_after(length: int, tokens: Tensor, depth: Tensor, mask: Tensor, chain: bool, device: torch.device) -> Pass:
    """The rows of a tree, or of a chain, after a text of this length."""
    tokens, depth, mask = (x.to(device) for x in (tokens, depth, mask))
    before, count = torch.tensor([length], device=device), torch.tensor([len(tokens)], device=device)
    positions, slots, reach, lineage = place_rows(before, depth, count, None if chain else mask)
    return Pass(tokens, positions, slots, mask, before, Paths(reach, lineage))
