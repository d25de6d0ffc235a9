"""Plain decoding through the same engine: one row a pass. The baseline of every comparison."""

from __future__ import annotations

from dataclasses import dataclass

from windfall.context import Context
from windfall.policies.base import TreePolicy
from windfall.records import Grow
from windfall.tree import DraftTree


@dataclass
class NoSpeculation(TreePolicy):
    """Plain decoding: never drafts."""

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        return None
