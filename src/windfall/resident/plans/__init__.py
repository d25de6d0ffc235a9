"""Policies in a form that the device can follow. A test holds each to the policy it stands for."""

from __future__ import annotations

from typing import Any

from windfall.kernels.top import MOST as MOST_CHILDREN
from windfall.policies.auto import Auto
from windfall.policies.base import TreePolicy
from windfall.policies.beam import Beam
from windfall.policies.c2t import C2T
from windfall.policies.chain import Chain
from windfall.policies.ddd import DDD
from windfall.policies.disco import Disco
from windfall.policies.dynatree import DynaTree
from windfall.policies.fixed_tree import FixedTree
from windfall.policies.gammatune import GammaTune
from windfall.policies.gt import GT
from windfall.policies.gt_static import GTStatic
from windfall.policies.ltd import LTD
from windfall.policies.none import NoSpeculation
from windfall.policies.salf import Salf
from windfall.policies.sequoia import Sequoia
from windfall.policies.specdecpp import SpecDecPlusPlus
from windfall.policies.specinfer import SpecInfer
from windfall.policies.static import Static
from windfall.policies.svip import SVIP
from windfall.resident.judge import MOST as MOST_ROWS
from windfall.resident.plans.auto import AutoPlan
from windfall.resident.plans.base import Plan
from windfall.resident.plans.beams import BeamPlan, ChainPlan, DDDPlan, GammaTunePlan, GTPlan, NonePlan
from windfall.resident.plans.best_first import SalfPlan
from windfall.resident.plans.gated import DynaTreePlan, FixedTreePlan
from windfall.resident.plans.ltd import LTDPlan
from windfall.resident.plans.shapes import ShapePlan
from windfall.resident.plans.watched import C2TPlan, DiscoPlan, SpecDecPlan, SVIPPlan

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
