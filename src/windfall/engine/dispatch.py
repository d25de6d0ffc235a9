"""Decides how a request runs: on the GPU runner, on the host loop with CUDA graphs, or on the host loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from windfall.core.types import GpuOptions
from windfall.costs.curves import Costs
from windfall.drafters.base import Drafter
from windfall.engine.sequence import Sequence
from windfall.model.target import Target

if TYPE_CHECKING:
    from windfall.engine.gpu.runner import GpuRunner


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

    @property
    def wants_graphs(self) -> bool:
        """Whether passes should run as CUDA graphs."""
        wanted = self.options.graphs
        return self.target.device.type == "cuda" if wanted is None else wanted

    def build(self) -> Route:
        """The GPU runner of this target and drafter, or the reason why there is none."""
        if self._built is None and not self.wants_graphs:
            self._built = Route(None, "graphs are off")
        elif self._built is None:
            from windfall.engine.gpu.runner import GpuRunner

            self._built = Route(*GpuRunner.of(self.target, self.drafter, self.options))
        return self._built

    def route(self, sequences: list[Sequence], costs: Costs) -> Route:
        """How these sequences run, which are decoded together."""
        if len(sequences) > 1:
            return Route(None, "several texts go together")
        (sequence,) = sequences
        if len(sequence.tokens) < 2:
            return Route(None, "its prompt is a single token")
        if self._built is not None and self._built.runner is not None and self._built.runner.outdated:
            self._built = None
        built = self.build()
        if built.runner is None:
            return built
        return Route(built.runner, built.runner.unsupported_reason(sequence, sequence.context(costs)))
