"""Policies in a form that the device can follow. A test holds each to the policy it stands for."""

from __future__ import annotations

from typing import Any

from windfall.engine.gpu.plans.auto import AutoPlan
from windfall.engine.gpu.plans.base import Plan
from windfall.engine.gpu.plans.beams import BeamPlan, ChainPlan, DDDPlan, GammaTunePlan, GTPlan, NonePlan
from windfall.engine.gpu.plans.best_first import SalfPlan
from windfall.engine.gpu.plans.gated import DynaTreePlan, FixedTreePlan
from windfall.engine.gpu.plans.ltd import LTDPlan
from windfall.engine.gpu.plans.shapes import ShapePlan
from windfall.engine.gpu.plans.watched import C2TPlan, DiscoPlan, SpecDecPlan, SVIPPlan
from windfall.engine.gpu.target import MOST as MOST_ROWS
from windfall.kernels.top import MOST as MOST_CHILDREN
from windfall.policies.auto import Auto
from windfall.policies.base import TreePolicy
from windfall.policies.beam import Beam
from windfall.policies.chain import Chain
from windfall.policies.none import NoSpeculation
from windfall.policies.papers.c2t import C2T
from windfall.policies.papers.ddd import DDD
from windfall.policies.papers.disco import Disco
from windfall.policies.papers.dynatree import DynaTree
from windfall.policies.papers.fixed_tree import FixedTree
from windfall.policies.papers.gammatune import GammaTune
from windfall.policies.papers.gt import GT
from windfall.policies.papers.gt_static import GTStatic
from windfall.policies.papers.ltd import LTD
from windfall.policies.papers.salf import Salf
from windfall.policies.papers.sequoia import Sequoia
from windfall.policies.papers.specdecpp import SpecDecPlusPlus
from windfall.policies.papers.specinfer import SpecInfer
from windfall.policies.papers.svip import SVIP
from windfall.policies.static import Static

MOST_PASSES, MOST_NODES = 32, 4096


PLANS: dict[type[TreePolicy], Any] = {  # its Plan, made of the policy alone
    NoSpeculation: NonePlan,
    Chain: ChainPlan,
    Beam: BeamPlan,
    DDD: DDDPlan,
    GammaTune: GammaTunePlan,
    GT: GTPlan,
    SVIP: SVIPPlan,
    Disco: DiscoPlan,
    Salf: SalfPlan,
    FixedTree: FixedTreePlan,
    DynaTree: DynaTreePlan,
    SpecDecPlusPlus: SpecDecPlan,
    C2T: C2TPlan,
    Static: ShapePlan,
    SpecInfer: ShapePlan,
    Sequoia: ShapePlan,
    GTStatic: ShapePlan,
    LTD: LTDPlan,
    Auto: AutoPlan,
}


def plan_of(policy: TreePolicy) -> Plan | None:
    """The plan that stands for this policy, where there is one that fits fixed buffers."""
    made = PLANS.get(type(policy))
    if made is None or not made.stands_for(policy):
        return None
    plan: Plan = made(policy)
    fits = plan.rows <= MOST_ROWS and plan.k <= MOST_CHILDREN and plan.passes <= MOST_PASSES
    return plan if fits and plan.capacity <= MOST_NODES else None
