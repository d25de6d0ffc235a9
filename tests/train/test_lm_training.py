"""Distilling a smaller language model: it learns, its folder loads, and a training can be resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

import windfall
from helpers.tiny import VOCABULARY, prompt, tiny
from windfall import registry
from windfall.checkpoints import bundled
from windfall.checkpoints.find import load_model
from windfall.cli import app
from windfall.core.types import InputError
from windfall.drafters.lm import LMDrafter
from windfall.engine import profiling
from windfall.engine.engine import Engine
from windfall.heads.loading import find_head
from windfall.model.target import Target
from windfall.train import shards
from windfall.train.batch import Batch
from windfall.train.lm import BEST, Shape, Student, StudentJob, choose_layers, new_student, train_student, write_student
from windfall.train.objectives.distillation import Distillation
from windfall.train.recipe import Recipe
from windfall.train.teacher import Teacher

LENGTH, PROMPT = 32, 4


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny(num_hidden_layers=4), name="tiny")


@torch.no_grad()
def written(model: Any, texts: int, seed: int) -> Tensor:
    """[texts, LENGTH] what the model itself writes after random words."""
    torch.manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (texts, PROMPT))
    while tokens.shape[1] < LENGTH:
        tokens = torch.cat([tokens, torch.softmax(model(tokens).logits[:, -1], -1).multinomial(1)], 1)
    return tokens


@pytest.fixture(scope="module")
def data(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    answer = [place >= PROMPT for place in range(LENGTH)]
    texts = written(target.model, 160, seed=1).tolist()
    block = [shards.FinishedPrompt(key, key < 16, [shards.Text(tokens, answer)]) for key, tokens in enumerate(texts)]
    shards.write_shard(folder, 0, block)
    shards.write_metadata(folder, {"target": {"name": "tiny", "vocab_size": VOCABULARY}})
    return folder


def recipe(**changes: Any) -> Recipe:
    usual: dict[str, Any] = {"steps": 30, "batch_tokens": 1024, "max_length": LENGTH, "rate": 3e-3, "validate_every": 5}
    return Recipe(**usual | changes)


@torch.no_grad()
def top1_agreement(student: Student, target: Target) -> float:
    tokens = written(target.model, 32, seed=2)
    guessed = (student(tokens) @ student.vocabulary.T).argmax(-1)
    return float((guessed == target.model(tokens).logits.argmax(-1)).float().mean())


def student_of(folder: Path, target: Target, shape: Shape) -> Student:
    """A written student, as a module that can be asked."""
    student = new_student(target, shape)
    tensors = {
        name.removeprefix("model."): tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    student.body.load_state_dict(tensors)
    return student.eval()


@pytest.fixture(scope="module")
def trained(target: Target, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lm") / "out"
    events = list(train_student(StudentJob(data, out, shape=Shape("2")), recipe(steps=40, validate_every=10), target))
    assert events[-1].step == 40 and events[-1].loss < events[0].loss
    return out / BEST


def test_the_student_learns_what_the_target_writes(target: Target, trained: Path) -> None:
    untrained = top1_agreement(new_student(target, Shape("2")).eval(), target)
    assert top1_agreement(student_of(trained, target, Shape("2")), target) > untrained + 0.1


def test_a_light_folder_borrows_the_targets_matrices(target: Target, trained: Path) -> None:
    stored, config = load_file(trained / "model.safetensors"), json.loads((trained / "config.json").read_text())
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert not any("embed" in name or "lm_head" in name for name in stored)
    assert config["num_hidden_layers"] == 2 and config["windfall_target"]["name"] == "tiny"
    assert "_name_or_path" not in " ".join(config)
    embedding = target.model.get_input_embeddings().weight.requires_grad_(True)
    model = load_model(trained, device="cpu", lender=target.model).model
    assert embedding.requires_grad and not model.model.layers[0].mlp.down_proj.weight.requires_grad
    embedding.requires_grad_(False)
    assert model.get_input_embeddings() is target.model.get_input_embeddings()
    assert model.get_output_embeddings().weight is target.model.get_output_embeddings().weight
    tokens = torch.tensor([prompt(12)])
    student = student_of(trained, target, Shape("2"))
    torch.testing.assert_close(model(tokens).logits, student(tokens) @ student.vocabulary.T)


def test_the_bundled_model_is_for_one_target_only(
    target: Target, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled, "FOLDER", tmp_path)
    drafter = LMDrafter()
    itself = profiling.describe(Engine(target, drafter, registry.policy("none")))
    assert drafter.decoder.model is target.model  # a check
    shutil.copytree(trained, tmp_path / "small")
    small = profiling.describe(Engine(target, drafter, registry.policy("none")))
    assert drafter.decoder.model.config.num_hidden_layers == 2
    assert small != itself  # profiles depend on the drafter's model
    with pytest.raises(InputError, match="no head"):
        find_head(None, target)
    drafter.attach(other := Target(tiny(seed=1)))
    assert drafter.decoder.model is other.model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_same_seed_gives_same_text_with_borrowed_embeddings(target: Target, trained: Path, temperature: float) -> None:
    how = {"max_new_tokens": 40, "temperature": temperature, "seed": 3}
    plain = windfall.load(target, policy="none").generate(prompt(), **how)
    drafted = windfall.load(target, str(trained), "beam").generate(prompt(), **how)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.tau > 1.2


@pytest.mark.parametrize("older", [False, True])
def test_a_light_folder_refuses_another_target(older: bool, trained: Path, tmp_path: Path) -> None:
    """Older ones have the target's name alone."""
    if older:
        trained = Path(shutil.copytree(trained, tmp_path / "older"))
        config = json.loads((trained / "config.json").read_text())
        (trained / "config.json").write_text(json.dumps({**config, "windfall_target": "tiny"}))
    narrow = Target(tiny(hidden_size=16, intermediate_size=24), name="narrow")
    with pytest.raises(
        InputError, match=r"from tiny \(61 tokens of width 32\); this target has 61 of width 16"
    ) as error:
        LMDrafter(str(trained)).attach(narrow)
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="it can only draft"):
        load_model(trained)


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("qwen2", False), ("qwen3", True)])
def test_a_full_folder_is_an_ordinary_model(family: str, tied: bool, tmp_path: Path) -> None:
    own = Target(tiny(family, num_hidden_layers=4, tie_word_embeddings=tied))
    student = new_student(own, Shape("1,3", intermediate=20, own_embeddings=True))
    write_student(student, tmp_path, own)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert model.config.num_hidden_layers == 2 and model.config.intermediate_size == 20
    tokens = torch.tensor([prompt(12)])
    expected = (student(tokens) @ student.vocabulary.T).float()
    torch.testing.assert_close(model(tokens).logits, expected, atol=0.5, rtol=0.1)  # stored in bf16
    assert model.get_output_embeddings().weight.shape == (VOCABULARY, 32)


