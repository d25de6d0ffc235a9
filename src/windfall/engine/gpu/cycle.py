"""The device work of one decoding cycle (draft passes, verify pass) for one plan, and the buffers it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from windfall.core.types import SamplingParams
from windfall.drafters.base import GpuForm
from windfall.engine.gpu.drafters import (
    ChildSampler,
    Drafted,
    GpuDrafter,
    gpu_drafter,
    prefill,
    with_entropy,
)
from windfall.engine.gpu.forward import Pass
from windfall.engine.gpu.graphs import Key
from windfall.engine.gpu.mailbox import Mailbox
from windfall.engine.gpu.target import MAX_VERIFY_ROWS, GpuTarget
from windfall.engine.gpu.tree import next_rows, term_buffers, tree_buffers
from windfall.engine.gpu.view import DeviceView
from windfall.kernels.accept import accept_path
from windfall.kernels.choose import choose
from windfall.kernels.gate import prune
from windfall.kernels.grow import grow
from windfall.kernels.pair_children import PairCandidates, grow_levels
from windfall.kernels.rules import Rule
from windfall.policies.context import Context
from windfall.policies.plan import NodeFilter, Plan
from windfall.policies.shape import Shape

MAX_DRAFT_PASSES = 32  # per cycle
MAX_TREE_PLACES = 4096  # nodes of a cycle's tree, empty places included
MAX_CHILDREN_PER_NODE = 64
MAX_STAGED_ROWS = 4096  # nodes that a cycle expands
MAX_NODES_PER_PASS = 128  # nodes that one draft pass expands
MAX_BOUNDED_NODES_PER_PASS = 32  # the same for plans with `bounds`
RESULT_BLOCKS = 3  # cycles whose results stay readable on the host
REPORT_BLOCKS = 4  # draft passes whose reports stay readable: the running one, the two before it, and a spare
MAX_LAUNCH_SHARE = 0.8  # a pass that follows in more than this share of cycles is launched before the decision
AVERAGED_CYCLES = 16  # about the number of recent cycles in that share
DECISION_SECONDS = 3e-5  # time that the device idles during a decision: polling, deciding and launching


class Cycle:
    """Buffers of one plan on the device, and the work on them.

    `draft_passes`, `next_pass`, `publish_report` and `verify` only launch kernels: CUDA graphs can capture them.
    """

    def __init__(self, plan: Plan, form: GpuForm | None, gpu_target: GpuTarget):
        """`form` may be None if the plan has no draft passes."""
        self.plan, self.gpu_target, self.rule = plan, gpu_target, kernel_rule(plan)
        device, staged, capacity = gpu_target.device, staged_rows(plan), tree_places(plan)
        self.capacity = capacity
        deepest = plan.passes + 1 if plan.max_depth is None else min(plan.passes + 1, plan.max_depth)
        self.tree, self.published = tree_buffers(device, capacity, plan.passes + 1, deepest, staged)
        self.results = Mailbox(self.published, RESULT_BLOCKS)
        self.terms, self.terms_buffer = term_buffers(device, (plan.rows, plan.k) if plan.shape else None)
        self._terms_version: object = None  # identifies the terms that the device has
        there = self.terms_buffer.device
        self.bounds, self.floor = (there["bounds"] if plan.bounds else None), (there["floor"] if plan.floor else None)
        self.shape = there.get("shape")
        self.verify_limit = torch.full((1,), capacity, device=device)  # only nodes before this place are verified
        self._verify_limit = capacity  # the same on the host
        self.draft: GpuDrafter | None = None
        if plan.passes:
            assert form is not None
            self.draft = gpu_drafter(form, gpu_target, plan.passes + 1, staged, _reads_entropy(plan))
            self.draft.length = self.published.device["length"]
        self.next_rows = next_rows(
            plan.width, self.published, gpu_target.length if self.draft is None else self.draft.length
        )
        self._root = torch.zeros(1, dtype=torch.long, device=device)
        self.reports = Mailbox(self.published.subset(*_watched_arrays(plan)), REPORT_BLOCKS) if plan.watches else None
        self.views = [self._view(arrays) for arrays in (self.reports.arrays if self.reports else ())]  # one per block
        self.filter_weights = {} if plan.keep is None else _to_device(device, plan.keep)
        self._child_offsets = torch.arange(plan.width * plan.k, device=device)
        self.predictor = PassPredictor()
        self.captured_kinds: set[Key] = set()  # kinds of requests whose CUDA graphs are all captured
        self.buffers_id = object() if self.draft is None else self.draft.buffers_id  # part of the keys of its graphs

    def _view(self, arrays: Mapping[str, Any]) -> DeviceView:
        assert self.draft is not None
        return DeviceView(arrays, self.plan.width, self.plan.k, self.draft.draw_offset)

    def send_terms(self, ctx: Context) -> None:
        """Send the device the numbers that the plan's rule reads in this cycle, if they have changed."""
        plan, calibrator = self.plan, ctx.calibrator
        version: tuple[object, ...] = (
            plan.bounds() if plan.bounds else None,
            plan.floor(ctx) if plan.floor else None,
            (calibrator, calibrator.version, ctx.shift, *plan.prices(ctx)) if plan.prices else None,
            plan.shape(ctx) if plan.shape else None,
        )
        if version == self._terms_version:
            return
        self._terms_version = version
        bounds, floor, _, shape = version
        host = self.terms_buffer.wait_writable()
        if bounds is not None:
            host["bounds"][:] = bounds
        if floor is not None:
            host["floor"][:] = floor
        if plan.prices:
            host["weights"][:], host["forecast"][:] = calibrator.shifted(ctx.shift), calibrator.mean_forecasts()
            host["prices"][:] = plan.prices(ctx)
        if isinstance(shape, Shape):
            host["shape"][:] = -1
            for (parent, rank), child in shape.numbered().items():
                host["shape"][parent, rank] = child
        self.terms_buffer.send()

    def places_after(self, levels: int) -> int:
        """The number of places in the tree after this number of passes; for rules that are not selective."""
        return 1 + self.plan.k * (1 + self.plan.width * (levels - 1)) if levels else 1

    def publish_report(self) -> None:
        """Publish what the plan watches to the host."""
        assert self.reports is not None
        self.reports.publish()

    def start(self, prompt: list[int]) -> None:
        """Prefill a prompt and make its last token the root of the tree."""
        prefill(prompt, self.gpu_target, self.draft)
        self.gpu_target.accepted.fill_(MAX_VERIFY_ROWS)  # makes `update_noise` compute all positions
        self.tree.tokens[:1].fill_(prompt[-1])
        self.clear_tree()
        self.results.reset()
        if self.reports is not None:
            self.reports.reset()

    def clear_tree(self) -> None:
        """Drop all nodes but the root."""
        self.tree.count.fill_(1)
        self.next_rows.staged.zero_()
        self.next_rows.expanded.fill_(-1)

    def set_length(self, length: int) -> None:
        """Set the number of committed tokens without changing the KV cache. Used for capture and timing."""
        self.clear_tree()
        self.gpu_target.length.fill_(length)
        self.gpu_target.length_bound = length
        if self.draft is not None:
            self.draft.length.fill_(length)
            self.draft.pending_count.fill_(1)

    def limit_verified(self, places: int) -> None:
        """From now on, verify only nodes before this place."""
        if places != self._verify_limit:
            self.verify_limit.fill_(places)
            self._verify_limit = places

    def noise_buffer(self, params: SamplingParams) -> Tensor | None:
        """The buffer for the noise of the next positions, which a cycle's passes share; None if there is no noise."""
        if params.greedy or self.draft is None:
            return None
        return self.gpu_target.noise_buffer(max(self.plan.passes, self.draft.levels) + 3)

    def draft_passes(self, count: int, sampler: ChildSampler) -> None:
        """The first `count` draft passes. A block head's levels after the first are grown in one launch."""
        logits = self._first_logits(sampler)
        if isinstance(logits, PairCandidates) and self._only_grows and self.plan.k <= logits.levels.candidates:
            terms = self.terms if self.rule.calibrated else None
            grow_levels(self.tree, self._root, self.next_rows, count, self.plan.k, self.rule, logits, terms)
            return
        assert self.draft is not None
        self._add_children(self._root, self._root, logits, self.draft.length, -1, sampler)
        for _ in range(1, count):
            self.next_pass(sampler)

    @property
    def _only_grows(self) -> bool:
        """Whether nothing but `grow`, without bounds, floor or shape, happens between two levels."""
        plan = self.plan
        special = (plan.bounds, plan.floor, plan.shape, plan.keep)
        return all(each is None for each in special) and "entropy" not in plan.watches

    def _first_logits(self, sampler: ChildSampler) -> Drafted:
        """The first draft pass: the logits after the root, or its candidates."""
        assert self.draft is not None
        if sampler.noise is not None:
            self.gpu_target.update_noise(sampler.noise)
        return self.draft.first_pass(self.draft.pending, sampler)

    def next_pass(self, sampler: ChildSampler) -> None:
        """A later draft pass: add children of the chosen nodes, and choose the nodes of the next pass."""
        rows = self.next_rows
        assert self.draft is not None and rows.mask is not None
        given = Pass(rows.tokens, rows.positions, rows.slots, rows.mask, self.draft.length)
        logits = self.draft.next_pass(given, rows.parent_slots, rows.own_slots, sampler)
        self._add_children(rows.nodes, rows.own_slots, logits, rows.positions, 0, sampler)

    def _add_children(
        self,
        nodes: Tensor,
        slots: Tensor,
        logits: Drafted,
        columns: Tensor,
        offset: int,
        sampler: ChildSampler,
    ) -> None:
        """Add children of these nodes, whose own columns are `columns` + `offset`."""
        assert self.draft is not None
        plan, keep = self.plan, self.plan.keep
        watched, filtered = "entropy" in plan.watches, keep is not None and keep.entropy
        if watched or filtered:
            logits, uncertainty = with_entropy(logits)
        if watched:
            self.published.device["entropy"].index_copy_(0, slots, uncertainty)
        values, tokens = sampler.children(
            logits, columns, offset + self.draft.draw_offset, plan.k, self.draft.vocabulary
        )
        if self.bounds is not None:
            prune(self.tree, nodes, values, self.bounds)
        if keep is not None:
            self._filter(keep, nodes, tokens, values, uncertainty if filtered else None)
        else:
            given = (self.terms, self.shape, self.bounds, self.floor)
            grow(self.tree, nodes, tokens, values, self.next_rows, self.rule, *given)

    def _filter(self, keep: NodeFilter, nodes: Tensor, tokens: Tensor, values: Tensor, entropy: Tensor | None) -> None:
        """Add the children, and exclude those that the filter drops from expansion and verification."""
        tree, parent = self.tree, nodes.clamp(min=0)
        scores = (tree.score[parent][:, None] + values).masked_fill((nodes < 0)[:, None], -torch.inf)
        depth = (tree.depth[parent] + 1)[:, None].expand_as(scores)
        before = None if entropy is None else entropy[:, None].expand_as(scores)
        chosen = values.masked_fill(~keep.keeps(self.filter_weights, scores, depth, before), -torch.inf)
        grow(tree, nodes, tokens, chosen, self.next_rows, self.rule)
        places = tree.count - values.numel() + self._child_offsets[: values.numel()]
        tree.logq.index_copy_(0, places, values.flatten())
        tree.score.index_copy_(0, places, scores.flatten())

    def verify(self, rows: int, columns: int, params: SamplingParams, noise: Tensor | None = None) -> None:
        """The verify pass: choose rows, run the target, commit the accepted path, start a new tree, publish results."""
        gpu_target, there = self.gpu_target, self.gpu_target.rows.device
        kept, path = (self.published.device[name][:rows] for name in ("kept", "path"))
        tokens, parents, depth = (there[name][:rows] for name in ("tokens", "parents", "depth"))
        mask = there["mask"][:rows, :rows]
        choose(self.tree, rows, kept, tokens, parents, depth, mask, there["count"], self.verify_limit)
        scored = gpu_target.score(rows, columns)
        draws, deepest, draft = gpu_target.draw(scored, params, noise), min(rows, self.plan.passes + 1), self.draft
        accept_path(
            draws,
            tokens,
            parents,
            mask,
            there["count"],
            gpu_target.length,
            path,
            gpu_target.accepted,
            gpu_target.bonus,
            gpu_target.move_source[:deepest],
            gpu_target.move_goal[:deepest],
            None if draft is None else draft.tokens[:deepest],
            None if draft is None else draft.pending_count,
            self.tree,
            None if draft is None else self.next_rows.expanded,
            None if draft is None else self.next_rows.staged,
            self.published.device["outcome"],
        )
        wanted = None if draft is None or draft.features is None else draft.features[:deepest]
        gpu_target.commit_path(deepest, scored.states, path, wanted)
        self.results.publish()


