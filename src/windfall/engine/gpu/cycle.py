"""One plan with its buffers: the pieces of work that a cycle launches."""

from __future__ import annotations

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
from windfall.engine.gpu.plans.base import Plan
from windfall.engine.gpu.sieve import Sieve
from windfall.engine.gpu.target import MOST, GpuTarget, fitting
from windfall.engine.gpu.tree import ahead, plant, terms
from windfall.engine.gpu.view import TreeView
from windfall.kernels.choose import choose
from windfall.kernels.gate import prune
from windfall.kernels.grow import grow
from windfall.kernels.settle import settle
from windfall.kernels.top import Words

TALES = 3  # cycles of which the host can see what came of them
SIGNALS = 4  # passes of which it can: one that is under way, two before it, and a spare
LIKELY, RECENT = 0.8, 16  # share of about so many cycles, at the most, from which on a pass is launched unasked
WAIT = 3e-5  # seconds that a decision keeps a device waiting, about: for the number, the decision, the launch


class Cycle:
    """What a plan, a drafter and the target need on the device; its methods are recorded or part of what is."""

    def __init__(self, plan: Plan, drafter: Drafter, judge: GpuTarget):
        self.plan, self.judge = plan, judge
        device, staged = judge.device, max(plan.width * plan.passes, 1)
        self.tree, self.told = plant(device, plan.capacity, plan.passes + 1, staged)
        self.tales = Mailbox(self.told, TALES)
        self.terms, self.terms_sent = terms(device, (plan.rows, plan.k) if plan.rule == "shape" else None)
        self.bounds = self.terms_sent.device["bounds"] if plan.gated else None
        self.places = torch.full((1,), plan.capacity, device=device)  # only nodes before this one are verified
        self._places = plan.capacity  # the same on the host
        self.draft = draft_of(drafter, judge, plan.passes + 1, staged) if plan.passes else None
        if self.draft is not None:
            self.draft.length = self.told.device["length"]
        self.ahead = ahead(plan.width, self.told, judge.length if self.draft is None else self.draft.length)
        self._root = torch.zeros(1, dtype=torch.long, device=device)
        self.signals = Mailbox(self.told.part(*plan.watches), SIGNALS) if plan.watches else None
        self.seen = [self._seen(arrays) for arrays in (self.signals.arrays if self.signals else ())]  # block by block
        self.sieve = plan.sieve(device)
        self._cells = torch.arange(plan.width * plan.k, device=device)
        self.habit = Habit()
        self.prepared: set[Key] = set()  # kinds of texts of which all work is recorded
        self.name = object() if self.draft is None else self.draft.name  # in keys of recorded work

    def _seen(self, arrays: Mapping[str, Any]) -> TreeView:
        assert self.draft is not None
        return TreeView(arrays, self.plan.width, self.plan.k, self.draft.lag)

    def show(self) -> None:
        """Let the host see what the plan watches: part of what is recorded."""
        assert self.signals is not None
        self.signals.tell()

    def start(self, prompt: list[int]) -> None:
        """Read a prompt, and begin with its last token as the root."""
        read(prompt, self.judge, self.draft)
        self.judge.accepted.fill_(MOST)  # to the noise, all positions are new
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
        logits = self.draft.grow(given, rows.above, rows.here)
        self._sprout(rows.nodes, rows.here, logits, rows.positions, 0, sprouting)

    def _sprout(
        self, nodes: Tensor, slots: Tensor, logits: Tensor | Words, columns: Tensor, offset: int, sprouting: Sprouting
    ) -> None:
        """Children of these nodes, whose own columns come `offset` after `columns`."""
        assert self.draft is not None
        watched, sifted = "entropy" in self.plan.watches, self.sieve is not None and self.sieve.entropy
        if watched or sifted:
            logits = multiplied(logits)
            shown = entropy(logits)
        if watched:
            self.told.device["entropy"].index_copy_(0, slots, shown)
        values, tokens = sprouting.children(
            logits, columns, offset + self.draft.lag, self.plan.k, self.draft.vocabulary
        )
        if self.bounds is not None:
            prune(self.tree, nodes, values, self.bounds)
        if self.sieve is not None:
            self._sift(self.sieve, nodes, tokens, values, shown if sifted else None)
        else:
            shape = self.terms_sent.device.get("shape")
            grow(self.tree, nodes, tokens, values, self.ahead, self.plan.rule, self.terms, shape)

    def _sift(self, sieve: Sieve, nodes: Tensor, tokens: Tensor, values: Tensor, shown: Tensor | None) -> None:
        """Children that do not stay join the tree like the others, and cannot be chosen."""
        tree, parent = self.tree, nodes.clamp(min=0)
        scores = (tree.score[parent][:, None] + values).masked_fill((nodes < 0)[:, None], -torch.inf)
        chosen = values.masked_fill(~sieve(scores, tree.depth[parent] + 1, shown), -torch.inf)
        grow(tree, nodes, tokens, chosen, self.ahead, self.plan.rule, self.terms)
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
        settle(
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
