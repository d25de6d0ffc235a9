"""windfall: faster text generation from Hugging Face causal language models, with exactly the same text."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"  # the only place: pyproject.toml reads it from here

_PUBLIC = {
    "load": "windfall.engine.loading",
    "Engine": "windfall.engine.engine",
    "Generation": "windfall.engine.generation",
    "Handle": "windfall.engine.request",
    "custom_generate": "windfall.engine.transformers_generate",
    "DraftTree": "windfall.core.tree",
    "Drafter": "windfall.drafters.base",
    "TreePolicy": "windfall.policies.base",
    "option": "windfall.core.options",
    "SamplingParams": "windfall.core.types",
    "GpuOptions": "windfall.core.types",
    "Stats": "windfall.core.stats",
    "Stream": "windfall.engine.engine",
    "Step": "windfall.core.types",
    "InputError": "windfall.core.types",
}
__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from windfall.core.options import option as option
    from windfall.core.stats import Stats as Stats
    from windfall.core.tree import DraftTree as DraftTree
    from windfall.core.types import GpuOptions as GpuOptions
    from windfall.core.types import InputError as InputError
    from windfall.core.types import SamplingParams as SamplingParams
    from windfall.core.types import Step as Step
    from windfall.drafters.base import Drafter as Drafter
    from windfall.engine.engine import Engine as Engine
    from windfall.engine.engine import Stream as Stream
    from windfall.engine.generation import Generation as Generation
    from windfall.engine.loading import load as load
    from windfall.engine.request import Handle as Handle
    from windfall.engine.transformers_generate import custom_generate as custom_generate
    from windfall.policies.base import TreePolicy as TreePolicy

# A thread of torch that waits for another one checks this many times before it sleeps, for about 0.1 ms on x86. libgomp
# checks 300,000 times by default: if another program uses the CPU, the waiting thread then keeps the other one from
# running. The setting is read when torch is imported. Other processors were not measured and keep the default.
SPINS = "2000"
if sys.platform == "linux" and os.uname().machine == "x86_64" and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when a name is used, so that `windfall --help` is fast."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'windfall' has no attribute '{name}'")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
