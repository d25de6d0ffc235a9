"""Without a drafter, `load` takes the bundled head for the model that it was made for, and n-grams for all others."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import windfall
from helpers.bundled_heads import LAYERS, bundle_a_head
from helpers.cli import character_tokenizer
from helpers.cpu_kernel import compiled
from helpers.gguf import SHAPE, write_gguf
from helpers.tiny import prompt, tiny
from windfall.checkpoints import bundled
from windfall.checkpoints.find import Loaded
from windfall.core.types import InputError
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.drafters.ngram import NGramDrafter
from windfall.engine import loading
from windfall.engine.loading import as_target, default_drafter
from windfall.model.target import Target

GREEDY = {"max_new_tokens": 12, "eos": ()}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return bundle_a_head(tmp_path / "bundled", monkeypatch)


def fine_tuned(model: Any) -> Any:
    """A copy after one step of training."""
    own, ids = copy.deepcopy(model), torch.tensor([prompt()])
    own(ids, labels=ids).loss.backward()
    torch.optim.Adam(own.parameters(), lr=1e-2).step()
    return own.requires_grad_(False)


@pytest.mark.parametrize(
    "given",
    [lambda model: model, lambda model: (model, character_tokenizer()), Target],
    ids=["model", "pair", "target"],
)
def test_the_head_is_for_its_model_as_an_object(model: Any, given: Callable[[Any], Any]) -> None:
    engine = windfall.load(given(model), policy="beam")
    assert isinstance(engine.drafter, FeatureHeadDrafter)
    plain = windfall.load(given(model), "ngram", "none")
    assert engine.generate(prompt(), **GREEDY).token_ids == plain.generate(prompt(), **GREEDY).token_ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_head_is_for_its_model_in_a_folder(model: Any, dtype: str, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    assert isinstance(windfall.load(tmp_path / "model", dtype=dtype).drafter, FeatureHeadDrafter)


def test_the_head_is_for_its_model_inside_transformers(model: Any) -> None:
    ids = torch.tensor([prompt()])
    how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 4}
    model.generate(ids, custom_generate=windfall.custom_generate(), **how)
    ((engine, *_),) = model._windfall_engines.values()
    assert isinstance(engine.drafter, FeatureHeadDrafter)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_the_head_is_for_its_model_in_a_gguf_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, made = tmp_path / "tiny.gguf", tiny(**SHAPE)
    write_gguf(file, made, lambda name: "F32" if "norm" in name else kind)
    remember(tmp_path / "bundled", made, monkeypatch)
    assert default_drafter(as_target(file, device="cpu")) == "head"


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_the_head_is_for_its_model_with_packed_weights(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled()
    made = tiny(hidden_size=64, intermediate_size=96)
    made.save_pretrained(tmp_path / "model")
    remember(tmp_path / "bundled", made, monkeypatch)
    assert default_drafter(as_target(tmp_path / "model", device="cpu", weights=weights)) == "head"


def remember(folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this folder be that of the bundled heads, and have one for this model; its weights are not needed."""
    monkeypatch.setattr(bundled, "FOLDER", folder)
    (folder / "own").mkdir(parents=True)
    (folder / "own" / "config.json").write_text(json.dumps({bundled.TARGET: bundled.fingerprint(Target(model))}))


@pytest.mark.parametrize(
    "other",
    [
        fine_tuned,
        lambda model: tiny(num_hidden_layers=LAYERS, seed=1),
        lambda model: tiny(num_hidden_layers=LAYERS + 1),
    ],
    ids=["fine-tuned", "other weights", "other shape"],
)
def test_other_models_get_n_grams(model: Any, other: Callable[[Any], Any]) -> None:
    assert isinstance(windfall.load(other(model)).drafter, NGramDrafter)


def test_a_model_whose_numbers_cannot_be_read_gets_n_grams(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(parameters: Any) -> str:
        raise NotImplementedError

    monkeypatch.setattr(bundled, "hash_of", unreadable)
    assert isinstance(windfall.load(model).drafter, NGramDrafter)


def test_a_named_drafter_stays(model: Any) -> None:
    assert isinstance(windfall.load(model, "ngram").drafter, NGramDrafter)
    made = windfall.load(model, drafter_options={"vocabulary_precision": "full"})
    assert isinstance(made.drafter, FeatureHeadDrafter) and made.drafter.vocabulary_precision == "full"


def test_the_embedded_model_is_not_looked_up(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load_model", lambda target, **how: Loaded(model, None, "embedded"))
    monkeypatch.setattr(loading, "bundled_head", lambda target: pytest.fail("it was looked up"))
    assert isinstance(windfall.load().drafter, FeatureHeadDrafter)


@pytest.mark.parametrize(
    ("target", "words", "message"),
    [
        (None, {"drafter_options": {"colour": "red"}}, "drafter head has no option 'colour'"),
        ("model", {"drafter": "ngram", "drafter_options": {"colour": "red"}}, "drafter ngram has no option 'colour'"),
        ("model", {"drafter": "ngrams"}, "there is no drafter 'ngrams'"),
        ("model", {"drafter_options": ["colour"]}, "drafter_options takes options by name"),
        ("model", {"policy": "beams"}, "there is no policy 'beams'"),
    ],
)
def test_what_needs_no_target_is_checked_before_it_is_loaded(
    target: str | None, words: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_model", lambda *given, **how: pytest.fail("the target was loaded"))
    with pytest.raises(InputError, match=message):
        windfall.load(target, **words)


def test_options_of_a_default_drafter_are_checked_afterwards(model: Any) -> None:
    with pytest.raises(InputError, match="drafter head has no option 'min_match'"):
        windfall.load(model, drafter_options={"min_match": 3})
    with pytest.raises(InputError, match="drafter ngram has no option 'vocabulary_precision'"):
        windfall.load(fine_tuned(model), drafter_options={"vocabulary_precision": "full"})
