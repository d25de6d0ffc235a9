"""Names of policies and drafters, loaded when asked for. Third parties add theirs through entry points."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any

from windfall import options
from windfall.records import InputError

POLICIES = {
    "none": "windfall.policies.none:NoSpeculation",
    "chain": "windfall.policies.chain:Chain",
    "fixed-tree": "windfall.policies.fixed_tree:FixedTree",
    "beam": "windfall.policies.beam:Beam",
}
DRAFTERS = {
    "ngram": "windfall.drafters.ngram:NGramDrafter",
    "self": "windfall.drafters.self_skip:SelfDrafter",
    "lm": "windfall.drafters.lm:LMDrafter",
}
GROUPS = {"policy": "windfall.policies", "drafter": "windfall.drafters"}  # entry-point groups


def policies() -> list[str]:
    return list(_table("policy"))


def drafters() -> list[str]:
    return list(_table("drafter"))


def policy_class(name: str) -> type:
    return _find("policy", name)


def drafter_class(name: str) -> type:
    return _find("drafter", name)


def policy(name: str, /, **settings: Any) -> Any:
    """A policy by name, e.g. `policy("beam", depth=4)`."""
    return options.build(policy_class(name), settings, f"policy {name}")


def drafter(name: str, /, **settings: Any) -> Any:
    """A drafter by name, e.g. `drafter("ngram", min_match=3)`."""
    return options.build(drafter_class(name), settings, f"drafter {name}")


def _table(kind: str) -> dict[str, str]:
    own = POLICIES if kind == "policy" else DRAFTERS
    return own | {e.name: e.value for e in entry_points(group=GROUPS[kind]) if e.name not in own}


def _find(kind: str, name: str) -> type:
    table = _table(kind)
    if name not in table:
        raise InputError(f"there is no {kind} '{name}'; choose from {', '.join(table)}")
    module, _, attribute = table[name].partition(":")
    found: type = getattr(importlib.import_module(module), attribute)
    return found