def kernel_rule(plan: Plan) -> Rule:
    """The plan's rule as the kernels read it."""
    made = Rule(
        whole=plan.order == "best",
        calibrated=plan.calibrated,
        shaped=plan.shape is not None,
        bounded=plan.bounds is not None,
        floored=plan.floor is not None,
        decay=math.log(plan.decay),
        top=plan.top or 0,
        include_last=plan.include_last,
    )
    if plan.layer is None:
        return made
    share, budget, first, levels = plan.layer
    return made._replace(budget=budget, share=math.log(share) if share else -math.inf, first=first, levels=levels)


def tree_places(plan: Plan) -> int:
    """Places in the tree's arrays: enough for all passes and one more."""
    if plan.layer is not None:
        return plan.layer.budget + 1
    if plan.top is not None:
        return 1 + plan.top * (plan.passes + 1)
    return 1 + plan.k * (1 + plan.width * plan.passes)


def staged_rows(plan: Plan) -> int:
    """Rows of the drafter's KV cache that the passes of a cycle may need."""
    if plan.layer is not None:
        return plan.layer.budget + plan.width
    return max(plan.width * plan.passes, 1)


def plan_key(plan: Plan) -> tuple[object, ...]:
    """Plans with equal keys share buffers and CUDA graphs."""
    keep = None if plan.keep is None else plan.keep.key
    return (kernel_rule(plan), plan.watches, plan.passes, plan.width, plan.k, plan.rows, plan.max_depth, keep)


