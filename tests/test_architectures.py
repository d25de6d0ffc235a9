"""The most used architectures against transformers, on tiny random models; `python tests/sweep.py` takes all."""

from __future__ import annotations

import re

import pytest
import torch
import transformers

from architectures import build, class_name, names
from sweep import PAGE, Difference, Result, check, compare, isolated, page

COMMON = {
    "deepseek_v3": "equal",
    "falcon": "equal",
    "gemma": "equal",
    "gemma2": "equal",
    "gemma3_text": "equal",
    "glm4": "equal",
    "gpt2": "equal",
    "gpt_bigcode": "equal",
    "gpt_neox": "equal",
    "gpt_oss": "equal",
    "gptj": "equal",
    "granite": "equal",
    "granitemoehybrid, attention only": "equal",
    "llama": "equal",
    "llama4_text": "equal",
    "mistral": "equal",
    "mixtral": "equal",
    "olmo2": "equal",
    "opt": "equal",
    "phi3": "equal",
    "qwen2": "equal",
    "qwen3": "equal",
    "qwen3_moe": "equal",
    "qwen3_next": "refused",
    "smollm3": "equal",
    "starcoder2": "equal",
}


@pytest.mark.parametrize("name", COMMON)
def test_common_architectures_are_exact(name: str) -> None:
    torch.manual_seed(0)
    assert check(name).kind == COMMON[name]


def test_a_wrong_mask_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mistral")
    monkeypatch.setattr(
        "windfall.decoder.within", lambda kind, size, rows, columns: rows[:, :, None] >= columns[:, None]
    )
    monkeypatch.setattr("windfall.target.Target._follows_windows", lambda self: True)
    with pytest.raises(Difference, match="none: logits of token 0 are off by"):
        compare(model)


def test_a_crash_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sweep.check", lambda name: torch._C._abort())
    assert isolated("llama").kind == "finding"


def test_the_page_has_every_architecture() -> None:
    text = PAGE.read_text("utf-8")
    if f"transformers\n{transformers.__version__}," in text:
        assert set(names()) == set(re.findall(r"^\| (.+?) \| \w+ \|", text, re.M)) - {"model type"}
    assert "## Finding" not in text


def test_a_page_tells_what_was_found() -> None:
    results = [Result("llama", "equal"), Result("bart", "refused", "takes no position_ids")]
    text = page(results)
    assert f"| llama | {class_name('llama')} |  |" in text
    assert "| bart | BartForCausalLM | takes no position_ids |" in text
    assert "**refused** (1)" in text
