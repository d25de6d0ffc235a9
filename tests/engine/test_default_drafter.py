"""Without a drafter, `load` takes the bundled head for its model, also rounded or lightly trained; else n-grams."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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


def fine_tuned(model: Any, rate: float) -> Any:
    """A copy after one step of training. The weights of the model are about 0.12."""
    own, ids = copy.deepcopy(model), torch.tensor([prompt()])
    own(ids, labels=ids).loss.backward()
    torch.optim.Adam(own.parameters(), lr=rate).step()
    return own.requires_grad_(False)


def trained_anew(model: Any) -> Any:
    return fine_tuned(model, 0.2)


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


@pytest.mark.parametrize("rate", [1e-3, 1e-2])
def test_the_head_is_for_light_fine_tunes_of_its_model(model: Any, rate: float) -> None:
    own = fine_tuned(model, rate)
    assert bundled.fingerprint(Target(own)) != bundled.fingerprint(Target(model))
    assert isinstance(windfall.load(own).drafter, FeatureHeadDrafter)
    assert bundled.made_for(bundled.FOLDER / "own", Target(own))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_0", "Q4_1", "Q4_0"])
def test_the_head_is_for_its_model_in_a_gguf_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, made = tmp_path / "tiny.gguf", tiny(**{**SHAPE, "intermediate_size": 64})
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
    (folder / "own" / "config.json").write_text(json.dumps({bundled.TARGET: bundled.description(Target(model))}))


@pytest.mark.parametrize(
    "other",
    [
        trained_anew,
        lambda model: tiny(num_hidden_layers=LAYERS, seed=1),
        lambda model: tiny(num_hidden_layers=LAYERS + 1),
        lambda model: tiny(num_hidden_layers=LAYERS, tie_word_embeddings=True),
    ],
    ids=["trained anew", "other weights", "other shape", "other matrices"],
)
def test_other_models_get_n_grams(model: Any, other: Callable[[Any], Any]) -> None:
    assert isinstance(windfall.load(other(model)).drafter, NGramDrafter)


def test_a_model_whose_numbers_cannot_be_read_gets_n_grams(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(parameters: Any) -> bytes:
        raise NotImplementedError

    monkeypatch.setattr(bundled, "signs_of", unreadable)
    assert isinstance(windfall.load(model).drafter, NGramDrafter)
    assert bundled.made_for(bundled.FOLDER / "own", Target(model)) is None


def test_files_without_signs_are_for_models_with_their_hash(model: Any) -> None:
    """Those of older versions, and each job.json."""
    file = bundled.FOLDER / "own" / "config.json"
    written = json.loads(file.read_text())
    assert len(written[bundled.TARGET].pop(bundled.SIGNS)) < 400
    assert written[bundled.TARGET] == {"name": Target(model).name, **bundled.fingerprint(Target(model))}
    file.write_text(json.dumps(written))
    assert isinstance(windfall.load(model).drafter, FeatureHeadDrafter)
    assert isinstance(windfall.load(fine_tuned(model, 1e-2)).drafter, NGramDrafter)


@pytest.mark.parametrize("signs", [None, 7, "", "damaged", "AAAA"])
def test_damaged_signs_are_those_of_no_model(model: Any, signs: Any) -> None:
    file = bundled.FOLDER / "own" / "config.json"
    written = json.loads(file.read_text())
    written[bundled.TARGET][bundled.SIGNS] = signs
    file.write_text(json.dumps(written))
    assert not bundled.made_for(file.parent, Target(model))
    assert isinstance(windfall.load(model).drafter, NGramDrafter)


def test_the_packages_drafters_know_their_target() -> None:
    """Both were made for the same model, of 30 layers with seven matrices and an embedding."""
    said = [json.loads(file.read_text("utf-8"))[bundled.TARGET] for file in bundled.FOLDER.glob("*/config.json")]
    signs = np.unpackbits(np.frombuffer(base64.b64decode(said[0][bundled.SIGNS]), np.uint8))
    assert said == [said[0]] * 2 and len(signs) == bundled.SIGNS_PER_MATRIX * (7 * 30 + 1)
    assert hashlib.sha256(signs.tobytes()).hexdigest().startswith(said[0]["weights"])


def test_a_named_drafter_stays(model: Any) -> None:
    assert isinstance(windfall.load(model, "ngram").drafter, NGramDrafter)
    made = windfall.load(model, drafter_options={"weights": "full"})
    assert isinstance(made.drafter, FeatureHeadDrafter) and made.drafter.weights == "full"


def test_the_embedded_model_is_not_looked_up(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load_fastest", lambda target, **how: Loaded(model, None, "embedded"))
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
    monkeypatch.setattr(loading, "load_fastest", lambda *given, **how: pytest.fail("the target was loaded"))
    with pytest.raises(InputError, match=message):
        windfall.load(target, **words)


def test_options_of_a_default_drafter_are_checked_afterwards(model: Any) -> None:
    with pytest.raises(InputError, match="drafter head has no option 'min_match'"):
        windfall.load(model, drafter_options={"min_match": 3})
    with pytest.raises(InputError, match="drafter ngram has no option 'weights'"):
        windfall.load(trained_anew(model), drafter_options={"weights": "full"})
