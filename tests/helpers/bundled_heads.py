"""A tiny model for which a draft head comes with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.random_heads import random_head
from helpers.tiny import tiny
from windfall.checkpoints import bundled
from windfall.heads.fitting import fit
from windfall.heads.formats import write
from windfall.model.target import Target

LAYERS = 4  # enough for the taps of the head


def bundle_a_head(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model for which the only bundled head, in this folder, was made."""
    model = tiny(num_hidden_layers=LAYERS)
    target = Target(model)
    monkeypatch.setattr(bundled, "FOLDER", folder)
    write(fit(random_head("eagle3-pruned"), target), folder / "own", dtype=torch.float32, light=True, target=target)
    return model
