"""Requests that run one after the other, each as it would alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.gpu import engine
from helpers.tiny import prompt
from windfall.engine.host_runner import HostRunner
from windfall.engine.lone_runner import LoneRunner
from windfall.engine.serial_runner import SerialRunner
from windfall.engine.split_runner import SplitRunner

LENGTH = 12


@pytest.mark.parametrize("policy", ["auto", "bandit"])
def test_requests_that_need_the_host_write_the_texts_that_they_write_alone(policy: str) -> None:
    """On the paths of a GPU: beside requests in pages, or where the policy itself decides on the host."""
    made = engine("llama", "eagle3", policy, graphs=True, exact=True)
    runner = made._batch_runner()
    others = runner.second if isinstance(runner, SplitRunner) else runner
    assert isinstance(others, LoneRunner)
    penalty: dict[str, Any] = {"repetition_penalty": 1.3, "temperature": 1.0}
    asked = [(prompt(9 + number, number), {"seed": number, **(penalty if number % 2 else {})}) for number in range(5)]
    asked.append((prompt(20), {"logprobs": 2}))
    common: dict[str, Any] = {"max_new_tokens": LENGTH, "eos": ()}
    alone = [made.generate(text, **common, **sampling) for text, sampling in asked]
    handles = [made.submit(text, **common, **sampling) for text, sampling in asked]
    together = [handle.result(60) for handle in handles]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert together[-1].logprobs is not None
    made.close()


def test_a_request_with_another_policy_runs_beside_the_others() -> None:
    made = engine("llama", "eagle3", "auto", graphs=True, exact=True)
    alone = made.generate(prompt(9), max_new_tokens=LENGTH, eos=()).token_ids
    names = (None, "beam", "svip")
    handles = [made.submit(prompt(9), max_new_tokens=LENGTH, eos=(), policy=name) for name in names]
    assert [handle.result(60).token_ids for handle in handles] == [alone] * 3
    made.close()


def decode(name: Any) -> Iterator[Any]:
    """The steps of a sequence, here its letters; "!" is an error."""
    for letter in name:
        if letter == "!":
            raise ValueError(name)
        yield letter


def test_the_first_runs_until_it_leaves() -> None:
    runner: Any = SerialRunner(decode)
    assert runner.round() == {}
    runner.join(["abc", "xyz"])
    assert [runner.round() for _ in range(2)] == [{"abc": "a"}, {"abc": "b"}]
    runner.join(["m!"])
    runner.leave(["xyz", "unknown"])
    assert runner.round() == {"abc": "c"}
    runner.leave(["abc"])
    assert runner.round() == {"m!": "m"}
    (error,) = runner.round().values()
    assert isinstance(error, ValueError)
    runner.leave(["m!"])
    assert runner.round() == {}


def test_one_that_comes_back_begins_again_with_what_it_has() -> None:
    runner: Any = SerialRunner(decode)
    runner.join(["abc", "xyz"])
    runner.round()
    runner.leave(["abc"])
    assert runner.round() == {"xyz": "x"}
    runner.join(["abc"])
    runner.leave(["xyz"])
    assert runner.round() == {"abc": "a"}


@pytest.mark.usefixtures("no_interface")
def test_models_without_exact_passes_are_decoded_together() -> None:
    made = engine("gpt2", "itself", "auto", graphs=True)
    assert made.gpu_runner is not None and not made.exact_passes
    assert isinstance(made._batch_runner(), HostRunner)


def test_a_long_serial_request_keeps_the_graphs_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers of single texts grow, and the graphs that use them are dropped; rounds have buffers of their own."""
    made = engine("llama", "eagle3", "auto", graphs=True, max_position_embeddings=8192)
    runner = made._batch_runner()
    assert isinstance(runner, SplitRunner)
    state, cache = runner.first.state, runner.first.gpu_target.graph_cache
    monkeypatch.setitem(cache.graphs, ("round", state), object())
    monkeypatch.setitem(cache.graphs, ("single text",), object())
    runner.first.gpu_target.resize(4096)
    assert [*cache.graphs] == [("round", state)]
    cache.forget(state)
    assert not cache.graphs
