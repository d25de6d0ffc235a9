"""One plan with its buffers: the pieces of work that a cycle launches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from windfall.core.types import SamplingParams
from windfall.drafters.base import Drafter
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.drafters.lm import LMDrafter
from windfall.engine.gpu.drafters import (
    GpuDrafter,
    GpuHeadDrafter,
    GpuModelDrafter,
    Sprouting,
    entropy,
    multiplied,
    read,
)
from windfall.engine.gpu.forward import Pass, Unsupported
from windfall.engine.gpu.graphs import Key
from windfall.engine.gpu.mailbox import Mailbox
from windfall.engine.gpu.target import MAX_VERIFY_ROWS, GpuTarget, fitting
from windfall.engine.gpu.tree import ahead, plant, terms
from windfall.engine.gpu.view import DeviceView
from windfall.kernels.accept import accept_path
from windfall.kernels.choose import choose
from windfall.kernels.gate import prune
from windfall.kernels.grow import grow
from windfall.kernels.rules import Rule
from windfall.kernels.top import LazyLogits
from windfall.policies.context import Context
from windfall.policies.plan import NodeFilter, Plan
from windfall.policies.shape import Shape

MAX_PASSES, MAX_PLACES, MAX_CHILDREN, MAX_STAGED = 32, 4096, 64, 4096  # of a cycle
MAX_WIDTH, MAX_BOUNDED_WIDTH = 128, 32  # nodes of a draft pass
TALES = 3  # cycles of which the host can see what came of them
SIGNALS = 4  # passes of which it can: one that is under way, two before it, and a spare
LIKELY, RECENT = 0.8, 16  # share of about so many cycles, at the most, from which on a pass is launched unasked
WAIT = 3e-5  # seconds that a decision keeps a device waiting, about: for the number, the decision, the launch


class Cycle:
    """What a plan, a drafter and the target need on the device; its methods are recorded or part of what is."""

    def __init__(self, plan: Plan, drafter: Drafter, judge: GpuTarget):
        self.plan, self.judge, self.rule = plan, judge, rule_of(plan)
        device, staged, capacity = judge.device, staged_rows(plan), tree_places(plan)
        self.capacity = capacity
        deepest = plan.passes + 1 if plan.max_depth is None else min(plan.passes + 1, plan.max_depth)
        self.tree, self.told = plant(device, capacity, plan.passes + 1, deepest, staged)
        self.tales = Mailbox(self.told, TALES)
        self.terms, self.terms_sent = terms(device, (plan.rows, plan.k) if plan.shape else None)
        self._told_terms: object = None  # the version of the terms that the device has
        there = self.terms_sent.device
        self.bounds, self.floor = (there["bounds"] if plan.bounds else None), (there["floor"] if plan.floor else None)
        self.shape = there.get("shape")
        self.places = torch.full((1,), capacity, device=device)  # only nodes before this one are verified
        self._places = capacity  # the same on the host
        self.draft = draft_of(drafter, judge, plan.passes + 1, staged) if plan.passes else None
        if self.draft is not None:
            self.draft.length = self.told.device["length"]
        self.ahead = ahead(plan.width, self.told, judge.length if self.draft is None else self.draft.length)
        self._root = torch.zeros(1, dtype=torch.long, device=device)
        self.signals = Mailbox(self.told.part(*_watched(plan)), SIGNALS) if plan.watches else None
        self.views = [self._view(arrays) for arrays in (self.signals.arrays if self.signals else ())]  # block by block
        self.filter_weights = {} if plan.keep is None else _on(device, plan.keep)
        self._cells = torch.arange(plan.width * plan.k, device=device)
        self.habit = Habit()
        self.prepared: set[Key] = set()  # kinds of texts of which all work is recorded
        self.name = object() if self.draft is None else self.draft.name  # in keys of recorded work

    def _view(self, arrays: Mapping[str, Any]) -> DeviceView:
        assert self.draft is not None
        return DeviceView(arrays, self.plan.width, self.plan.k, self.draft.lag)

    def send_terms(self, ctx: Context) -> None:
        """Bring the device the numbers that the plan's rule reads in this cycle, if they have changed."""
        plan, calibrator = self.plan, ctx.calibrator
        version: tuple[object, ...] = (
            plan.bounds() if plan.bounds else None,
            plan.floor(ctx) if plan.floor else None,
            (calibrator, calibrator.version, *plan.prices(ctx)) if plan.prices else None,
            plan.shape(ctx) if plan.shape else None,
        )
        if version == self._told_terms:
            return
        self._told_terms = version
        bounds, floor, _, shape = version
        host = self.terms_sent.settled()
        if bounds is not None:
            host["bounds"][:] = bounds
        if floor is not None:
            host["floor"][:] = floor
        if plan.prices:
            host["weights"][:], host["forecast"][:] = calibrator.weights, calibrator.mean_forecasts()
            host["prices"][:] = plan.prices(ctx)
        if isinstance(shape, Shape):
            host["shape"][:] = -1
            for (parent, rank), child in shape.numbered().items():
                host["shape"][parent, rank] = child
        self.terms_sent.send()

    def verified_places(self, levels: int) -> int:
        """Places of the tree after so many passes; only these can be told from later ones."""
        return 1 + self.plan.k * (1 + self.plan.width * (levels - 1)) if levels else 1

    def show(self) -> None:
        """Let the host see what the plan watches: part of what is recorded."""
        assert self.signals is not None
        self.signals.tell()

    def start(self, prompt: list[int]) -> None:
        """Read a prompt, and begin with its last token as the root."""
        read(prompt, self.judge, self.draft)
        self.judge.accepted.fill_(MAX_VERIFY_ROWS)  # to the noise, all positions are new
        self.tree.tokens[:1].fill_(prompt[-1])
        self.clear()
        self.tales.start()
        if self.signals is not None:
            self.signals.start()

    def clear(self) -> None:
        """Nothing is drafted but the root."""
        self.tree.count.fill_(1)
        self.ahead.staged.zero_()
        self.ahead.expanded.fill_(-1)

    def rewind(self, length: int) -> None:
        """As if behind a text of this length, whatever the buffers hold: for timing."""
        self.clear()
        self.judge.length.fill_(length)
        self.judge.known = length
        if self.draft is not None:
            self.draft.length.fill_(length)
            self.draft.waiting.fill_(1)

    def limit(self, places: int) -> None:
        """Verify only nodes before this place from now on."""
        if places != self._places:
            self.places.fill_(places)
            self._places = places

    def noise(self, params: SamplingParams) -> Tensor | None:
        """Where that of the positions ahead lies, if this sampling has any and several passes look it up."""
        return None if params.greedy or self.draft is None else self.judge.noise(self.plan.passes + 3)

    def open(self, sprouting: Sprouting) -> None:
        """The first draft pass: the root's children, and which nodes come next."""
        assert self.draft is not None
        if sprouting.noise is not None:
            self.judge.roll(sprouting.noise)
        logits = self.draft.open(self.draft.pending)
        self._sprout(self._root, self._root, logits, self.draft.length, -1, sprouting)

    def expand(self, sprouting: Sprouting) -> None:
        """A further draft pass."""
        assert self.draft is not None
        rows = self.ahead
        given = Pass(rows.tokens, rows.positions, rows.slots, rows.mask, self.draft.length)
        logits = self.draft.grow(given, rows.parent_slots, rows.own_slots)
        self._sprout(rows.nodes, rows.own_slots, logits, rows.positions, 0, sprouting)

    def _sprout(
        self,
        nodes: Tensor,
        slots: Tensor,
        logits: Tensor | LazyLogits,
        columns: Tensor,
        offset: int,
        sprouting: Sprouting,
    ) -> None:
        """Children of these nodes, whose own columns come `offset` after `columns`."""
        assert self.draft is not None
        plan, keep = self.plan, self.plan.keep
        watched, filtered = "entropy" in plan.watches, keep is not None and keep.entropy
        if watched or filtered:
            logits = multiplied(logits)
            uncertainty = entropy(logits)
        if watched:
            self.told.device["entropy"].index_copy_(0, slots, uncertainty)
        values, tokens = sprouting.children(logits, columns, offset + self.draft.lag, plan.k, self.draft.vocabulary)
        if self.bounds is not None:
            prune(self.tree, nodes, values, self.bounds)
        if keep is not None:
            self._filter(keep, nodes, tokens, values, uncertainty if filtered else None)
        else:
            given = (self.terms, self.shape, self.bounds, self.floor)
            grow(self.tree, nodes, tokens, values, self.ahead, self.rule, *given)

    def _filter(self, keep: NodeFilter, nodes: Tensor, tokens: Tensor, values: Tensor, entropy: Tensor | None) -> None:
        """Children that do not stay join the tree like the others, and cannot be chosen."""
        tree, parent = self.tree, nodes.clamp(min=0)
        scores = (tree.score[parent][:, None] + values).masked_fill((nodes < 0)[:, None], -torch.inf)
        depth = (tree.depth[parent] + 1)[:, None].expand_as(scores)
        before = None if entropy is None else entropy[:, None].expand_as(scores)
        chosen = values.masked_fill(~keep.keeps(self.filter_weights, scores, depth, before), -torch.inf)
        grow(tree, nodes, tokens, chosen, self.ahead, self.rule)
        places = tree.count - values.numel() + self._cells[: values.numel()]
        tree.logq.index_copy_(0, places, values.flatten())
        tree.score.index_copy_(0, places, scores.flatten())

    def verify(self, rows: int, columns: int, params: SamplingParams, noise: Tensor | None = None) -> None:
        """Choose the rows, judge them, plant the next tree, and tell the host."""
        judge, there = self.judge, self.judge.rows.device
        kept, path = (self.told.device[name][:rows] for name in ("kept", "path"))
        tokens, parents, depth = (there[name][:rows] for name in ("tokens", "parents", "depth"))
        mask = there["mask"][:rows, :rows]
        choose(self.tree, rows, kept, tokens, parents, depth, mask, there["count"], self.places)
        scored = judge.score(rows, columns)
        draws, deepest, draft = judge.draw(scored, params, noise), min(rows, self.plan.passes + 1), self.draft
        accept_path(
            draws,
            tokens,
            parents,
            mask,
            there["count"],
            judge.length,
            path,
            judge.accepted,
            judge.bonus,
            judge.source[:deepest],
            judge.goal[:deepest],
            None if draft is None else draft.tokens[:deepest],
            None if draft is None else draft.waiting,
            self.tree,
            None if draft is None else self.ahead.expanded,
            None if draft is None else self.ahead.staged,
            self.told.device["figures"],
        )
        wanted = None if draft is None or draft.features is None else draft.features[:deepest]
        judge.advance(deepest, scored.states, path, wanted)
        self.tales.tell()


