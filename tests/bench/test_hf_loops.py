"""transformers' continuous batching writes the texts of its `generate`."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from helpers.tiny import prompt, tiny
from windfall.bench.hf_generate import hf_generate
from windfall.bench.runner import Case
from windfall.bench.tasks import Prompt
from windfall.bench.throughput.hf_loops import continuous_server
from windfall.core.types import SamplingParams

PARAMS = SamplingParams(max_new_tokens=5, temperature=0.0, eos=())


@pytest.mark.parametrize("inference", [False, True])
def test_continuous_batching_runs_in_its_own_thread(inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It also runs if its caller is in inference mode."""
    small = partial(transformers.ContinuousBatchingConfig, max_batch_tokens=64, num_blocks=8)
    monkeypatch.setattr(transformers, "ContinuousBatchingConfig", small)
    elsewhere = SimpleNamespace(type="cuda")  # on a CPU it is left out of the benchmarks
    target: Any = SimpleNamespace(model=tiny(num_hidden_layers=2), eos=(), device=elsewhere)
    cases = [Case(Prompt("t", "", str(seed), ("",)), prompt(seed=seed), PARAMS) for seed in range(3)]
    with torch.inference_mode(inference), continuous_server(target, 0.0, 2) as serve:
        made = [list(answer.tokens) for answer in serve(cases, 2)]
    target.device = torch.device("cpu")
    assert made == [hf_generate(target, [case.ids], PARAMS)[0] for case in cases]
