"""Many servers on many machines, with Ray Serve: `serve run windfall.ray:app` or `windfall.ray:build NAME=VALUE …`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from windfall.core.errors import InputError

if find_spec("ray") is None or find_spec("fastapi") is None:
    raise InputError("windfall.ray needs Ray Serve; run: pip install windfall[ray]")

from windfall.ray.application import build as build

if TYPE_CHECKING:
    from ray.serve import Application

    app: Application


def __getattr__(name: str) -> Any:
    """`app`, with the options of the environment, which are read when it is first used."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return build({})