def rule_of(plan: Plan) -> Rule:
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
    """Places that the tree's arrays have: those of all passes and of one more."""
    if plan.layer is not None:
        return plan.layer.budget + 1
    if plan.top is not None:
        return 1 + plan.top * (plan.passes + 1)
    return 1 + plan.k * (1 + plan.width * plan.passes)


def staged_rows(plan: Plan) -> int:
    """Rows that the drafter's passes may stage in a cycle."""
    if plan.layer is not None:
        return plan.layer.budget + plan.width
    return max(plan.width * plan.passes, 1)


def plan_key(plan: Plan) -> tuple[object, ...]:
    """What buffers and recorded graphs depend on."""
    keep = None if plan.keep is None else plan.keep.key
    return (rule_of(plan), plan.watches, plan.passes, plan.width, plan.k, plan.rows, plan.max_depth, keep)


def unsupported(plan: Plan, ctx: Context) -> str:
    """Why this plan cannot run in fixed buffers; nothing if it can."""
    if plan.suits is not None and not plan.suits(ctx):
        return "its policy weighs every row, on the host"
    if tree_places(plan) > MAX_PLACES:
        return f"its trees may have more than {MAX_PLACES} nodes"
    if plan.passes > MAX_PASSES or staged_rows(plan) > MAX_STAGED:
        return f"its cycles may have more than {MAX_PASSES} draft passes, or expand more than {MAX_STAGED} nodes"
    if plan.rows > MAX_VERIFY_ROWS or plan.k > MAX_CHILDREN or plan.width > MAX_WIDTH:
        return f"its passes have more than {MAX_VERIFY_ROWS} rows, {MAX_CHILDREN} children or {MAX_WIDTH} nodes"
    if plan.bounds is not None and plan.width > MAX_BOUNDED_WIDTH:
        return f"its passes expand more than {MAX_BOUNDED_WIDTH} nodes, most of which are out of bounds"
    if plan.expanded_only or plan.first_come:
        return "it verifies nodes by their order, on the host"
    if plan.shape is not None:
        shape = plan.shape(ctx)
        if not 1 < len(shape) <= plan.rows or max(map(len, shape.levels)) > plan.width:
            return "its tree is too wide, or empty"
    return ""


