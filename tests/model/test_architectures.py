"""The most used architectures against transformers, on tiny random models; `python tests/sweep.py` takes all."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from helpers.architectures import build, class_name, names
from sweep import PAGE, TREES, Difference, Result, check, compare, isolated, main, page
from windfall import registry
from windfall.engine.engine import Engine
from windfall.model.target import Target

COMMON = [
    "falcon",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_oss",
    "granitemoehybrid, attention only",
    "llama",
    "mistral",
    "olmo2",
    "opt",
    "phi3",
    "qwen2",
    "qwen3",
]
FORWARDS = {  # how a GPU runs their passes
    "cohere2": "fused",
    "deepseek_v3": "mask, no pages",
    "gptj": "mask, no pages",
    "llama4_text": "windfall's attention",
    "qwen3_moe": "fused",
    "stablelm": "windfall's attention",
}


@pytest.mark.parametrize("name", [*COMMON, *FORWARDS])
def test_common_architectures_are_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sweep.NEW", 6)  # fewer tokens than in the sweep, to save time
    if name in COMMON:  # that those without windows are exact on fixed buffers is tested elsewhere
        monkeypatch.setattr("sweep._compare_in_fixed_buffers", lambda *_: "not compared")
    torch.manual_seed(0)
    assert check(name) == Result(name, "equal", forward=FORWARDS.get(name, "not compared"))


def test_an_architecture_that_keeps_a_state_is_refused() -> None:
    assert check("qwen3_next").kind == "refused"


def test_a_wrong_mask_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mistral")
    monkeypatch.setattr(
        "windfall.model.decoder.within", lambda kind, size, rows, columns: rows[:, :, None] >= columns[:, None]
    )
    monkeypatch.setattr("windfall.model.target.Target._follows_windows", lambda self: True)
    with pytest.raises(Difference, match="none: logits of token 0 are off by"):
        compare(model)


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (lambda name: os._exit(3), "the process ended with exit code 3"),
        (lambda name: time.sleep(60), "no result within"),
    ],
)
def test_a_crash_and_a_timeout_are_findings(monkeypatch: pytest.MonkeyPatch, failure: Any, why: str) -> None:
    monkeypatch.setattr("sweep.check", failure)
    result = isolated("llama", seconds=1 if "within" in why else 60)
    assert result.kind == "finding"
    assert why in result.why


def test_a_sweep_resumes_from_its_state_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def answer(name: str) -> Result:
        asked.append(name)
        return Result(name, "finding" if name == "opt" else "equal")

    monkeypatch.setattr("sweep.check", lambda name: None)
    monkeypatch.setattr("sweep.isolated", answer)
    state = ["--state", str(tmp_path / "state.json")]
    assert main(["llama", *state]) == 0
    assert main(["llama", "opt", "gpt2", *state]) == 1
    assert asked == ["llama", "opt", "gpt2"]
    with pytest.raises(SystemExit):
        main(["no-such-type"])


def test_trees_of_the_sweep_have_accepted_and_rejected_nodes() -> None:
    target = Target(build("llama"))
    for drafter, (policy, settings) in list(TREES.items())[:2]:
        engine = Engine(target, registry.drafter(drafter), registry.policy(policy, **settings))
        steps = engine.generate(list(range(1, 19)), max_new_tokens=16).steps
        assert any(step.accepted for step in steps)
        assert any(len(step.tree) > step.accepted + 1 for step in steps)


def test_the_page_has_every_architecture() -> None:
    text = PAGE.read_text("utf-8")
    tables = text[text.index("## Equal") :]
    if re.search(rf"transformers\s+{re.escape(transformers.__version__)},", text):
        assert set(names()) == set(re.findall(r"^\| (.+?) \| \w+ \|", tables, re.M)) - {"model type"}
    assert "## Finding" not in text


def test_a_page_lists_results_and_reasons() -> None:
    results = [Result("llama", "equal", forward="fused"), Result("bart", "refused", "takes no position_ids")]
    text = page(results)
    assert f"| llama | {class_name('llama')} | fused |  |" in text
    assert "| bart | BartForCausalLM | takes no position_ids |" in text
    assert "**refused** (1)" in text
