"""Training heads: the loop learns, resumes to the same losses and keeps the best head."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.cli import refused, windfall
from helpers.random_heads import random_head
from helpers.stepping import head_training
from helpers.texts import write_drawn_texts, write_texts
from helpers.tiny import prompt, tiny
from windfall.checkpoints.bundled import TARGET, made_for
from windfall.core.errors import InputError
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.engine.engine import Engine
from windfall.engine.loading import as_drafter
from windfall.heads import formats
from windfall.heads.files import locate
from windfall.heads.loading import find_head
from windfall.heads.probe import HeadWarning
from windfall.model.target import Target
from windfall.registry import drafter, policy
from windfall.train.heads import BEST, HeadJob, initial_head, most_frequent, train_head
from windfall.train.objectives import objective
from windfall.train.objectives.ttt import TrainingTimeTest
from windfall.train.recipe import Recipe
from windfall.train.shards import FinishedPrompt, Text, TokenData, token_counts, write_metadata, write_shard
from windfall.train.teacher import Teacher
from windfall.train.trainer import CHECKPOINT, Event, Optimizers, Trainer, Workers, cudnn_attention_disabled

RECIPE: dict[str, Any] = {"steps": 30, "batch_tokens": 240, "rate": 1e-2, "validate_every": 10, "save_minutes": 0}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny(num_hidden_layers=2))


@pytest.fixture(scope="module")
def texts(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"), target.model, count=8, length=18)


def train(
    out: Path, texts: Path, target: Target, resume: bool = False, light: bool = False, **changes: Any
) -> list[Event]:
    job = HeadJob(texts, out, settings=["steps=3"], resume=resume, light=light, shape={"vocabulary": 50})
    job.check()
    return list(train_head(job, Recipe(**{**RECIPE, **changes}), target))


def figures(events: list[Event]) -> list[tuple[Any, ...]]:
    return [(event.step, event.loss, event.hits, event.held_out) for event in events]


def test_a_head_learns_and_then_drafts(tmp_path: Path, texts: Path, target: Target) -> None:
    events = train(tmp_path, texts, target, steps=90, batch_tokens=720, validate_every=30, save_minutes=9)
    assert events[-1].step == 90 and events[-1].progress == 1
    assert events[-1].loss < events[0].loss and min(events[-1].hits) > 0.7 > 0.5 > max(events[0].hits)
    engine = Engine(target, FeatureHeadDrafter(model=str(tmp_path / BEST)), policy("chain", depth=3))
    plain = Engine(target, drafter("ngram"), policy("none")).generate(prompt(6, seed=7), max_new_tokens=18)
    drafted = engine.generate(prompt(6, seed=7), max_new_tokens=18)
    assert drafted.token_ids == plain.token_ids and drafted.stats.tau > 2


@pytest.fixture(scope="module")
def drawn_texts(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy texts and texts at temperature 1."""
    return write_drawn_texts(tmp_path_factory.mktemp("drawn"), target, length=18)


@pytest.mark.parametrize("loss", ["lk", "match", "coupled:0.5,tv:0.5"])
def test_every_loss_falls_and_its_head_drafts(tmp_path: Path, drawn_texts: Path, target: Target, loss: str) -> None:
    job = HeadJob(drawn_texts, tmp_path, loss=loss, settings=["steps=2", "step_weights=dpace"])
    job.check()
    recipe = Recipe(steps=60, batch_tokens=720, rate=1e-2, validate_every=30)
    validations = [event.held_out for event in train_head(job, recipe, target) if event.held_out]
    first, last = validations[0], validations[-1]
    assert last["loss"] < first["loss"] and {*last["tau"]} == {"greedy", "coupled"}
    assert min(last["tau"].values()) > 1.5, "it has seen these texts"
    head = drafter("head", model=str(tmp_path / BEST))
    for sampled in ({}, {"temperature": 1.0, "seed": 3}):
        plain, drafted = (
            Engine(target, *parts).generate(prompt(6, seed=2), max_new_tokens=18, **sampled)
            for parts in ((drafter("ngram"), policy("none")), (head, policy("beam", depth=3, k=3, nodes=10)))
        )
        assert drafted.token_ids == plain.token_ids and drafted.stats.tau > 1


@pytest.mark.parametrize("method", ["ttt", "medusa"])
def test_losses_in_half_precision(tmp_path: Path, drawn_texts: Path, method: str) -> None:
    job = HeadJob(drawn_texts, tmp_path, method=method, loss="coupled,match,lk,kl", settings=["step_weights=dpace"])
    recipe = Recipe(steps=2, batch_tokens=720)
    [last] = train_head(job, recipe, Target(tiny(num_hidden_layers=2, dtype=torch.bfloat16)))
    assert last.held_out and math.isfinite(last.held_out["loss"]) and {*last.held_out["tau"]} == {"greedy", "coupled"}


