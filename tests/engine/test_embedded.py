"""The embedded 135M model, as users run it. There are few tests and short texts: a pass takes a tenth of a second."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import windfall
from windfall import registry
from windfall.checkpoints import bundled
from windfall.checkpoints.find import DEFAULT
from windfall.cli import app
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.engine.engine import Engine
from windfall.heads.formats.eagle3 import AUX
from windfall.heads.loading import find_head
from windfall.heads.probe import HeadWarning
from windfall.model.target import Target

pytestmark = pytest.mark.slow
LIMERICK = "Write a limerick about trees."


@pytest.fixture(scope="module")
def target() -> Target:
    return windfall.load(policy="none").target


def test_greedy_text_equals_transformers_and_ends_at_a_stop_string(target: Target) -> None:
    engine = Engine(target, registry.drafter("ngram"), registry.policy("beam"))
    ids = engine.encode(LIMERICK)
    inputs = torch.tensor([ids])
    out = target.model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=14)
    whole = engine.generate(LIMERICK, max_new_tokens=14)
    assert whole.token_ids == out[0, len(ids) :].tolist()
    stop = whole.text.split()[6]
    cut = engine.generate(LIMERICK, max_new_tokens=14, stop=(stop,))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_sampled_text_does_not_depend_on_the_draft(target: Target) -> None:
    texts = set()
    for drafter, policy in (("ngram", "none"), ("self", "chain"), ("lm", "chain")):
        engine = Engine(target, registry.drafter(drafter), registry.policy(policy))
        generation = engine.generate(LIMERICK, max_new_tokens=12, temperature=0.8, top_p=0.95, seed=11)
        texts.add(tuple(generation.token_ids))
    assert len(texts) == 1
    assert generation.stats.tau > 1.2  # of the small model that comes with the package


@pytest.mark.parametrize("form", ["name", "file in blocks", "object"])
def test_the_head_is_the_default_in_every_form(target: Target, form: str) -> None:
    given = target.model if form == "object" else DEFAULT
    engine = windfall.load(given, policy="none", weights="file" if form == "file in blocks" else None)
    assert isinstance(engine.drafter, FeatureHeadDrafter)


def test_a_head_that_names_the_wrong_layers_gets_the_right_ones(target: Target, tmp_path: Path) -> None:
    """With the wrong layers it guesses 33% of the tokens instead of 42%."""
    folder = shutil.copytree(bundled.FOLDER / "smollm2-135m-instruct", tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    taps = config[AUX]
    del config["eagle_config"], config["norm_output"]
    (folder / "config.json").write_text(json.dumps({**config, AUX: [tap - 1 for tap in taps]}))
    with pytest.warns(HeadWarning, match="something else than it says; chosen: taps 2/15/27, which agrees"):
        head = find_head(folder, target)
    assert list(head.config.taps) == taps and not head.config.flag("norm_output")


def test_the_command_line_compares() -> None:
    run = CliRunner().invoke(app, ["generate", LIMERICK, "--compare", "--json", "--max-new-tokens", "8"])
    assert run.exit_code == 0, run.output
    result = json.loads(run.stdout)
    assert result["equal"] is True
    assert result["token_ids"] == result["plain"]["token_ids"]
