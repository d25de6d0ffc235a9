"""The GPU engine on a CPU: engines, settings and comparisons of its trees."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from helpers.cli import character_tokenizer
from helpers.random_heads import BLOCKS, random_block, random_head
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.core.tree import DraftTree
from windfall.core.types import GpuOptions
from windfall.costs.acceptance import Calibrator
from windfall.costs.curves import ASSUMED
from windfall.drafters.base import Drafter
from windfall.drafters.block import BlockDrafter
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.drafters.lm import LMDrafter
from windfall.drafters.ngram import NGramDrafter
from windfall.engine.engine import Engine, Generation
from windfall.engine.gpu.cycle import plan_unsupported
from windfall.model.target import Target
from windfall.policies.base import TreePolicy
from windfall.policies.context import Context
from windfall.policies.plan import Plan

LENGTH = 14
LONG = 20  # of a text whose drafter is always right: cycles take several tokens


PRECISE = torch.float64  # random heads magnify rounding so far that float32 trees differ deep down


ON_DEVICE: dict[str, dict[str, Any]] = {
    "none": {},
    "beam": {"depth": 4, "k": 4, "nodes": 12},
    "ddd": {"depth": 6, "k": 4, "nodes": 20, "checks": "2,3", "threshold": -0.5},
    "gt": {"k": 4, "nodes": 20, "c": 0.1, "cap": 6},
    "chain": {"depth": 4},
}


LEARNING: dict[str, dict[str, Any]] = {"gammatune": {"depth": 5, "k": 4, "nodes": 20}, "auto": {}, "dynatree": {}}


WATCHING: dict[str, dict[str, Any]] = {"svip": {"depth": 5, "k": 4, "nodes": 20}}  # more in test_watching.py


SELECTIVE: dict[str, dict[str, Any]] = {"talon": {"nodes": 20, "k": 4, "children": 5, "mu": 0.01}}


ON_HOST: dict[str, dict[str, Any]] = {
    "salf": {"fill": False},
    "fixed-tree": {"nodes": 20},
    "bandit": {"arms": "beam:depth=4:k=4:nodes=12"},
    "optimal": {"nodes": 150, "beams": 150, "width": 8, "steps": 6},  # expands more than STAGED_STEP_ROWS nodes
}


SAMPLINGS: dict[str, dict[str, Any]] = {
    "warm": {"temperature": 1.0, "seed": 3},
    "nucleus": {"temperature": 0.8, "seed": 4, "top_p": 0.9},
    "penalty": {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2},
}


def plan_of(policy: TreePolicy) -> Plan | None:
    """The policy's plan, if it runs in fixed buffers."""
    plan, ctx = policy.plan(), Context(10, 64, 0.0, ASSUMED, Calibrator())
    return None if plan is None or plan_unsupported(plan, ctx) else plan


def drafter(kind: str) -> Drafter:
    if kind == "lm":
        return LMDrafter(tiny("llama", seed=1, dtype=PRECISE, num_hidden_layers=2))
    if kind == "ngram":
        return NGramDrafter()
    if kind in BLOCKS:
        return BlockDrafter(random_block(kind))
    return LMDrafter() if kind == "itself" else FeatureHeadDrafter(random_head(kind))


def engine(
    family: str,
    kind: str,
    policy: str,
    graphs: bool,
    coupled: bool = True,
    plans: bool = True,
    exact: bool = False,  # exact attention takes long on a CPU
    max_requests: int | None = None,
    kv_memory: str | None = None,
    target: Target | None = None,  # instead of a tiny one of this family
    **changes: Any,
) -> Engine:
    known = {**ON_DEVICE, **LEARNING, **WATCHING, **SELECTIVE, **ON_HOST}
    target = target or Target(tiny(family, dtype=PRECISE, **changes), character_tokenizer())
    options = GpuOptions(graphs, exact=exact, plans=plans, pages=True)
    chosen = registry.policy(policy, **known.get(policy, {}))
    return Engine(target, drafter(kind), chosen, coupled, options, max_requests=max_requests, kv_memory=kv_memory)


@cache
def plain_text(family: str, length: int = LENGTH, **sampling: Any) -> list[int]:
    """The tokens that any engine with this target writes: by the host loop, without speculation."""
    made = engine(family, "itself", "none", graphs=False)
    return made.generate(prompt(), max_new_tokens=length, eos=(), **sampling).token_ids


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    tokens = tree.tokens.tolist()
    return sorted(tuple(tokens[place] for place in tree.path(node)) for node in range(len(tree)))


def same_trees(wanted: Generation, found: Generation, deepest: int) -> None:
    """Cycle by cycle, but for the last ones: the device does not know how much room is left."""
    said = compared = 0
    for one, other in zip(wanted.steps, found.steps, strict=False):
        if len(wanted.token_ids) - said <= deepest:
            break
        assert paths(one.drafted) == paths(other.drafted)
        assert paths(one.tree) == paths(other.tree)
        assert one.draft_passes == other.draft_passes
        said, compared = said + len(one.tokens), compared + 1
    assert compared > 3


class Replayed:
    """A graph as far as a CPU can have one."""

    def __init__(self, work: Callable[[], None]):
        self.replay = work
