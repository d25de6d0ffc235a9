"""What a round took of the memory and of a shared budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from windfall.policies.budget import Sizes


class Use(NamedTuple):
    """What the last round took of a runner."""

    memory: float | None = None  # share of the memory for KV caches, from 0 to 1; None: unknown
    budget: Sizes | None = None  # that requests shared; None: each decided for itself
