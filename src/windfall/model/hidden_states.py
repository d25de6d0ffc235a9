"""The hidden states of a transformers model by layer boundary.

Tap k >= 0 is the residual stream after k layers: with n layers, tap n is the input of the final norm. Tap -1 is the
output of that norm, which the vocabulary head reads; -2 is the same state as n - 1, and so on. transformers returns all
of these states except tap n: its `hidden_states` hold the output of the final norm there. A hook captures that state.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from windfall.core.errors import InputError


def layer_count(model: Any) -> int:
    return int(model.config.get_text_config().num_hidden_layers)


def boundary(tap: int, layers: int) -> int:
    """-1 for the input of the vocabulary head, else the number of layers before the state."""
    return tap if tap >= -1 else layers + 1 + tap


def with_states(call: Any, model: Any, taps: tuple[int, ...], **inputs: Any) -> tuple[Any, Tensor | None]:
    """Call `call` (the model, a compiled form or its base model): its outputs, and the states at `taps`, concatenated,
    [B, n, taps * H]."""
    if not taps:
        return call(**inputs), None
    layers = layer_count(model)
    places = [boundary(tap, layers) for tap in taps]
    kept = last_residual(model) if layers in places else None
    if kept is None:
        outputs = call(**inputs, output_hidden_states=True)
    else:
        outputs, residual = kept.during(call, **inputs, output_hidden_states=True)
    states = [residual if place == layers else outputs.hidden_states[place] for place in places]
    return outputs, torch.cat(states, -1)


def at_taps(states: tuple[Tensor, ...], taps: tuple[int, ...]) -> Tensor | None:
    """The states at `taps`, concatenated, of those at all boundaries and after the final norm."""
    layers = len(states) - 2
    return torch.cat([states[boundary(tap, layers)] for tap in taps], -1) if taps else None


class Residual:
    """A hook that captures the residual stream after the last layer during `during`.

    It is registered once and stays, because compiled models are traced with it.
    """

    def __init__(self) -> None:
        self.active = False
        self.state: Tensor | None = None

    def during(self, call: Any, **inputs: Any) -> tuple[Any, Tensor]:
        self.active = True
        try:
            outputs = call(**inputs)
            state = self.state
        finally:
            self.active, self.state = False, None
        if state is None:
            raise RuntimeError("the state after the last layer was not seen: the model has changed since it was loaded")
        return outputs, state

    def before(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        """Hook on the module that reads the state."""
        if self.active:
            self.state = given[0]

    def after(self, module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        """Hook on the last layer, if no module reads its output directly."""
        if self.active:
            self.state = _first(output)


_found: WeakKeyDictionary[nn.Module, Residual] = WeakKeyDictionary()


def last_residual(model: Any) -> Residual:
    """The hook that captures this model's input of the final norm; an InputError if it cannot be found."""
    if model not in _found:
        layer, reader = _locate(model)
        found = Residual()
        if reader is not None:  # layers may be compiled one by one, the module after them is not
            reader.register_forward_pre_hook(found.before)
        else:
            layer.register_forward_hook(found.after)
        _found[model] = found
    return _found[model]


@torch.no_grad()
def _locate(model: Any) -> tuple[nn.Module, nn.Module | None]:
    """The last layer and the module that reads its output, found by a pass over two tokens."""
    base, count = model.base_model, layer_count(model)
    lasts = {
        stack[-1]: None for stack in base.modules() if isinstance(stack, nn.ModuleList) and len(stack) == count > 0
    }
    inputs: dict[nn.Module, Tensor] = {}
    outputs: dict[nn.Module, Tensor] = {}
    readers: dict[nn.Module, nn.Module] = {}

    def enter(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        state = given[0] if given else named.get("hidden_states")
        if module in lasts and isinstance(state, Tensor):
            inputs[module] = state
        for layer, output in outputs.items():
            if given and given[0] is output:
                readers.setdefault(layer, module)

    def leave(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        if isinstance(first := _first(output), Tensor):
            outputs[module] = first

    handles = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in base.modules()]
    handles += [layer.register_forward_hook(leave) for layer in lasts]
    try:
        tokens = torch.zeros(1, 2, dtype=torch.long, device=model.get_input_embeddings().weight.device)
        given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "use_cache": False}
        states = base(**given, output_hidden_states=True).hidden_states
    finally:
        for handle in handles:
            handle.remove()
    for layer, state in outputs.items():
        read = inputs.get(layer)
        if read is None or read.dim() != 3 or read.shape != state.shape or len(states) != count + 1:
            continue
        if torch.equal(read, states[count - 1]):
            return layer, readers.get(layer)
    raise InputError(f"{type(model).__name__} does not show the state between its last layer and its final norm")


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | list) else output