def test_a_student_of_all_layers_equals_the_target(target: Target) -> None:
    student = new_student(target, Shape("4"))
    tokens = torch.tensor([prompt(12)])
    torch.testing.assert_close(student(tokens) @ student.vocabulary.T, target.model(tokens).logits)


@pytest.mark.parametrize("family", ["mistral-window", "olmo2", "qwen2"])
def test_layers_are_copied_under_new_numbers(family: str) -> None:
    own = Target(tiny(family, num_hidden_layers=4))
    student = new_student(own, Shape("1,3"))
    given, made = own.model.base_model.layers, student.body.layers
    assert all(torch.equal(a, b) for a, b in zip(given[3].parameters(), made[1].parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(given[1].parameters(), made[0].parameters(), strict=True))
    assert [layer.self_attn.layer_idx for layer in made] == [0, 1]


def test_the_neurons_of_largest_norm_are_kept(target: Target) -> None:
    own = Target(tiny(num_hidden_layers=4))
    mlp = own.model.base_model.layers[0].mlp
    with torch.no_grad():
        for weak in (mlp.gate_proj.weight[:40], mlp.up_proj.weight[:40], mlp.down_proj.weight[:, :40]):
            weak.mul_(1e-4)
    kept, tokens = new_student(own, Shape("1", intermediate=8)), torch.tensor([prompt(12)])
    whole = new_student(own, Shape("1"))
    assert kept.body.layers[0].mlp.gate_proj.weight.shape == (8, 32)
    torch.testing.assert_close(kept(tokens), whole(tokens), atol=1e-4, rtol=1e-4)


def test_own_embeddings_learn_and_borrowed_ones_do_not(target: Target, data: Path) -> None:
    before = target.model.get_input_embeddings().weight.clone()
    batch = Batch(written(target.model, 4, 3), torch.ones(4, LENGTH, dtype=torch.bool))
    teacher = Teacher(target.model, ())
    for shape in (Shape("1"), Shape("1", own_embeddings=True)):
        student = new_student(target, shape)
        Distillation().report(student, teacher.run(batch), teacher, 0.0).loss.backward()
        learning = {name for name, parameter in student.named_parameters() if parameter.grad is not None}
        assert ("own_vocabulary" in learning, "own_embedding" in learning) == 2 * (shape.own_embeddings,)
        assert all(bool(p.grad.abs().sum() > 0) for p in student.parameters() if p.grad is not None)
    assert torch.equal(before, target.model.get_input_embeddings().weight)
    assert not target.model.get_input_embeddings().weight.grad


def test_the_loss_is_that_of_the_answers(target: Target) -> None:
    tokens, student, teacher = written(target.model, 2, 4), new_student(target, Shape("1")), Teacher(target.model, ())
    answer = torch.zeros(2, LENGTH, dtype=torch.bool)
    answer[0, 10:12] = answer[1, 20] = True
    batch = Batch(tokens, answer, torch.tensor([LENGTH, 25]))
    logq = torch.log_softmax(student(tokens) @ student.vocabulary.T, -1)
    losses = -(torch.softmax(target.model(tokens).logits, -1) * logq).sum(-1)  # of the token after each
    report = Distillation().report(student, teacher.run(batch), teacher, 0.0)
    torch.testing.assert_close(report.loss, (losses[0, 9] + losses[0, 10] + losses[1, 19]) / 3)
    report = Distillation(everywhere=True).report(student, teacher.run(batch), teacher, 0.0)
    torch.testing.assert_close(report.loss, torch.cat([losses[0, : LENGTH - 1], losses[1, :24]]).mean())


def test_a_resumed_training_ends_where_an_uninterrupted_one_does(target: Target, data: Path, tmp_path: Path) -> None:
    how = recipe(steps=12, validate_every=4)
    whole = list(train_student(StudentJob(data, tmp_path / "whole", shape=Shape("1")), how, target))
    first: Iterator[Any] = train_student(StudentJob(data, tmp_path / "parts", shape=Shape("1")), how, target)
    assert next(first).step == 4
    del first
    job = StudentJob(data, tmp_path / "parts", shape=Shape("1"), resume=True)
    job.check()
    rest = list(train_student(job, how, target))
    assert [event.held_out for event in rest if event.held_out] == [e.held_out for e in whole[1:] if e.held_out]
    one, other = (load_file(tmp_path / name / BEST / "model.safetensors") for name in ("whole", "parts"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_unsuitable_targets_and_settings_are_refused(target: Target, data: Path, tmp_path: Path) -> None:
    gemma = Target(tiny("gemma"), name="gem")
    with pytest.raises(InputError, match="gem is a gemma; students are made of the families llama"):
        new_student(gemma, Shape())
    with pytest.raises(InputError, match="--intermediate must be between 1 and 48, not 49"):
        new_student(target, Shape("1", intermediate=49))
    with pytest.raises(InputError, match="was written by tiny, which has 61 tokens"):
        next(train_student(StudentJob(data, tmp_path), recipe(), Target(tiny(vocab_size=40), name="other")))
    with pytest.raises(InputError, match="has no option 'somewhere'"):
        StudentJob(data, tmp_path, settings=["somewhere=1"]).check()
    with pytest.raises(InputError, match="holds no checkpoint"):
        StudentJob(data, tmp_path, resume=True).check()


def test_training_with_a_half_precision_target(data: Path, tmp_path: Path) -> None:
    half = Target(tiny(dtype=torch.bfloat16), name="half")
    events = list(train_student(StudentJob(data, tmp_path, shape=Shape("2")), recipe(steps=6, batch_tokens=512), half))
    assert {p.dtype for p in new_student(half, Shape("2")).parameters()} == {torch.float32}
    assert events[-1].held_out["loss"] < events[0].held_out["loss"]
    drafted = windfall.load(half, str(tmp_path / BEST), "chain").generate(prompt(), max_new_tokens=20)
    assert len(drafted.token_ids) == 20


def test_a_resumed_training_has_the_same_shape(target: Target, data: Path, tmp_path: Path) -> None:
    next(train_student(StudentJob(data, tmp_path, shape=Shape("1")), recipe(steps=2, validate_every=1), target))
    with pytest.raises(InputError, match="resume with the same settings"):
        StudentJob(data, tmp_path, shape=Shape("2"), resume=True).check()
    with pytest.raises(InputError, match="holds a training already"):
        StudentJob(data, tmp_path, shape=Shape("1")).check()


def test_layers_by_number_or_list() -> None:
    assert choose_layers(None, 30) == [0, 1, 2] and choose_layers(None, 4) == [0]
    assert choose_layers("2", 4) == [0, 1]
    assert choose_layers("0,1,27-29", 30) == [0, 1, 27, 28, 29]
    assert choose_layers("3,", 4) == [3]
    for wrong in ("0", "5", "1,4", "a", "2-1", ""):
        with pytest.raises(InputError, match="--layers"):
            choose_layers(wrong, 4)


def test_the_command(target: Target, data: Path, tmp_path: Path) -> None:
    target.model.save_pretrained(tmp_path / "target")
    words = ["train", "lm", str(data), "--out", str(tmp_path / "out"), "--target", str(tmp_path / "target")]
    words += ["--device", "cpu", "--layers", "1", "--steps", "2", "--max-length", "32", "--batch-tokens", "512"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert (tmp_path / "out" / BEST / "model.safetensors").is_file()
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2 and "--resume" in again.stderr and "Traceback" not in again.stderr
