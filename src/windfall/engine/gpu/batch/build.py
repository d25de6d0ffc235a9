"""Makes the runner for batches of an engine, as far as its models, its policy and the memory allow one."""

from __future__ import annotations

from windfall.costs.online import OnlineCosts
from windfall.drafters.base import BlockForm, GpuForm, HeadForm
from windfall.engine.gpu.batch.drafters import drafter_forward
from windfall.engine.gpu.batch.runner import GpuBatchRunner, Limits
from windfall.engine.gpu.forward import PagedForward, Unsupported
from windfall.engine.gpu.runner import GpuRunner
from windfall.engine.gpu.target import GpuTarget, in_pages
from windfall.engine.memory import default_bytes
from windfall.heads.layers import head_dim
from windfall.kernels.attention import fits_pages
from windfall.kernels.pages import PAGE_TOKENS, pages_for
from windfall.policies.base import TreePolicy
from windfall.policies.budget import OwnSizes
from windfall.policies.plan import Plan

MAX_CONTEXT = 32_768  # tokens of a text, if the model has no limit


def batch_runner(
    runner: GpuRunner, policy: TreePolicy, online_costs: OnlineCosts, seats: int, memory: int | None
) -> GpuBatchRunner | str:
    """A runner for requests with this policy, at most `seats` at a time; or why there is none.

    `memory`: bytes for KV caches; None: a share of the free memory.
    """
    gpu_target, form, plan, budget = runner.gpu_target, runner.drafter_form, policy.cached_plan, policy.budget()
    if budget is None:
        return "its policy decides during a cycle, on the host"
    if isinstance(budget, OwnSizes) and plan is not None and (reason := rule_unsupported(plan)):
        return reason
    largest = budget.largest
    if largest is None:
        return "its budget does not say how large its rounds can be"
    undrafted = runner.drafter_unsupported if largest.passes and form is None else ""
    if undrafted:
        plain = budget.without_drafter()
        if plain is None:
            return undrafted
        budget, largest = plain, plain.largest
    passes, width, k = largest[:3]
    longest = runner.target.context or MAX_CONTEXT
    pages = seats * pages_for(longest) + 1
    form = form if passes else None
    try:
        check_width(in_pages(gpu_target.forward), gpu_target)
        drafting = drafter_forward(form)
        if drafting is not None:
            check_width(drafting, gpu_target)
        memory = default_bytes(gpu_target.device) if memory is None else memory
        if memory is not None:
            pages = min(pages, memory // page_bytes(gpu_target, form, drafting))
        if pages < 2:
            return "its memory has no room for a page"
        limits = Limits(seats, pages, min(longest, (pages - 1) * PAGE_TOKENS), passes, width, k)
        costs = OnlineCosts(online_costs.costs, online_costs.learns)
        return GpuBatchRunner(gpu_target, form, drafting, policy, budget, costs, limits, undrafted)
    except Unsupported as unsupported:
        return str(unsupported)


def rule_unsupported(plan: Plan) -> str:
    """Why the trees of this plan cannot grow in batches; empty if they can."""
    names = ("shape", "bounds", "floor", "keep", "layer", "top", "suits", "expanded_only", "first_come")
    return next((f"its plan has {name!r}, which batches do not support" for name in names if getattr(plan, name)), "")


def check_width(forward: PagedForward, gpu_target: GpuTarget) -> None:
    """Raise Unsupported if the heads of a model are too wide for attention over pages on this device."""
    width = forward.shape[2]
    if not fits_pages(width, forward.group, gpu_target.dtype, gpu_target.device):
        raise Unsupported(f"attention over pages needs too much shared memory for heads of width {width} on this GPU")


def page_bytes(gpu_target: GpuTarget, form: GpuForm | None, drafting: PagedForward | None) -> int:
    """Bytes of a page in the KV caches of target and drafter."""
    layers, heads, width = gpu_target.forward.shape
    total: int = 2 * layers * heads * width * gpu_target.dtype.itemsize
    if isinstance(form, HeadForm | BlockForm):
        layer = form.head.config.layer
        total += 2 * layer.num_hidden_layers * layer.num_key_value_heads * head_dim(layer) * form.head.dtype.itemsize
    elif form is not None and drafting is not None:
        layers, heads, width = drafting.shape
        total += 2 * layers * heads * width * form.decoder.dtype.itemsize
    return total * PAGE_TOKENS
