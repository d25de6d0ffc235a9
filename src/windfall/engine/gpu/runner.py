"""Single texts that stay on the device: what holds their buffers, and the loop over their cycles."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from windfall.core.types import GpuOptions, Step
from windfall.costs.online import OnlineCosts
from windfall.drafters.base import Drafter, GpuForm
from windfall.engine.gpu.cycle import Cycle, plan_key, plan_unsupported, staged_rows
from windfall.engine.gpu.drafters import ChildSampler, drafter_form, gpu_drafter
from windfall.engine.gpu.forward import Unsupported
from windfall.engine.gpu.graphs import GraphCache
from windfall.engine.gpu.host_policy import (
    DRAFT_PASS_SIZES,
    MAX_PENDING_COLUMNS,
    MAX_STAGED_NODES,
    GraphDrafter,
    GraphTarget,
)
from windfall.engine.gpu.model_guard import ModelGuard
from windfall.engine.gpu.pipeline import Pipeline
from windfall.engine.gpu.target import GpuTarget
from windfall.engine.sequence import Sequence
from windfall.model.target import Target
from windfall.policies.context import Context
from windfall.policies.plan import Plan

CALLER_BUSY_SECONDS = 2e-5  # seconds in which whoever takes a step may have found other work for the device


class GpuRunner:
    """Generates one sequence at a time on the device, for the policies, drafters and ways of sampling it knows."""

    def __init__(self, target: Target, drafter: Drafter, launch: GpuOptions):
        self.target, self.drafter, self.plans = target, drafter, launch.plans
        self.gpu_target = GpuTarget(target.model, drafter.taps, GraphCache(target.device), launch)
        form = drafter_form(drafter, target.device)
        self.drafter_form: GpuForm | None = None if isinstance(form, str) else form
        self.drafter_unsupported = form if isinstance(form, str) else ""  # why the drafter cannot work on the device
        self.cycles: dict[tuple[object, ...], Cycle] = {}  # by the plan's key
        self._host_policy_pair: tuple[GraphTarget, GraphDrafter | None] | None = None
        self._buffers_version = self.gpu_target.buffers_version  # the buffers that these belong to
        self._guard = ModelGuard(target.model)

    @classmethod
    def of(cls, target: Target, drafter: Drafter, launch: GpuOptions) -> tuple[GpuRunner | None, str]:
        """One for this pair, or why there is none."""
        try:
            return cls(target, drafter, launch), ""
        except Unsupported as reason:
            return None, str(reason)

    @property
    def outdated(self) -> bool:
        """Whether the target is no longer what this was made of."""
        return self._guard.changed

    def unsupported_reason(self, sequence: Sequence, ctx: Context) -> str:
        """Why this text cannot be generated here; nothing if it can."""
        plan, params = sequence.policy.cached_plan, sequence.params
        if plan is None or not self.plans:
            return "its policy decides on the host"
        if reason := plan_unsupported(plan, ctx):
            return reason
        if plan.passes and self.drafter_unsupported:
            return self.drafter_unsupported
        if params.reads_prefix or params.logit_bias:
            return "its sampling looks at the text so far"
        return ""

    def host_policy_pair(self, sequence: Sequence) -> tuple[GraphTarget, Drafter]:
        """Target and drafter on fixed buffers for the engine's own cycle, where a policy decides on the host."""
        gpu_target, form = self.gpu_target, self.drafter_form
        self._reserve(sequence, MAX_STAGED_NODES + DRAFT_PASS_SIZES[-1])
        if self._host_policy_pair is None:
            graph_drafter = (
                None
                if form is None
                else GraphDrafter(
                    gpu_drafter(form, gpu_target, MAX_PENDING_COLUMNS, MAX_STAGED_NODES + DRAFT_PASS_SIZES[-1])
                )
            )
            self._host_policy_pair = (GraphTarget(gpu_target), graph_drafter)
        target, graph_drafter = self._host_policy_pair
        target.params = sequence.params
        if graph_drafter is None:
            return target, self.drafter
        graph_drafter.params = sequence.params
        return target, graph_drafter

    def _reserve(self, sequence: Sequence, more: int) -> None:
        """Room for this text and more rows behind it; what was made for other buffers goes."""
        self.gpu_target.reserve(min(sequence.end, len(sequence.tokens) + sequence.params.max_new_tokens) + more)
        if self._buffers_version != self.gpu_target.buffers_version:
            self.cycles, self._host_policy_pair, self._buffers_version = {}, None, self.gpu_target.buffers_version

    @torch.inference_mode()
    def run(self, sequence: Sequence, online_costs: OnlineCosts) -> Iterator[Step]:
        """The Steps of this text; the first has the seconds of the prefill."""
        plan = sequence.policy.cached_plan
        assert plan is not None
        cycle = self._cycle(plan, sequence)
        params, dials = sequence.params, self.gpu_target.sampling
        pipeline = Pipeline(
            cycle, ChildSampler(params, sequence.dice is not None, dials, cycle.noise_buffer(params)), sequence
        )
        context = sequence.begin_cycle(online_costs.costs)
        pipeline.capture_graphs(context)
        pipeline.prefill()
        pipeline.launch(context)
        first = True
        while True:
            pipeline.launch(context)
            if plan.lookahead:
                pipeline.launch_first_passes(context)
            step, collected = pipeline.collect(), time.perf_counter()
            if first:
                step, first = replace(step, prefill_seconds=pipeline.prefill_seconds), False
            try:
                yield step
            finally:  # nobody waits for what is learnt from it
                pipeline.stream_used = time.perf_counter() - collected > CALLER_BUSY_SECONDS
                sequence.observe(step)
                record_costs(online_costs, step, plan.width, context.length)
            if step.finish:
                return
            context = sequence.begin_cycle(online_costs.costs)

    def _cycle(self, plan: Plan, sequence: Sequence) -> Cycle:
        """The plan's buffers, with room for this text."""
        gpu_target = self.gpu_target
        self._reserve(sequence, 3 * (plan.passes + 2) + staged_rows(plan))
        gpu_target.set_sampling(sequence.params)
        key = plan_key(plan)
        if key not in self.cycles:
            self.cycles[key] = Cycle(plan, self.drafter_form, gpu_target)
        cycle = self.cycles[key]
        cycle.plan = plan
        return cycle


def record_costs(online_costs: OnlineCosts, step: Step, width: int, length: int) -> None:
    """Learn from a cycle what its passes take; but not from one in which some were recorded."""
    if online_costs.learns and not step.recorded:
        if step.draft_passes:
            online_costs.record_drafts([0, *[width] * (step.draft_passes - 1)], step.seconds.draft)
        online_costs.record_verify(len(step.tree), length, step.seconds.verify)
