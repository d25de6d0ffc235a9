"""Decodes single requests on the device: owns the buffers, and loops over the cycles."""

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

CALLER_BUSY_SECONDS = 2e-5  # a caller that holds a Step for longer may have used the device


class Outdated(Exception):
    """The target has changed since the runner was built; a new one must be built."""


class GpuRunner:
    """Decodes one sequence at a time on the device, if its policy, drafter and sampling can run in fixed buffers."""

    def __init__(self, target: Target, drafter: Drafter, options: GpuOptions):
        self.target, self.drafter, self.plans = target, drafter, options.plans
        self.gpu_target = GpuTarget(target.model, drafter.taps, GraphCache(target.device), options)
        form = drafter_form(drafter, target.device)
        self.drafter_form: GpuForm | None = None if isinstance(form, str) else form
        self.drafter_unsupported = form if isinstance(form, str) else ""  # why there is no form
        self.cycles: dict[tuple[object, ...], Cycle] = {}  # by `plan_key`
        self._host_policy_pair: tuple[GraphTarget, GraphDrafter | None] | None = None
        self._buffers_version = self.gpu_target.buffers_version  # of the buffers that these use
        self._guard = ModelGuard(target.model)

    @classmethod
    def of(cls, target: Target, drafter: Drafter, options: GpuOptions) -> tuple[GpuRunner | None, str]:
        """A runner for this target and drafter; None and the reason if the target cannot run in fixed buffers."""
        try:
            return cls(target, drafter, options), ""
        except Unsupported as reason:
            return None, str(reason)

    @property
    def outdated(self) -> bool:
        """Whether the target's modules, hooks or weights were replaced since this runner was built."""
        return self._guard.changed

    @property
    def moved(self) -> bool:
        """Whether the target's weights lie elsewhere now; a part of `outdated` that takes less time."""
        return self._guard.moved

    def unsupported_reason(self, sequence: Sequence, ctx: Context) -> str:
        """Why this runner cannot decode this request; empty if it can."""
        plan, params = sequence.policy.cached_plan, sequence.params
        if plan is None or not self.plans:
            return "its policy decides on the host"
        if reason := plan_unsupported(plan, ctx):
            return reason
        if plan.passes and self.drafter_unsupported:
            return self.drafter_unsupported
        if params.needs_host:
            return "its sampling looks at the text so far"
        if params.wants_logprobs:
            return "its log-probabilities are computed on the host"
        return ""

    def host_policy_pair(self, sequence: Sequence) -> tuple[GraphTarget, Drafter]:
        """Target and drafter for the host loop: each pass is a CUDA graph, and the policy decides on the host."""
        gpu_target, form = self.gpu_target, self.drafter_form
        self._reserve(sequence, MAX_STAGED_NODES + DRAFT_PASS_SIZES[-1])
        if self._host_policy_pair is None:
            graph_drafter = None
            if form is not None:
                staged = MAX_STAGED_NODES + DRAFT_PASS_SIZES[-1]
                graph_drafter = GraphDrafter(gpu_drafter(form, gpu_target, MAX_PENDING_COLUMNS, staged))
            self._host_policy_pair = (GraphTarget(gpu_target), graph_drafter)
        target, graph_drafter = self._host_policy_pair
        target.params = sequence.params
        if graph_drafter is None:
            return target, self.drafter
        graph_drafter.params = sequence.params
        return target, graph_drafter

    def _reserve(self, sequence: Sequence, more: int) -> None:
        """Make room for this text and `more` rows; if the buffers grow, drop everything that uses the old ones."""
        self.gpu_target.reserve(min(sequence.end, len(sequence.tokens) + sequence.params.max_new_tokens) + more)
        if self._buffers_version != self.gpu_target.buffers_version:
            self.cycles, self._host_policy_pair, self._buffers_version = {}, None, self.gpu_target.buffers_version

    @torch.inference_mode()
    def run(self, sequence: Sequence, online_costs: OnlineCosts) -> Iterator[Step]:
        """Yield the Steps of this request; the first one has the prefill time.

        Raises Outdated before the first Step if the target has changed: this is found out while the device works.
        """
        plan = sequence.policy.cached_plan
        assert plan is not None
        cycle = self._cycle(plan, sequence)
        params, noise = sequence.params, cycle.noise_buffer(sequence.params)
        sampler = ChildSampler(params, sequence.dice is not None, self.gpu_target.sampling, noise)
        pipeline = Pipeline(cycle, sampler, sequence)
        context = sequence.begin_cycle(online_costs.costs)
        pipeline.capture_graphs(context)
        pipeline.prefill()
        pipeline.launch(context)
        if self.outdated:
            raise Outdated
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
            finally:  # learning comes after the caller has the Step
                pipeline.stream_used = time.perf_counter() - collected > CALLER_BUSY_SECONDS
                sequence.observe(step)
                record_costs(online_costs, step, pipeline.passes_run(step), plan.width, context.length)
            if step.finish:
                return
            context = sequence.begin_cycle(online_costs.costs)

    def _cycle(self, plan: Plan, sequence: Sequence) -> Cycle:
        """The buffers of this plan, with room for this request."""
        gpu_target = self.gpu_target
        self._reserve(sequence, 3 * (plan.passes + 2) + staged_rows(plan))
        gpu_target.set_sampling(sequence.params)
        key = plan_key(plan)
        if key not in self.cycles:
            self.cycles[key] = Cycle(plan, self.drafter_form, gpu_target)
        cycle = self.cycles[key]
        cycle.plan = plan
        return cycle


def record_costs(online_costs: OnlineCosts, step: Step, passes: int, width: int, length: int) -> None:
    """Learn the costs of passes from a cycle with this number of draft passes, unless graphs were captured in it."""
    if online_costs.learns and not step.recorded:
        if passes:
            online_costs.record_drafts([0, *[width] * (passes - 1)], step.seconds.draft)
        online_costs.record_verify(len(step.tree), length, step.seconds.verify)