def _watched(plan: Plan) -> tuple[str, ...]:
    """The arrays that a decision needs, in the order in which they lie in the buffer."""
    names = {*plan.watches, *(("expanded",) if "entropy" in plan.watches else ())}
    return tuple(names)


def _on(device: torch.device, keep: NodeFilter) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array).to(device) for name, array in keep.weights().items()}


class Habit:
    """How often drafting went on after each level. Where it nearly always does, the next pass need not wait for the
    decision: it runs while the host thinks, and is wasted once in a while."""

    def __init__(self) -> None:
        self._shares: dict[int, float] = {}
        self._enough = LIKELY

    def weigh(self, seconds: float) -> None:
        """What a pass takes, which is lost if nobody wants it."""
        self._enough = min(seconds / (seconds + WAIT), LIKELY)

    def likely(self, level: int) -> bool:
        return self._shares.get(level, 0.0) > self._enough

    def note(self, level: int, went_on: bool) -> None:
        known = self._shares.get(level, 0.5)
        self._shares[level] = known + (went_on - known) / RECENT


def on_host(drafter: Drafter, device: torch.device) -> str:
    """Why this drafter cannot work on fixed buffers there; nothing if it can."""
    if isinstance(drafter, LMDrafter):
        if drafter.decoder.device != device:
            return f"its drafter is on {drafter.decoder.device}, the target on {device}"
        try:
            fitting(drafter.decoder.model)
        except Unsupported as reason:
            return f"its drafter works on the host: {reason}"
        return ""
    if not isinstance(drafter, FeatureHeadDrafter):
        return "its drafter works on the host"
    return "" if drafter.longest is None else "its head's rotary angles depend on the length of the text"


def draft_of(drafter: Drafter, judge: GpuTarget, pending: int, staged: int) -> GpuDrafter:
    """This drafter on fixed buffers."""
    if isinstance(drafter, FeatureHeadDrafter):
        return GpuHeadDrafter(drafter.head, judge, pending, staged)
    assert isinstance(drafter, LMDrafter)
    return GpuModelDrafter(drafter.decoder, drafter.vocabulary, judge, pending, staged)
