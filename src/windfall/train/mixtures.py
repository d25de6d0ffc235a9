"""The losses that distil the target into a drafter, by name, and mixtures of them. It imports no torch."""

from __future__ import annotations

import math

from windfall.core.errors import InputError

LOSSES = ("kl", "tv", "lk", "match", "coupled")  # functions of `row_losses`
EXAMPLE = "coupled:0.5,lk:0.5"
Mixture = tuple[tuple[str, float], ...]  # names and weights; their weighted losses are added
KL: Mixture = (("kl", 1.0),)


def parse_mixture(text: str) -> Mixture:
    """'lk' or 'coupled:0.5,lk:0.5' → names and weights. A weight that is left out is 1."""
    parts = [part.strip().partition(":") for part in text.split(",")]
    found: dict[str, float] = {}
    for name, colon, weight in parts:
        name = name.strip()
        if name not in LOSSES:
            raise InputError(f"there is no loss '{name}'; choose from {', '.join(LOSSES)}, or mix them: {EXAMPLE}")
        if name in found:
            raise InputError(f"the loss '{name}' occurs twice in '{text}'")
        found[name] = _weight(weight, text) if colon else 1.0
    return tuple(found.items())


def _weight(given: str, text: str) -> float:
    try:
        weight = float(given)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise InputError(f"write a mixture of losses as names and weights above 0, for example {EXAMPLE}, not '{text}'")
    return weight


def without_kl(mixture: Mixture, scale: float = 1.0) -> tuple[float, Mixture]:
    """The weight of `kl`, and the other losses with their weights, all multiplied by `scale`."""
    others = tuple((name, scale * weight) for name, weight in mixture if name != "kl")
    return scale * dict(mixture).get("kl", 0.0), others
