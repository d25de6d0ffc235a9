"""Whether a model is still what it was when its forward was made: somebody may load other weights into it, move it, or
add a hook or an adapter."""

from __future__ import annotations

from itertools import chain, repeat
from operator import attrgetter
from typing import Any

from torch import Tensor, nn


class ModelGuard:
    """A model's modules, what takes part in their forward, and where their weights lie. New numbers in the same place
    do not break it: whoever reads the weights reads those. A look takes the host about 0.2 ms for a few hundred
    modules."""

    def __init__(self, model: nn.Module):
        self._parts = [vars(module) for module in model.modules()]
        self._children, self._weights, *self._hooks = (
            [part[name] for part in self._parts]
            for name in ("_modules", "_parameters", "_forward_hooks", "_forward_pre_hooks")
        )
        self._made = self._look()

    @property
    def changed(self) -> bool:
        return self._look() != self._made

    def _look(self) -> list[Any]:
        weights = [weight for weight in _values(self._weights) if weight is not None]
        plain = {*map(type, weights)} <= {nn.Parameter}  # those made of others may lie nowhere
        return [
            list(map(id, _values(self._children))),
            [id(hook) for hook in chain(*map(_values, self._hooks)) if is_foreign_hook(hook)],
            list(map(dict.get, self._parts, repeat("forward"))),
            list(map(Tensor.data_ptr if plain else id, weights)),
            list(map(attrgetter("dtype"), weights)),
        ]


def is_foreign_hook(hook: Any) -> bool:
    """Whether it is neither transformers' nor windfall's own: those only record states and change nothing."""
    return not str(getattr(hook, "__module__", "")).startswith(("transformers.", "windfall."))


def _values(owners: list[dict[str, Any]]) -> chain[Any]:
    return chain.from_iterable(map(dict.values, owners))