def plan_unsupported(plan: Plan, ctx: Context) -> str:
    """Why this plan cannot run in fixed buffers; empty if it can."""
    if plan.suits is not None and not plan.suits(ctx):
        return "its policy weighs every row, on the host"
    if tree_places(plan) > MAX_TREE_PLACES:
        return f"its trees may have more than {MAX_TREE_PLACES} nodes"
    if plan.passes > MAX_DRAFT_PASSES or staged_rows(plan) > MAX_STAGED_ROWS:
        passes, staged = MAX_DRAFT_PASSES, MAX_STAGED_ROWS
        return f"its cycles may have more than {passes} draft passes, or expand more than {staged} nodes"
    if plan.rows > MAX_VERIFY_ROWS or plan.k > MAX_CHILDREN_PER_NODE or plan.width > MAX_NODES_PER_PASS:
        rows, children, nodes = MAX_VERIFY_ROWS, MAX_CHILDREN_PER_NODE, MAX_NODES_PER_PASS
        return f"its passes have more than {rows} rows, {children} children or {nodes} nodes"
    if plan.bounds is not None and plan.width > MAX_BOUNDED_NODES_PER_PASS:
        return f"its passes expand more than {MAX_BOUNDED_NODES_PER_PASS} nodes; with bounds this is the limit"
    if plan.expanded_only or plan.first_come:
        return "it verifies nodes by their order, on the host"
    if plan.shape is not None:
        shape = plan.shape(ctx)
        if not 1 < len(shape) <= plan.rows or max(map(len, shape.levels)) > plan.width:
            return "its tree is too wide, or empty"
    return ""


