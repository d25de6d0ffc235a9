"""The attention function that transformers' models call during a pass on fixed buffers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from windfall.model.pass_lock import pass_lock

NAME = "windfall"  # of the attention function, in configurations


class Asked(NamedTuple):
    """What a layer asks of its attention."""

    query: Tensor  # [1, heads, n, d]
    key: Tensor  # as the cache gave it
    value: Tensor
    mask: Any
    scale: float | None
    cap: float | None
    sinks: Tensor | None  # [heads]
    others: dict[str, Any]


class Attention(Protocol):
    """What answers the layers during a pass."""

    def attend(self, asked: Asked) -> Tensor:
        """→ [n, heads, width of values]"""
        ...


class _Running(threading.local):
    attention: Attention | None = None


_running = _Running()


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function, as transformers calls it."""
    if _running.attention is None:
        raise RuntimeError("the model runs in another thread at the same time")
    asked = Asked(query, key, value, attention_mask, scaling, softcap, s_aux, {**others, "dropout": dropout})
    return _running.attention.attend(asked)[None], None


def register() -> None:
    """Make the attention function known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)


@contextmanager
def attending(own: Attention, model: Any, configs: list[Any]) -> Iterator[None]:
    """In this block, the model attends this way; `configs` are those of its parts. Other passes of it wait."""
    with pass_lock(model):
        usual = [config._attn_implementation for config in configs]
        before, _running.attention = _running.attention, own
        try:
            for config in configs:
                config._attn_implementation = NAME
            yield
        finally:
            _running.attention = before
            for config, implementation in zip(configs, usual, strict=True):
                config._attn_implementation = implementation
