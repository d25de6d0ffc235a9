"""The embedded 135M model, as a user meets it. Few tests: each pass takes its tenth of a second."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import windfall
from windfall import registry
from windfall.cli import app
from windfall.engine import Engine
from windfall.target import Target

pytestmark = pytest.mark.slow
LIMERICK = "Write a limerick about trees."


@pytest.fixture(scope="module")
def target() -> Target:
    torch.set_num_threads(2)
    return windfall.load(policy="none").target


def test_greedy_is_transformers_own(target: Target) -> None:
    engine = Engine(target, registry.drafter("ngram"), registry.policy("beam"))
    ids = engine.encode(LIMERICK)
    inputs = torch.tensor([ids])
    wanted = target.model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=24)[
        0, len(ids) :
    ]
    assert engine.generate(LIMERICK, max_new_tokens=24).token_ids == wanted.tolist()


def test_sampled_text_does_not_depend_on_the_draft(target: Target) -> None:
    texts = set()
    for drafter, policy in (("ngram", "none"), ("ngram", "beam"), ("self", "fixed-tree"), ("lm", "chain")):
        engine = Engine(target, registry.drafter(drafter), registry.policy(policy))
        generation = engine.generate(LIMERICK, max_new_tokens=16, temperature=0.8, top_p=0.95, seed=11)
        texts.add(tuple(generation.token_ids))
    assert len(texts) == 1
    assert generation.stats.tau > 1.2  # the small model that comes along


def test_stop_string(target: Target) -> None:
    engine = Engine(target, registry.drafter("ngram"), registry.policy("beam"))
    whole = engine.generate(LIMERICK, max_new_tokens=20)
    stop = whole.text.split()[6]
    cut = engine.generate(LIMERICK, max_new_tokens=20, stop=(stop,))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_the_command_line_compares() -> None:
    run = CliRunner().invoke(app, ["generate", LIMERICK, "--compare", "--json", "--max-new-tokens", "12"])
    assert run.exit_code == 0, run.output
    result = json.loads(run.stdout)
    assert result["equal"] is True
    assert result["token_ids"] == result["plain"]["token_ids"]
