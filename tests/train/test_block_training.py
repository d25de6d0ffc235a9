"""Training block heads from the job to the drafter: files, resuming, what is shown, and the command line's refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.texts import write_drawn_texts
from helpers.tiny import prompt, tiny
from windfall.cli.train_drafter import _held_out
from windfall.core.errors import InputError
from windfall.drafters.block import BlockDrafter
from windfall.engine.engine import Engine
from windfall.heads.block import BlockHead
from windfall.heads.loading import find_head
from windfall.model.target import Target
from windfall.registry import drafter, policy
from windfall.train.heads import BEST, HeadJob, train_head
from windfall.train.new_block import new_block
from windfall.train.recipe import Recipe
from windfall.train.trainer import CHECKPOINT, Event, Optimizers

RECIPE: dict[str, Any] = {"steps": 12, "batch_tokens": 400, "rate": 1e-2, "validate_every": 4, "save_minutes": 0}
SHAPE = {"vocabulary": 50, "layers": 2, "block": 4, "rank": 6}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny(num_hidden_layers=2))


@pytest.fixture(scope="module")
def texts(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drawn_texts(tmp_path_factory.mktemp("texts"), target, count=8, length=24)


def job_of(texts: Path, out: Path, **changes: Any) -> HeadJob:
    given = {"method": "block", "shape": SHAPE, "tau_texts": 4, **changes}
    job = HeadJob(texts, out, **given)
    job.check()
    return job


def weights(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(out / CHECKPOINT, weights_only=True)["head"]
    return found


def test_a_head_learns_and_then_drafts(tmp_path: Path, texts: Path, target: Target) -> None:
    job = job_of(texts, tmp_path, loss="coupled:0.5,lk:0.5")
    recipe = Recipe(**{**RECIPE, "steps": 50, "validate_every": 25, "optimizer": "muon"})
    events = list(train_head(job, recipe, target))
    assert events[-1].held_out is not None
    found = events[-1].held_out
    assert {"top1", "recall", "tv", "greedy_recall", "tau"} < {*found} and {
        len(found[name]) for name in ("top1", "recall", "tv")
    } == {4}
    assert min(found["recall"]) > 0.5 and found["tau"]["greedy"] > 1.5
    first = next(event.held_out for event in events if event.held_out)
    assert found["tv"][0] < first["tv"][0] and found["loss"] < first["loss"]
    head = find_head(str(tmp_path / BEST), target)
    assert isinstance(head, BlockHead) and head.config.pair == "projected" and head.config.rank == 6
    plain = Engine(target, drafter("ngram"), policy("none"))
    for sampled in ({}, {"temperature": 1.0, "seed": 5}):
        wanted = plain.generate(prompt(6, seed=1), max_new_tokens=20, **sampled)
        engine = Engine(target, BlockDrafter(model=str(tmp_path)), policy("beam", depth=4, k=3, nodes=12))
        given = engine.generate(prompt(6, seed=1), max_new_tokens=20, **sampled)
        assert given.token_ids == wanted.token_ids and given.stats.tau > 1.2
    line = _held_out(events[-1])
    assert "text's token first ." in line and "among candidates ." in line and "tau " in line


@pytest.mark.parametrize("pair", ["projected", "path", "markov"])
def test_a_resumed_training_has_the_same_weights(pair: str, tmp_path: Path, texts: Path, target: Target) -> None:
    given = {"shape": {**SHAPE, "pair": pair}, "loss": "coupled"}
    whole = list(train_head(job_of(texts, tmp_path / "whole", **given), Recipe(**RECIPE), target))
    events = train_head(job_of(texts, tmp_path / "cut", **given), Recipe(**RECIPE), target)
    before = [next(events), next(events)]
    events.close()  # as if killed after step 8
    after = list(train_head(job_of(texts, tmp_path / "cut", **given, resume=True), Recipe(**RECIPE), target))

    def figures(events: list[Event]) -> list[Any]:
        return [(event.step, event.loss, event.held_out) for event in events if event.held_out]

    assert figures([*before, *after]) == figures(whole)
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(InputError, match="resume with the same settings"):
        job_of(texts, tmp_path / "cut", **{**given, "shape": {**SHAPE, "pair": "none"}}, resume=True)


def test_a_trained_head_can_be_trained_further(tmp_path: Path, texts: Path, target: Target) -> None:
    recipe = Recipe(**{**RECIPE, "steps": 4})
    list(train_head(job_of(texts, tmp_path / "first"), recipe, target))
    start = find_head(str(tmp_path / "first"), target)
    again = job_of(texts, tmp_path / "second", init=str(tmp_path / "first"), shape={})
    [*_, last] = train_head(again, recipe, target)
    assert last.held_out and json.loads((tmp_path / "second/job.json").read_text())["method"] == "block"
    moved = weights(tmp_path / "second")["pair.scale"]
    assert start.pair is not None and not torch.equal(moved, start.pair.scale.float())
    with pytest.raises(InputError, match="leave out --block"):
        job_of(texts, tmp_path / "third", init=str(tmp_path / "first"), shape={"block": 4})


def test_tables_of_tokens_are_not_matrices_for_muon(target: Target) -> None:
    head = new_block(target, {"pair": "selector", "rank": 6})
    muon, adam = Optimizers(head, Recipe(steps=1, optimizer="muon")).parts
    others = [id(p) for group in adam.param_groups for p in group["params"]]
    assert head.pair is not None and id(head.pair.before) in others and id(head.pair.after) in others
    assert any(p is head.pair.hidden.weight for group in muon.param_groups for p in group["params"])


def test_training_with_a_half_precision_target(tmp_path: Path, texts: Path) -> None:
    target = Target(tiny(num_hidden_layers=2, dtype=torch.bfloat16))
    [*_, last] = train_head(job_of(texts, tmp_path, loss="lk"), Recipe(**{**RECIPE, "steps": 2}), target)
    assert last.held_out and all(tensor.dtype == torch.float32 for tensor in weights(tmp_path).values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": {"layers": 7}}, "--layers must be between 2 and 5"),
        ({"shape": {"pair": "magic"}}, "--pair must be one of"),
        ({"method": "ttt", "shape": {"block": 8}}, "--block is for block heads"),
        ({"method": "medusa", "shape": {"bidirectional": True}}, "--bidirectional is for block heads"),
        ({"settings": ["share=2"]}, "share must be at least 0.01 and at most 1"),
        ({"settings": ["step_weights=decay"]}, "step_weights must be one of exp, dpace"),
        ({"loss": "magic"}, "there is no loss 'magic'"),
    ],
)
def test_impossible_jobs_are_refused(changes: dict[str, Any], message: str, tmp_path: Path, texts: Path) -> None:
    with pytest.raises(InputError, match=message):
        job_of(texts, tmp_path, **changes)
