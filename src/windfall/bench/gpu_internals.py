"""The benchmark's only access to the internals of the GPU runner (`windfall.engine.gpu`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from windfall.core.types import GpuOptions, SamplingParams
from windfall.engine.engine import Engine
from windfall.engine.gpu.cycle import Cycle
from windfall.engine.gpu.drafters import ChildSampler
from windfall.engine.gpu.host_policy import DRAFT_PASS_SIZES, MAX_STAGED_NODES
from windfall.engine.gpu.rope import has_fixed_angles
from windfall.engine.gpu.runner import GpuRunner
from windfall.engine.gpu.target import MAX_VERIFY_ROWS as MAX_VERIFY_ROWS
from windfall.engine.gpu.target import VERIFY_SIZES, GpuTarget
from windfall.policies.auto import Auto

VERIFY_ROWS = VERIFY_SIZES  # the sizes of verify passes that are timed


def uses_graphs(engine: Engine) -> bool:
    """Whether an engine decodes single texts in CUDA graphs, or in the same way on a CPU."""
    return engine.gpu_runner is not None


def reserve(engines: Iterable[Engine], tokens: int) -> None:
    """Make room for texts of this length at once: when buffers grow later, all CUDA graphs are captured again."""
    for engine in engines:
        if engine.gpu_runner is not None:
            engine.gpu_runner.gpu_target.reserve(tokens + MAX_STAGED_NODES + DRAFT_PASS_SIZES[-1])


def forget_prefixes(engine: Engine) -> None:
    """Let requests process their whole prompts, although earlier requests had the same ones."""
    engine._dispatcher.forget_prefixes()


def has_fixed_rotary_positions(config: Any) -> bool:
    """Whether a model has rotary positions whose frequencies do not depend on the length of the text."""
    return getattr(config, "rope_parameters", None) is not None and has_fixed_angles(config)


@dataclass(frozen=True)
class GpuPasses:
    """Single passes on the fixed buffers of the GPU runner, for timing."""

    runner: GpuRunner
    cycle: Cycle | None = None  # None if the drafter works on the host

    @classmethod
    def of(cls, engine: Engine, options: GpuOptions) -> tuple[GpuPasses | None, str]:
        """The passes of an engine's target and drafter; None, and the reason, if they cannot run in fixed buffers."""
        runner, reason = GpuRunner.of(engine.target, engine.drafter, options)
        return (None if runner is None else cls(runner)), reason

    @property
    def target(self) -> GpuTarget:
        return self.runner.gpu_target

    @property
    def forward_name(self) -> str:
        return type(self.target.forward).__name__

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        layers, heads, width = self.target.forward.shape
        return int(2 * layers * heads * width * self.target.dtype.itemsize)

    def prepared(self, longest: int) -> GpuPasses:
        """The same with buffers for a text of this length."""
        self.target.reserve(longest + 2 * MAX_VERIFY_ROWS)
        if self.runner.drafter_unsupported:
            return GpuPasses(self.runner)
        return GpuPasses(self.runner, Cycle(Auto().plan(), self.runner.drafter_form, self.target))

    def set_length(self, length: int) -> None:
        """Continue after a text of this length, with nothing drafted."""
        self.target.length.fill_(length)
        self.target.length_bound = length
        if self.cycle is not None:
            self.cycle.set_length(length)

    def place(self, length: int, tree: Any) -> None:
        """Put the rows of a tree after a text of this length."""
        self.set_length(length)
        self.target.send_rows(tree)

    def forward(self, rows: int) -> None:
        """The target's forward alone, over the rows that were placed."""
        target = self.target
        columns = target.columns(rows)
        target.graph_cache.refresh(("score", rows, columns, target.capacity), lambda: target.score(rows, columns))

    def verify(self, rows: int) -> None:
        """What a cycle does after its last draft pass: choose rows, forward, draw, walk, gather the cache."""
        cycle = self.cycle
        assert cycle is not None
        columns, params = cycle.gpu_target.columns(rows), SamplingParams()
        key = ("speed", cycle.buffers_id, "verify", rows, columns, cycle.gpu_target.capacity)
        cycle.gpu_target.graph_cache.run(key, lambda: cycle.verify(rows, columns, params))

    def draft(self, passes: int) -> None:
        """The first draft passes of a cycle."""
        cycle = self.cycle
        assert cycle is not None
        sampler = ChildSampler(SamplingParams(), False, cycle.gpu_target.sampling)

        key = ("speed", cycle.buffers_id, "draft", passes, cycle.gpu_target.capacity)
        cycle.gpu_target.graph_cache.run(key, lambda: cycle.draft_passes(passes, sampler))
