"""How requests run: on the GPU runner, on the host loop with its graphs, or on the host loop alone."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.core.types import GpuOptions
from windfall.drafters.lm import LMDrafter
from windfall.engine.engine import Engine
from windfall.model.target import Target


def engine(graphs: bool) -> Engine:
    policy = registry.policy("beam", depth=2, k=2, nodes=4)
    return Engine(Target(tiny(num_hidden_layers=1)), LMDrafter(), policy, gpu_options=GpuOptions(graphs))


@pytest.fixture(scope="module")
def on_gpu() -> Engine:
    """An engine with a GPU runner, which works on a CPU too."""
    return engine(graphs=True)


@pytest.mark.parametrize(
    ("text", "sampling", "fallback"),
    [
        (prompt(), {}, ""),
        ([1], {}, "its prompt is a single token"),
        (prompt(), {"repetition_penalty": 1.2}, "its sampling looks at the text so far"),
    ],
)
def test_an_engine_says_why_a_text_does_not_run_on_the_gpu_runner(
    on_gpu: Engine, text: list[int], sampling: dict[str, Any], fallback: str
) -> None:
    on_gpu.generate(text, max_new_tokens=2, **sampling)
    assert on_gpu.fallback == fallback
    assert on_gpu.gpu_runner is not None and on_gpu.gpu_unavailable == ""


def test_batches_run_on_the_host_loop(on_gpu: Engine) -> None:
    on_gpu.generate_batch([prompt(), prompt(seed=1)], max_new_tokens=2)
    assert on_gpu.fallback == "several texts go together"


def test_without_graphs_there_is_no_gpu_runner() -> None:
    made = engine(graphs=False)
    made.generate(prompt(), max_new_tokens=2)
    assert made.fallback == "graphs are off"
    assert made.gpu_runner is None and made.gpu_unavailable == ""
