"""Decides how a request runs: on the GPU runner, on the host loop with CUDA graphs, or on the host loop."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, NamedTuple

import torch

from windfall.core.errors import InexactWarning
from windfall.core.types import FULL_PRECISION, GpuOptions
from windfall.costs.curves import Costs
from windfall.costs.online import OnlineCosts
from windfall.drafters.base import Drafter
from windfall.engine.sequence import Sequence
from windfall.model.target import Target
from windfall.policies.base import TreePolicy

if TYPE_CHECKING:
    from windfall.engine.gpu.batch.build import Paged
    from windfall.engine.gpu.runner import GpuRunner


SEVERAL_TEXTS = "several texts go together"


class Route(NamedTuple):
    """How a request runs.

    With a `runner` and no `fallback`, the GPU runner decodes it. With both, the host loop decodes it and its passes are
    the runner's CUDA graphs. Without a `runner`, the host loop calls the models as they are.
    """

    runner: GpuRunner | None
    fallback: str  # why the GPU runner does not decode the request; empty if it does


class Dispatcher:
    """Chooses the Route of each request. It builds the GPU runner when it is first needed."""

    def __init__(self, target: Target, drafter: Drafter, options: GpuOptions):
        self.target, self.drafter, self.options = target, drafter, options
        self._built: Route | None = None
        self._warned = False
        self._paged: tuple[GpuRunner, object, Paged] | None = None  # and what it was made for
        self.batch_fallback = ""  # why several requests do not run on the GPU runner; empty if they do

    @property
    def wants_graphs(self) -> bool:
        """Whether passes should run as CUDA graphs."""
        wanted = self.options.graphs
        return self.target.device.type == "cuda" if wanted is None else wanted

    def build(self) -> Route:
        """The GPU runner of this target and drafter, or the reason why there is none."""
        if self._built is None:
            self._built = self._make_runner()
            self._warn_if_inexact(self._built)
        return self._built

    def _make_runner(self) -> Route:
        if not self.wants_graphs:
            return Route(None, "graphs are off")
        from windfall.engine.gpu.runner import GpuRunner

        return Route(*GpuRunner.of(self.target, self.drafter, self.options))

    def _warn_if_inexact(self, built: Route) -> None:
        """Warn once if exact passes are asked for, but text may differ all the same.

        Text in full precision differs only where layers are quantised, and where rows depend on each other. The latter
        also holds on a CPU, in any precision.
        """
        reason = built.fallback if built.runner is None else built.runner.gpu_target.inexact_reason
        dtype, on_gpu = self.target.decoder.dtype, self.wants_graphs or self.target.device.type == "cuda"
        inexact = reason and on_gpu and (dtype not in FULL_PRECISION or self.target.has_own_products)
        if self._warned or not self.options.exact or not (inexact or self.target.rows_depend):
            return
        own = self.target.has_own_products
        if not inexact:
            reason = f"{'in its quantised layers ' if own else ''}a row depends on the other rows of a pass"
        self._warned = True
        name, precision = self.target.name, str(dtype).removeprefix("torch.")
        warnings.warn(
            f"the text of {name} in {precision} may differ from plain decoding's where two tokens are almost equally "
            f"likely, because this model does not run in exact passes ({reason}); `windfall audit` counts the "
            f"differences{'' if own or self.target.rows_depend else ', and float32 avoids them'}",
            InexactWarning,
            stacklevel=2,
        )

    def paged(self, policy: TreePolicy, online_costs: OnlineCosts, seats: int, memory: int | None) -> Paged | None:
        """Runs requests with this policy on a KV cache in pages; None if pages are off or there is no GPU runner.

        It is kept, with its captured graphs and known pages, until one of these changes. `batch_fallback` says why it
        has no rounds.
        """
        self._drop_outdated()
        built, key = self.build(), (policy, seats, memory)
        if built.runner is None or not self.options.pages:
            self.batch_fallback = built.fallback or "pages are off"
            return None
        if self._paged is None or self._paged[:2] != (built.runner, key):
            from windfall.engine.gpu.batch.build import paged

            self._release_pages()
            self._paged = (built.runner, key, paged(built.runner, policy, online_costs, seats, memory))
        made = self._paged[2]
        self.batch_fallback = made.reason
        return made

    def forget_prefixes(self) -> None:
        """Let the runner for batches process prompts again that it has processed before; no request may run."""
        if self._paged is not None and self._paged[2].target is not None:
            self._paged[2].target.cache.pool.clear()

    def _release_pages(self) -> None:
        """Free the memory of the pages: that of others may be a share of what is free."""
        old, self._paged = self._paged, None
        if old is not None:
            old[2].close()
            del old
            if self.target.device.type == "cuda":
                torch.cuda.empty_cache()

    def _drop_outdated(self) -> None:
        """Forget the runner if the model has changed."""
        if self._built is not None and self._built.runner is not None and self._built.runner.outdated:
            self.forget_runner()

    def forget_runner(self) -> None:
        """Build a new GPU runner for the next request."""
        self._built = self._paged = None

    def route(self, sequences: list[Sequence], costs: Costs) -> Route:
        """How these sequences run, which are decoded together.

        A runner that decodes a request finds out itself whether the model has changed, while the device works.
        """
        if len(sequences) > 1:
            return Route(None, SEVERAL_TEXTS)
        (sequence,) = sequences
        if len(sequence.tokens) < 2:
            return Route(None, "its prompt is a single token")
        if self._built is not None and self._built.runner is not None and self._built.runner.moved:
            self.forget_runner()
        built = self.build()
        if built.runner is None:
            return built
        reason = built.runner.unsupported_reason(sequence, sequence.context(costs))
        if reason and built.runner.outdated:
            self.forget_runner()
            return self.route(sequences, costs)
        return Route(built.runner, reason)
