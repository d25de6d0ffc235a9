"""What a policy may know besides the tree: the length of the text, the cost of passes, the chance of acceptance."""

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
    costs: Costs  # of draft and verify passes on this machine
    calibrator: Calibrator  # acceptance chances of drafted tokens
    online_costs: OnlineCosts | None = None  # corrects the costs while generating; None: they are fixed
    shift: float = 0.0  # this request's correction of its acceptance chances, in log-odds
    requests: int = 1  # requests that share the passes of this round and its budget