def _reads_entropy(plan: Plan) -> bool:
    return "entropy" in plan.watches or (plan.keep is not None and plan.keep.entropy)


def _watched_arrays(plan: Plan) -> tuple[str, ...]:
    """The arrays that a decision reads; entropies are found through the expanded nodes."""
    names = {*plan.watches, *(("expanded",) if "entropy" in plan.watches else ())}
    return tuple(names)


def _to_device(device: torch.device, keep: NodeFilter) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array).to(device) for name, array in keep.weights().items()}


class PassPredictor:
    """Predicts after each draft pass whether another one follows, from the share of recent cycles in which it did.

    A pass that is likely to follow is launched before the host decides. If the decision is to stop, it was wasted.
    """

    def __init__(self) -> None:
        self._shares: dict[int, float] = {}
        self._launch_share = MAX_LAUNCH_SHARE

    def set_pass_seconds(self, seconds: float) -> None:
        """Set the cost of a wasted pass; it moves the share from which on a pass counts as likely."""
        self._launch_share = min(seconds / (seconds + DECISION_SECONDS), MAX_LAUNCH_SHARE)

    def likely(self, level: int) -> bool:
        """Whether another pass is likely to follow this one."""
        return self._shares.get(level, 0.0) > self._launch_share

    def observe(self, level: int, went_on: bool) -> None:
        """Learn from a decision."""
        known = self._shares.get(level, 0.5)
        self._shares[level] = known + (went_on - known) / AVERAGED_CYCLES
