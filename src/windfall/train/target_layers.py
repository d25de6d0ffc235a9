"""Layers of the target from which drafters start."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from windfall.core.errors import InputError

EMBEDDING = "embed_tokens.weight"  # name in the families of `borrowed_embeddings`


def spread_layers(count: int, layers: int) -> list[int]:
    """`count` of the target's `layers`, evenly from the first to the third from last; three of 30: 0, 14, 27."""
    last = max(0, layers - 3)
    return [round(last * i / max(1, count - 1)) for i in range(count)]


def check_intermediate(width: int | None, config: Any) -> None:
    """Refuse more feed-forward neurons than the target's layers have."""
    if width is not None and not 1 <= width <= config.intermediate_size:
        raise InputError(f"--intermediate must be between 1 and {config.intermediate_size}, not {width}")


def cut_tensors(given: dict[str, Tensor], layers: list[int], intermediate: int | None) -> dict[str, Tensor]:
    """The weights of these layers under their new numbers, and those outside layers except the embedding; in fp32."""
    taken = {name: tensor for name, tensor in given.items() if not name.startswith("layers.") and name != EMBEDDING}
    for place, layer in enumerate(layers):
        prefix = f"layers.{layer}."
        own = {name.removeprefix(prefix): tensor for name, tensor in given.items() if name.startswith(prefix)}
        own = own if intermediate is None else _narrow(own, intermediate)
        taken |= {f"layers.{place}.{name}": tensor for name, tensor in own.items()}
    return {name: tensor.detach().float().clone() for name, tensor in taken.items()}


def _narrow(layer: dict[str, Tensor], width: int) -> dict[str, Tensor]:
    """The layer with only the feed-forward neurons whose weights have the largest product of norms."""
    gate, up, down = (layer[f"mlp.{name}_proj.weight"].float() for name in ("gate", "up", "down"))
    kept = (gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)).topk(width).indices.sort().values
    rows = {name: tensor[kept] for name, tensor in layer.items() if name.startswith(("mlp.gate_proj.", "mlp.up_proj."))}
    return layer | rows | {"mlp.down_proj.weight": layer["mlp.down_proj.weight"][:, kept]}