def test_tau_is_recorded_and_shown(tmp_path: Path, drawn_texts: Path) -> None:
    tiny(num_hidden_layers=2).save_pretrained(tmp_path / "model")
    words = ["train", "head", drawn_texts, "--target", tmp_path / "model", "--steps", 2, "--out"]
    done = windfall(*words, tmp_path / "out", "--loss", "lk")
    assert done.exit_code == 0 and re.search(r"tau \d\.\d\d greedy \d\.\d\d coupled", done.output), done.output
    lines = (tmp_path / "out" / "log.jsonl").read_text().splitlines()
    assert {*json.loads(lines[-1])["held_out"]["tau"]} == {"greedy", "coupled"}
    assert json.loads((tmp_path / "out" / "job.json").read_text())["loss"] == "lk"
    done = windfall(*words, tmp_path / "without", "--tau-texts", 0)
    assert done.exit_code == 0 and " greedy" not in done.output


def test_wrong_losses_are_refused(tmp_path: Path, texts: Path) -> None:
    words = ["train", "head", texts, "--out", tmp_path / "out", "--steps", 2]
    assert "there is no loss 'magic'; choose from kl, tv" in refused(*words, "--loss", "magic")
    assert "names and weights above 0" in refused(*words, "--loss", "lk:0")
    assert "not both" in refused(*words, "--loss", "lk", "--set", "loss=kl")
    assert "step_weights must be one of decay, exp, dpace" in refused(*words, "--set", "step_weights=none")


def test_a_killed_training_with_noise_resumes_to_the_same_losses(
    tmp_path: Path, drawn_texts: Path, target: Target
) -> None:
    def job(name: str, resume: bool = False) -> HeadJob:
        return HeadJob(drawn_texts, tmp_path / name, loss="coupled", settings=["steps=2"], resume=resume, tau_texts=2)

    recipe = Recipe(**RECIPE | {"steps": 20})
    whole = figures(list(train_head(job("whole"), recipe, target)))
    events = train_head(job("cut"), recipe, target)
    before = [next(events)]
    events.close()
    assert figures(before + list(train_head(job("cut", resume=True), recipe, target))) == whole
    with pytest.raises(InputError, match="was trained with loss coupled"):
        HeadJob(drawn_texts, tmp_path / "cut", loss="lk", settings=["steps=2"], resume=True).check()


def test_a_killed_training_resumes_to_the_same_losses(tmp_path: Path, texts: Path, target: Target) -> None:
    whole = figures(train(tmp_path / "whole", texts, target))
    job = HeadJob(texts, tmp_path / "cut", settings=["steps=3"], shape={"vocabulary": 50})
    events = train_head(job, Recipe(**RECIPE), target)
    before = [next(events) for _ in range(2)]
    events.close()  # as if killed after step 20
    after = train(tmp_path / "cut", texts, target, resume=True)
    assert figures(before + after) == whole
    with pytest.raises(InputError, match="rate was "):
        train(tmp_path / "cut", texts, target, resume=True, rate=1e-3)


