"""windfall: any Hugging Face causal language model, faster, word for word the same."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "load": "windfall.loading",
    "Engine": "windfall.engine",
    "Generation": "windfall.engine",
    "custom_generate": "windfall.hf_generate",
    "DraftTree": "windfall.tree",
    "Drafter": "windfall.drafters.base",
    "TreePolicy": "windfall.policies.base",
    "option": "windfall.options",
    "SamplingParams": "windfall.records",
    "Launch": "windfall.records",
    "Stats": "windfall.metrics",
    "Stream": "windfall.engine",
    "Step": "windfall.records",
    "InputError": "windfall.records",
}
__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from windfall.drafters.base import Drafter as Drafter
    from windfall.engine import Engine as Engine
    from windfall.engine import Generation as Generation
    from windfall.engine import Stream as Stream
    from windfall.hf_generate import custom_generate as custom_generate
    from windfall.loading import load as load
    from windfall.metrics import Stats as Stats
    from windfall.options import option as option
    from windfall.policies.base import TreePolicy as TreePolicy
    from windfall.records import InputError as InputError
    from windfall.records import Launch as Launch
    from windfall.records import SamplingParams as SamplingParams
    from windfall.records import Step as Step
    from windfall.tree import DraftTree as DraftTree


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when something is used, so that `windfall --help` answers at once."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'windfall' has no attribute '{name}'")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
