"""What a policy may know besides the tree: where the text stands, what passes cost, what drafted tokens are worth."""

from __future__ import annotations

from typing import NamedTuple

from windfall.costs.acceptance import Calibrator
from windfall.costs.curves import Costs
from windfall.costs.online import OnlineCosts


class Context(NamedTuple):
    """What a policy may know besides the tree."""

    length: int  # committed tokens, the root included
    room: int  # tokens that may still be emitted
    temperature: float
    costs: Costs  # what this machine's passes take
    calibrator: Calibrator  # what drafted tokens are worth
    online_costs: OnlineCosts | None = None  # what keeps the costs right, where they are not just given
