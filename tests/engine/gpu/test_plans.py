"""Plans on fixed buffers, in the form that runs on a CPU, against the same plans interpreted on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from helpers.gpu import PRECISE, drafter, paths
from helpers.tiny import prompt, tiny
from windfall import TreePolicy, option, registry
from windfall.core.types import GpuOptions
from windfall.engine.engine import Engine, Generation
from windfall.model.target import Target
from windfall.policies.context import Context
from windfall.policies.plan import Decision, Plan, TreeView

LENGTH = 14
LONG = 20  # of a text whose drafter is always right: cycles take several tokens

POLICIES: dict[str, dict[str, Any]] = {
    "talon": {"nodes": 20, "k": 4, "children": 6},
    "talon:gate": {"nodes": 24, "k": 3, "children": 4, "mu": 0.2, "init_layers": 0, "cap": 5},
    "talon:layers": {"nodes": 40, "k": 5, "children": 5, "mu": 0.01, "init_layers": 2},
    "opt-tree": {"nodes": 16, "k": 5, "threshold": 0.05},
    "opt-tree:literal": {"nodes": 16, "k": 5, "threshold": 0.05, "literal": True},
    "optimal": {"nodes": 20, "beams": 8, "width": 5, "steps": 6},
    "optimal:whole": {"nodes": 12, "beams": 12, "width": 12, "steps": 8, "decay": 1.0},
    "salf": {"nodes": 20, "width": 4, "k": 5, "th": 0.2},
    "salf:shallow": {"nodes": 20, "width": 4, "k": 5, "th": 0.0, "max_depth": 3, "cap": 8},
    "gt:each": {"k": 4, "nodes": 20, "c": 0.1, "cap": 6, "each": True},
    "gt:last": {"k": 4, "nodes": 20, "c": 0.1, "cap": 6, "count_last": True},
    "chain:confidence": {"depth": 4, "confidence": 0.05},
}


@dataclass
class LikelyBeam(TreePolicy):
    """A policy that the package does not know: a beam that ends when its paths are unlikely."""

    depth: int = option(5, "draft passes at the most", low=1)
    k: int = option(3, "beam width", low=1)
    least: float = option(-1.0, "end when the log of the summed path probabilities is below this")

    def plan(self) -> Plan:
        return Plan(passes=self.depth, width=self.k, k=self.k, rows=12, watches=("summary",), decide=self.decide)

    def decide(self, level: int, view: TreeView, ctx: Context) -> Decision:
        return Decision(view.summary(level).total >= self.least, 12)


def both(policy: TreePolicy, kind: str, **sampling: Any) -> tuple[Generation, Generation]:
    """The same text on the host and on fixed buffers."""
    target = Target(tiny("llama", dtype=PRECISE, num_hidden_layers=4))
    made = [
        Engine(target, drafter(kind), policy, gpu_options=GpuOptions(graphs, exact=False)) for graphs in (False, True)
    ]
    length = LONG if kind == "itself" else LENGTH
    host, device = (each.generate(prompt(), max_new_tokens=length, eos=(), **sampling) for each in made)
    assert made[1].fallback == ""
    return host, device


def check_trees(host: Generation, device: Generation, deepest: int) -> None:
    """Cycle by cycle, except for the last ones: the device does not know how much room is left."""
    assert host.token_ids == device.token_ids
    written = compared = 0
    for one, other in zip(host.steps, device.steps, strict=False):
        if len(host.token_ids) - written <= deepest:
            break
        assert paths(one.tree) == paths(other.tree)
        assert one.draft_passes == other.draft_passes
        written, compared = written + len(one.tokens), compared + 1
    assert compared > 2


@pytest.mark.parametrize("kind", ["eagle3-pruned", "itself"])
@pytest.mark.parametrize("name", POLICIES)
def test_device_and_host_draft_the_same_trees(name: str, kind: str) -> None:
    check_trees(*both(registry.policy(name.split(":")[0], **POLICIES[name]), kind), 8)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_policy_from_outside_reaches_the_device(temperature: float) -> None:
    host, device = both(LikelyBeam(), "itself", temperature=temperature, seed=4)
    check_trees(host, device, 5)
    assert len({step.draft_passes for step in device.steps}) > 1, "its decision ended some cycles early"