@pytest.mark.parametrize("place", ["report", "step"])
def test_ctrl_c_keeps_all_finished_steps(
    place: str, tmp_path: Path, texts: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = figures(train(tmp_path / "whole", texts, target, save_minutes=9))
    owner: Any = TrainingTimeTest if place == "report" else Optimizers
    usual, calls = getattr(owner, place), []

    def interrupted(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 16:
            signal.raise_signal(signal.SIGINT)
        return usual(*given)

    monkeypatch.setattr(owner, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", texts, target, save_minutes=9)
    monkeypatch.undo()
    kept = torch.load(tmp_path / "cut" / CHECKPOINT, weights_only=True)["step"]
    assert kept == (16 if place == "step" else 14)  # one of the reports is of the validation at step 10
    after = figures(train(tmp_path / "cut", texts, target, resume=True, save_minutes=9))
    assert [each for each in after if each[0] == 30] == [each for each in whole if each[0] == 30]


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_background_thread_prepares_batches_until_the_training_ends(
    error: type[BaseException] | None, tmp_path: Path, texts: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers, padded = [], TokenData.padded

    def recorded(self: TokenData, *given: Any) -> Any:
        makers.append(threading.current_thread())
        return padded(self, *given)

    monkeypatch.setattr(TokenData, "padded", recorded)
    events = train_head(HeadJob(texts, tmp_path, settings=["steps=1"]), Recipe(**RECIPE), target)
    next(events)
    if error is None:
        events.close()
    else:
        monkeypatch.setattr(Optimizers, "step", lambda *_: (_ for _ in ()).throw(error))
        with pytest.raises(error):
            next(events)
    others = {maker for maker in makers if maker is not threading.current_thread()}
    assert len(others) == 1 and not others.pop().is_alive()


def test_a_paused_training_goes_on(tmp_path: Path, texts: Path, target: Target) -> None:
    [*_, whole] = train(tmp_path / "whole", texts, target)
    job = HeadJob(texts, tmp_path / "cut", settings=["steps=3"], shape={"vocabulary": 50}, pause_after=0)
    [paused] = train_head(job, Recipe(**RECIPE), target)
    assert paused.step == 1 and paused.best and (tmp_path / "cut" / BEST).is_dir()
    [*_, last] = train(tmp_path / "cut", texts, target, resume=True)
    assert figures([last]) == figures([whole])


def test_a_resumed_head_keeps_its_vocabulary(
    tmp_path: Path, texts: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = HeadJob(texts, tmp_path, settings=["steps=1"], shape={"vocabulary": 20}, pause_after=0)
    list(train_head(job, Recipe(**RECIPE), target))
    before = formats.read(tmp_path / BEST).draft_tokens
    monkeypatch.setattr("windfall.train.heads.token_counts", lambda data: -token_counts(data))  # as of other texts
    events = list(train_head(replace(job, resume=True, pause_after=None), Recipe(**RECIPE), target))
    assert any(event.best for event in events)
    assert torch.equal(formats.read(tmp_path / BEST).draft_tokens, before)


def test_accumulating_passes_is_one_step(tmp_path: Path, texts: Path, target: Target) -> None:
    [*_, last] = train(tmp_path, texts, target, steps=10, accumulate=3)
    assert last.step == 10 and last.tokens > 20 * 240 * 0.5


def test_training_with_muon(tmp_path: Path, texts: Path, target: Target) -> None:
    events = train(tmp_path, texts, target, optimizer="muon")
    assert events[-1].loss < 0.9 * events[0].loss


def test_each_worker_prepares_its_share_of_the_batches(
    tmp_path: Path, texts: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several epochs, and from the step at which a training is resumed."""
    trainer = head_training(texts, tmp_path, target, "eagle", {"batch_tokens": 100}).trainer
    prepared: list[list[int]] = []

    def recorded(_: TokenData, indices: list[int], most: int) -> Any:
        prepared.append(indices)
        return indices

    monkeypatch.setattr(TokenData, "padded", recorded)
    data, trainer.step = TokenData.open(texts), 2
    plans = [data.plan(100, trainer.recipe.max_length, 0, epoch) for epoch in range(20)]
    wanted = list(itertools.chain(*plans))
    for rank in range(3):
        trainer.workers.rank, trainer.workers.count = rank, 3
        own = list(itertools.islice(trainer._batches(data), 7))
        assert own == prepared == wanted[6 + rank :: 3][:7] and len(plans[0]) < 7
        prepared.clear()


@pytest.mark.parametrize(("recipe", "agreed"), [({"steps": 3}, False), ({"steps": None, "minutes": 0.02}, True)])
def test_workers_agree_on_the_time_only_if_it_decides(
    recipe: dict[str, Any], agreed: bool, tmp_path: Path, texts: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for each other and for their devices."""
    times: list[float] = []
    monkeypatch.setattr(Workers, "agree", lambda _, number: times.append(number) or number)
    train(tmp_path, texts, target, **recipe)
    assert bool(times) == agreed


def test_a_training_by_minutes_ends(tmp_path: Path, texts: Path, target: Target) -> None:
    [*_, last] = train(tmp_path, texts, target, steps=None, minutes=0.02)
    assert last.progress == 1 and last.held_out


def test_impossible_jobs_are_refused(tmp_path: Path, texts: Path, target: Target) -> None:
    with pytest.raises(InputError, match="either steps or minutes"):
        Recipe(steps=1, minutes=1.0)
    with pytest.raises(InputError, match="no checkpoint"):
        HeadJob(texts, tmp_path, resume=True).check()
    with pytest.raises(InputError, match="no training method 'magic'"):
        HeadJob(texts, tmp_path, method="magic").check()
    with pytest.raises(InputError, match="windfall train data"):
        HeadJob(tmp_path, tmp_path / "out").check()
    train(tmp_path / "done", texts, target, steps=2)
    with pytest.raises(InputError, match="--resume"):
        HeadJob(texts, tmp_path / "done").check()
    (tmp_path / "done" / "checkpoint.pt").write_bytes(b"damaged")
    with pytest.raises(InputError, match="damaged"):
        train(tmp_path / "done", texts, target, resume=True)


def test_unsuitable_texts_are_refused(tmp_path: Path, texts: Path, target: Target) -> None:
    text = Text([1, 2, 3, 4], [False, False, True, True])
    write_metadata(tmp_path, {"target": {"vocab_size": target.vocab_size}})
    write_shard(tmp_path, 0, [FinishedPrompt(1, False, [text])])
    with pytest.raises(InputError, match="no held-out texts"):
        HeadJob(tmp_path, tmp_path / "out").check()
    for words, message in (
        ("[]", "does not name the target"),
        ("{}", "does not name the target"),
        ("{", "cannot read"),
    ):
        (tmp_path / "damaged").mkdir(exist_ok=True)
        (tmp_path / "damaged" / "data.json").write_text(words)
        with pytest.raises(InputError, match=message):
            HeadJob(tmp_path / "damaged", tmp_path / "out").check()
    write_shard(tmp_path, 1, [FinishedPrompt(2, True, [Text([1] * 9 + [2], [False] * 9 + [True])])])
    HeadJob(tmp_path, tmp_path / "out").check()
    with pytest.raises(InputError, match="no held-out text has an answer within its first 8 tokens"):
        train(tmp_path / "out", tmp_path, target, max_length=8)
    with pytest.raises(InputError, match=r"61 tokens; .* has 40"):
        train(tmp_path / "out", texts, Target(tiny(vocab_size=40)))


def test_other_settings_cannot_be_resumed(tmp_path: Path, texts: Path, target: Target) -> None:
    train(tmp_path, texts, target, steps=2)
    for changes, word in (
        ({"method": "hass"}, "method ttt"),
        ({"settings": ["steps=2"]}, "settings"),
        ({"shape": {"vocabulary": 40}}, "shape"),
        ({"init": "x", "shape": {}}, "init None"),
    ):
        given = {"settings": ["steps=3"], "shape": {"vocabulary": 50}} | changes
        with pytest.raises(InputError, match=f"was trained with {word}"):
            HeadJob(texts, tmp_path, resume=True, **given).check()
    with pytest.raises(InputError, match="was trained with target"):
        train(tmp_path, texts, Target(tiny(seed=1, num_hidden_layers=2)), resume=True, steps=2)
    with pytest.raises(InputError, match="leave out --intermediate"):
        HeadJob(texts, tmp_path / "new", init="x", shape={"intermediate": 50, "layers": 1}).check()


def test_an_initial_head_must_fit_the_method(tmp_path: Path, texts: Path, target: Target) -> None:
    train(tmp_path / "first", texts, target, steps=2)
    best = str(tmp_path / "first" / BEST)
    [*_, last] = train_head(HeadJob(texts, tmp_path / "on", init=best), Recipe(**RECIPE | {"steps": 2}), target)
    assert last.step == 2
    with pytest.raises(InputError, match="is a eagle3 head, which the drafter head takes, not medusa"):
        next(train_head(HeadJob(texts, tmp_path / "m", method="medusa", init=best), Recipe(**RECIPE), target))


def test_an_initial_head_can_get_another_vocabulary(tmp_path: Path, texts: Path, target: Target) -> None:
    train(tmp_path / "first", texts, target, steps=2, light=True)
    best, recipe = str(tmp_path / "first" / BEST), Recipe(**RECIPE | {"steps": 2})
    for _ in train_head(
        HeadJob(texts, tmp_path / "on", init=best, light=True, shape={"vocabulary": 60}), recipe, target
    ):
        pass
    first, on = (find_head(str(tmp_path / name / BEST), target) for name in ("first", "on"))
    assert len(first.draft_tokens) == first.config.draft_vocab_size == 50
    assert len(on.draft_tokens) == on.config.draft_vocab_size == 60
    assert set(first.draft_tokens.tolist()) < set(on.draft_tokens.tolist())
    torch.testing.assert_close(on.vocabulary, target.model.get_output_embeddings().weight[on.draft_tokens])


def test_copies_of_the_targets_matrices_are_frozen(tmp_path: Path, texts: Path, target: Target) -> None:
    train(tmp_path, texts, target, steps=2)
    job, method = HeadJob(texts, tmp_path / "x", init=str(tmp_path / BEST)), objective("ttt")
    head = initial_head(job, method, target, TokenData.open(texts))
    assert not head.embed_tokens.weight.requires_grad and not head.lm_head.weight.requires_grad
    assert head.fc.weight.requires_grad


def test_infinite_losses_and_unsupported_dtypes_are_refused(tmp_path: Path, texts: Path, target: Target) -> None:
    with pytest.raises(InputError, match="the loss is not finite at step 10; use a lower --rate"):
        train(tmp_path / "hot", texts, target, rate=1e30, clip=0)
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(InputError, match="--dtype bfloat16 or float32"):
            train(tmp_path / "half", texts, Target(tiny(dtype=dtype)))


def test_muon_is_for_matrices_inside_layers() -> None:
    parts = Optimizers(random_head("eagle3-before-fc"), Recipe(steps=1, optimizer="muon")).parts
    sizes = [{tuple(p.shape) for group in part.param_groups for p in group["params"]} for part in parts]
    assert (61, 32) in sizes[1] and (61, 32) not in sizes[0] and (32, 96) in sizes[0]


def test_an_objective_gets_the_lengths_of_texts(tmp_path: Path, texts: Path, target: Target) -> None:
    seen = []

    class Curious(type(objective("ttt"))):  # type: ignore[misc]
        def report(self, head: Any, outputs: Any, teacher: Any, progress: float) -> Any:
            seen.append(outputs.batch.lengths)
            return super().report(head, outputs, teacher, progress)

    head = objective("ttt").new_head(target, {})
    trainer = Trainer(head, Curious(steps=1), Teacher(target.model, head.config.taps), Recipe(steps=1), tmp_path)
    data = TokenData.open(texts)
    list(trainer.run(data, data, lambda _: None))
    assert all(lengths.tolist() == [24] * 8 for lengths in seen) and seen


def test_the_draft_vocabulary_has_the_most_frequent_tokens(target: Target) -> None:
    counts = torch.zeros(target.vocab_size, dtype=torch.long)
    counts[[7, 3, 50]] = torch.tensor([5, 9, 1])
    assert most_frequent(counts, 2, target).tolist() == [3, 7]
    with pytest.raises(InputError, match="--vocabulary"):
        most_frequent(counts, 0, target)


def test_the_targets_layers_are_compiled_on_request(
    tmp_path: Path, texts: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **_: compiled.append(type(self).__name__.removeprefix("Cpu"))
    )
    train(tmp_path, texts, target, steps=1, compile=True)
    assert compiled == ["LlamaDecoderLayer"] * target.model.config.num_hidden_layers
    compiled.clear()
    monkeypatch.setattr(target.model, "_no_split_modules", None)
    Teacher(target.model, ()).compile()
    assert compiled == [type(target.model.base_model).__name__]


def test_the_output_folder_of_a_training_is_a_drafter(tmp_path: Path, texts: Path, target: Target) -> None:
    train(tmp_path / "out", texts, target, steps=2)
    made = as_drafter(str(tmp_path / "out"))
    assert (made.model, as_drafter(tmp_path / "out" / BEST).model) == (str(tmp_path / "out" / BEST),) * 2
    assert locate(tmp_path / "out") == tmp_path / "out" / BEST


def test_warnings_about_heads_that_hardly_agree_with_the_target(tmp_path: Path, texts: Path, target: Target) -> None:
    train(tmp_path / "out", texts, target, steps=1)
    with pytest.warns(HeadWarning, match="it was made for this model, but trained too little"):
        find_head(str(tmp_path / "out"), target)
    with pytest.warns(HeadWarning, match="tokens: it was made for another model\\. It will hardly"):
        find_head(str(tmp_path / "out"), Target(tiny(seed=5, num_hidden_layers=2)))
    said = tmp_path / "out" / BEST / "config.json"
    config = json.loads(said.read_text())
    del config[TARGET]
    said.write_text(json.dumps(config))
    assert made_for(tmp_path / "out" / BEST, target), "job.json names the target, too"
    (tmp_path / "out" / "job.json").unlink()
    with pytest.warns(HeadWarning, match="it was made for another model, or trained too little"):
        find_head(str(tmp_path / "out"), target)


def test_the_attention_backend_is_restored() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    for setting in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(setting)
        with contextlib.suppress(KeyboardInterrupt), cudnn_attention_disabled(torch.device("cuda")):
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            raise KeyboardInterrupt
        assert torch.backends.cuda.cudnn_sdp_enabled() == setting
    torch.backends.cuda.enable_cudnn_sdp(before)
