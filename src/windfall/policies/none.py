"""Plain decoding through the same engine: one row a pass. The baseline of every comparison."""

from __future__ import annotations

from dataclasses import dataclass

from windfall.core.tree import DraftTree
from windfall.core.types import Grow
from windfall.policies.base import TreePolicy
from windfall.policies.context import Context


@dataclass
class NoSpeculation(TreePolicy):
    """Plain decoding: never drafts."""

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        return None
