"""The training objectives of draft heads, by name. An objective's module is imported when it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from windfall.core import options
from windfall.core.types import InputError

if TYPE_CHECKING:
    from windfall.train.objectives.base import Objective

OBJECTIVES = {
    "ttt": "windfall.train.objectives.ttt:TrainingTimeTest",
    "eagle": "windfall.train.objectives.eagle:EagleLoss",
    "hass": "windfall.train.objectives.hass:Harmonized",
    "talf": "windfall.train.objectives.talf:TreeAware",
    "griffin": "windfall.train.objectives.griffin:TokenAligned",
    "block": "windfall.train.objectives.block:BlockLoss",
    "medusa": "windfall.train.objectives.medusa:MedusaLoss",
    "hydra": "windfall.train.objectives.hydra:HydraLoss",
}


def objective(name: str, /, **settings: Any) -> Objective:
    """A training objective by name, e.g. `objective("ttt", steps=5)`."""
    if name not in OBJECTIVES:
        raise InputError(f"there is no training method '{name}'; choose from {', '.join(OBJECTIVES)}")
    module, _, attribute = OBJECTIVES[name].partition(":")
    found: Objective = options.build(getattr(importlib.import_module(module), attribute), settings, f"method {name}")
    return found
