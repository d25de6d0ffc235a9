"""Detects changes to a model after its forward was built: new weights, another device, a hook, another adapter."""

from __future__ import annotations

from itertools import chain, repeat
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

KNOWN = ("torch.", "transformers.", "windfall.")  # packages whose modules have no settings that change


class ModelGuard:
    """Remembers a model's modules, hooks, the addresses and dtypes of its weights, and settings of other libraries.

    In-place weight updates are fine: the graphs read the same memory. A whole check takes about 0.3 ms for a few
    hundred modules. `moved` takes a tenth of that, and is enough before graphs are launched: as long as it is False,
    they read memory that still belongs to the weights.
    """

    def __init__(self, model: nn.Module):
        self._parts = [vars(module) for module in model.modules()]
        self._children, self._weights, *self._hooks = (
            [part[name] for part in self._parts]
            for name in ("_modules", "_parameters", "_forward_hooks", "_forward_pre_hooks")
        )
        foreign = (module for module in model.modules() if not type(module).__module__.startswith(KNOWN))
        self._settings = [vars(module) for module in foreign]
        # keeps their memory, even if the model gets others; parameters of other classes may have no address
        self._tensors = [weight for weight in model.parameters() if type(weight) is nn.Parameter]
        self._first, self._addresses = self._state(), self._places()

    @property
    def changed(self) -> bool:
        """Whether the model is no longer what it was when this guard was made."""
        return self._state() != self._first

    @property
    def moved(self) -> bool:
        """Whether the weights that the model had lie elsewhere now."""
        return self._places() != self._addresses

    def _places(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._tensors))

    def _state(self) -> list[Any]:
        weights = [weight for weight in _values(self._weights) if weight is not None]
        plain = {*map(type, weights)} <= {nn.Parameter}  # parameters of other classes may have no address
        return [
            list(map(id, _values(self._children))),
            [id(hook) for hook in chain(*map(_values, self._hooks)) if is_foreign_hook(hook)],
            list(map(dict.get, self._parts, repeat("forward"))),
            list(map(Tensor.data_ptr if plain else id, weights)),
            list(map(attrgetter("dtype"), weights)),
            list(map(_settings, self._settings)),
        ]


def _settings(part: dict[str, Any]) -> list[object]:
    """The flags, names and factors among a module's attributes, such as which adapters are on and how strong."""
    found: list[object] = []
    for value in part.values():
        if type(value) in (bool, str):
            found.append(value)
        elif type(value) in (list, tuple, dict):
            inner = [*value, *value.values()] if isinstance(value, dict) else [*value]
            found.append([each for each in inner if type(each) in (bool, str, float)])
    return found


def is_foreign_hook(hook: Any) -> bool:
    """Whether a hook is neither of transformers nor of windfall, whose hooks only read states."""
    return not str(getattr(hook, "__module__", "")).startswith(("transformers.", "windfall."))


def _values(owners: list[dict[str, Any]]) -> chain[Any]:
    return chain.from_iterable(map(dict.values, owners))
