"""Makes what runs the requests of an engine on a KV cache in pages, as far as models, policy and memory allow it."""

from __future__ import annotations

from typing import NamedTuple

from windfall.costs.online import OnlineCosts
from windfall.drafters.base import BlockForm, GpuForm, HeadForm, ModelForm
from windfall.engine.gpu.batch.draft_passes import draft_passes
from windfall.engine.gpu.batch.drafters import drafter_forward
from windfall.engine.gpu.batch.paged_cache import PagedCache
from windfall.engine.gpu.batch.paged_drafter import PagedDrafter, most_expanded
from windfall.engine.gpu.batch.paged_target import PagedTarget
from windfall.engine.gpu.batch.round import MAX_ROUND_ROWS
from windfall.engine.gpu.batch.runner import SEATS, GpuBatchRunner, Limits
from windfall.engine.gpu.forward import PagedForward, Unsupported
from windfall.engine.gpu.runner import GpuRunner
from windfall.engine.gpu.target import GpuTarget, fastest_forward, in_pages
from windfall.engine.memory import default_bytes
from windfall.heads.layers import head_dim
from windfall.kernels.attention import fits_pages
from windfall.kernels.pages import PAGE_TOKENS, pages_for
from windfall.policies.base import TreePolicy
from windfall.policies.budget import Budget, OwnSizes
from windfall.policies.plan import Plan

MAX_CONTEXT = 32_768  # tokens of a text, if the model has no limit


class Paged(NamedTuple):
    """What runs requests on a KV cache in pages."""

    rounds: GpuBatchRunner | None = None  # for requests that share a budget and draw their tokens on the device
    reason: str = ""  # why there is no runner for these
    target: PagedTarget | None = None  # for other requests, in the host loop
    drafter: PagedDrafter | None = None  # for the same requests; None: the engine's own drafts for them

    def close(self) -> None:
        """Drop the graphs and the queued work, which would otherwise keep the memory in use."""
        for each in (self.rounds, self.target, self.drafter):
            if each is not None:
                each.close()


class Drafting(NamedTuple):
    """How the requests of a `GpuBatchRunner` are drafted."""

    budget: Budget
    form: GpuForm | None
    forward: PagedForward | None
    undrafted: str  # why they are not, although the policy would
    passes: int
    width: int
    k: int


def paged(runner: GpuRunner, policy: TreePolicy, online_costs: OnlineCosts, seats: int, memory: int | None) -> Paged:
    """What runs requests with this policy, at most `seats` at a time, as far as models, policy and memory allow it.

    `memory`: bytes for KV caches; None: a share of the free memory.
    """
    gpu_target = runner.gpu_target
    try:
        check_width(in_pages(gpu_target.forward), gpu_target)
    except Unsupported as unsupported:
        return Paged(reason=str(unsupported))
    drafting, reason = _drafting(runner, policy)
    form = host_form(runner)
    longest = runner.target.context or MAX_CONTEXT
    pages = seats * pages_for(longest) + 1
    memory = default_bytes(gpu_target.device) if memory is None else memory
    if memory is not None:
        pages = min(pages, memory // page_bytes(gpu_target, form if drafting is None else drafting.form or form))
    if pages < 2:
        return Paged(reason="its memory has no room for a page")
    longest = min(longest, (pages - 1) * PAGE_TOKENS)
    cache = PagedCache(gpu_target, pages, MAX_ROUND_ROWS if drafting else 0)
    rounds = None
    if drafting is not None:
        limits = Limits(seats, pages, longest, drafting.passes, drafting.width, drafting.k)
        costs = OnlineCosts(online_costs.costs, online_costs.learns)
        how = policy, drafting.budget, costs, limits, drafting.undrafted
        rounds = GpuBatchRunner(cache, drafting.form, drafting.forward, *how)
    seats = min(seats, SEATS[-1])
    numbers = most_expanded(seats) + 1  # the last one is for padding
    passes = draft_passes(form, cache, longest, numbers, None if rounds is None else rounds.drafter)
    has_keys = passes is not None or (rounds is not None and rounds.drafter is not None)  # of a drafter
    target = PagedTarget(cache, seats, longest, not has_keys)
    return Paged(rounds, reason, target, None if passes is None else PagedDrafter(passes, target))


def host_form(runner: GpuRunner) -> HeadForm | ModelForm | None:
    """The form of a drafter that drafts in pages for the host loop; None for others."""
    form = runner.drafter_form
    if not isinstance(form, HeadForm | ModelForm):
        return None
    try:
        forward = drafter_forward(form)
        if forward is not None:
            check_width(forward, runner.gpu_target)
    except Unsupported:
        return None
    return form


def _drafting(runner: GpuRunner, policy: TreePolicy) -> tuple[Drafting | None, str]:
    """How requests with this policy are drafted in rounds; None and the reason if they cannot run in rounds."""
    form, plan, budget = runner.drafter_form, policy.cached_plan, policy.budget()
    if budget is None:
        return None, "its policy decides during a cycle, on the host"
    if isinstance(budget, OwnSizes) and plan is not None and (reason := rule_unsupported(plan)):
        return None, reason
    largest = budget.largest
    if largest is None:
        return None, "its budget does not say how large its rounds can be"
    undrafted = runner.drafter_unsupported if largest.passes and form is None else ""
    if undrafted:
        plain = budget.without_drafter()
        if plain is None:
            return None, undrafted
        budget, largest = plain, plain.largest
    passes, width, k = largest[:3]
    form = form if passes else None
    try:
        forward = drafter_forward(form)
        if forward is not None:
            check_width(forward, runner.gpu_target)
    except Unsupported as unsupported:
        return None, str(unsupported)
    return Drafting(budget, form, forward, undrafted, passes, width, k), ""


def rule_unsupported(plan: Plan) -> str:
    """Why the trees of this plan cannot grow in batches; empty if they can."""
    names = ("shape", "bounds", "floor", "keep", "layer", "top", "suits", "expanded_only", "first_come")
    return next((f"its plan has {name!r}, which batches do not support" for name in names if getattr(plan, name)), "")


def check_width(forward: PagedForward, gpu_target: GpuTarget) -> None:
    """Raise Unsupported if the heads of a model are too wide for attention over pages on this device."""
    width = forward.shape[2]
    if not fits_pages(width, forward.group, gpu_target.dtype, gpu_target.device):
        raise Unsupported(f"attention over pages needs too much shared memory for heads of width {width} on this GPU")


def page_bytes(gpu_target: GpuTarget, form: GpuForm | None) -> int:
    """Bytes of a page in the KV caches of target and drafter."""
    layers, heads, width = gpu_target.forward.shape
    total: int = 2 * layers * heads * width * gpu_target.dtype.itemsize
    if isinstance(form, HeadForm | BlockForm):
        layer = form.head.config.layer
        total += 2 * layer.num_hidden_layers * layer.num_key_value_heads * head_dim(layer) * form.head.dtype.itemsize
    elif form is not None:
        layers, heads, width = fastest_forward(form.decoder.model).shape
        total += 2 * layers * heads * width * form.decoder.dtype.itemsize
    return total * PAGE_TOKENS
