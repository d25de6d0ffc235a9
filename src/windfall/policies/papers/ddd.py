"""Dynamic depth decoding (Brown et al. 2024), with the settings that LTD compares itself with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from windfall.core.options import option
from windfall.core.types import InputError
from windfall.policies.beam import Beam
from windfall.policies.context import Context
from windfall.policies.plan import Decision, Plan, TreeView


@dataclass
class DDD(Beam):
    """A beam that ends when its path probabilities sum to too little, which is checked at a few levels."""

    depth: int = option(12, "maximum draft passes (LTD: 12, which as a loop count would be 13)", low=1)
    checks: str = option("5,7,9", "levels after which the beam may end, with commas between")
    threshold: float = option(-0.3, "end when the log of the summed path probabilities is below this")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(level.strip().isdecimal() for level in self.checks.split(",")):
            raise InputError(f"checks must be levels with commas between, e.g. 5,7,9, not {self.checks!r}")
        self.levels = sorted({int(level) for level in self.checks.split(",")} & set(range(1, self.depth)))

    def plan(self) -> Plan:
        return replace(super().plan(), watches=("summary",), decide=self.decide, asks=self.levels)

    def decide(self, level: int, view: TreeView, ctx: Context) -> Decision:
        return Decision(view.summary(level).total >= self.threshold, self.nodes)
