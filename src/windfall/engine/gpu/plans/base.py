"""What a plan is: sizes that are fixed, a rule for what comes next, and what the host must see of a tree to decide
whether to go on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from windfall.engine.gpu.sieve import Sieve
from windfall.engine.gpu.transfer import PackedBuffer
from windfall.engine.gpu.view import TreeView
from windfall.policies.base import TreePolicy
from windfall.policies.context import Context


class Plan:
    """`passes` at the most, each over `width` nodes with `k` children, and `rows` to verify at the most."""

    rule = "beam"  # or another of kernels/grow.py
    watches: tuple[str, ...] = ()  # what the host sees after a draft pass: arrays of seen.TreeView
    gated = False  # whether children out of the bounds that `brief` brings are left out
    foresees = False  # whether `goes_on` is about the pass after the next, and cycles begin before the last is read

    def __init__(self, policy: TreePolicy, passes: int, width: int, k: int, rows: int):
        self.policy, self.passes, self.width, self.k, self.rows = policy, passes, width, k, rows

    @classmethod
    def stands_for(cls, policy: Any) -> bool:
        """Whether it does so for a policy with these settings."""
        return True

    @property
    def key(self) -> tuple[object, ...]:
        """What recorded work depends on."""
        return (self.rule, self.watches, self.gated, self.passes, self.width, self.k, self.rows)

    def places(self, passes: int) -> int:
        """Of the nodes that so many passes draft, the root counted."""
        return 1 + self.k * (1 + self.width * max(passes - 1, 0))

    @property
    def nodes(self) -> int:
        """The same for all passes."""
        return self.places(self.passes)

    @property
    def capacity(self) -> int:
        """Places that the tree's arrays have: those of a pass more."""
        return self.nodes + self.width * self.k

    def sieve(self, device: torch.device) -> Sieve | None:
        """What decides which of the drafted nodes may be chosen at all; None: all may."""
        return None

    def suits(self, ctx: Context) -> bool:
        """Whether the plan does as the policy would, at these costs."""
        return True

    def brief(self, terms: PackedBuffer, ctx: Context) -> None:
        """Bring the device what the rule needs in this cycle."""

    def settled(self, ctx: Context) -> int | None:
        """How many passes this cycle takes, where that is known before it begins."""
        return self.passes

    def least(self) -> int:
        """Passes before the host asks."""
        return 1

    def asks(self, level: int) -> bool:
        """Whether the plan must see what so many passes drafted; else drafting goes on up to the last pass."""
        return True

    def goes_on(self, level: int, seen: TreeView, ctx: Context) -> bool:
        """Whether another pass follows, after `level` of them. The text may be a cycle longer than `ctx` knows."""
        return level < self.passes

    def verified(self, level: int) -> tuple[int, int]:
        """Rows to verify after this many passes, and how many of the passes brought the nodes they are chosen from."""
        return self.rows, level

    def openings(self, settled: int | None) -> Iterable[int]:
        """Passes that `settled`, which says this now, may say; or `least`, where nothing is settled."""
        return (self.least() if settled is None else settled,)

    def sizes(self) -> Iterable[int]:
        """Rows that `verified` may say."""
        return (self.rows,)
