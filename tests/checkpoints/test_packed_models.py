"""Models with packed weights: the same numbers as in their GGUF file, or as rounded; texts do not depend on drafts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import windfall
from helpers.cpu_kernel import compiled
from helpers.gguf import SHAPE, write_gguf
from windfall.bench.provenance import model_hash
from windfall.checkpoints import packed
from windfall.checkpoints.bundled import fingerprint
from windfall.checkpoints.find import load_fastest, load_model
from windfall.checkpoints.gguf import architecture_of
from windfall.checkpoints.quiet_libs import quiet
from windfall.core.types import InputError
from windfall.drafters.lm import LMDrafter
from windfall.kernels.packed import PackedLinear, packed_formats
from windfall.model.target import Target
from windfall.train.lm import Shape, new_student
from windfall.train.new_block import new_block

SIZES = {**SHAPE, "hidden_size": 64, "intermediate_size": 96, "pad_token_id": 2}
PROMPT = [5, 9, 12, 9, 12]


@pytest.fixture(autouse=True)
def needs_the_kernel() -> None:
    compiled()


def tiny(kind: str = "Llama", **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def mixed(name: str) -> str:
    if "norm" in name or name.endswith(".bias"):
        return "F32"
    return {"token_embd": "Q8_0", "output": "F16"}.get(name.partition(".")[0], "Q4_1" if "ffn" in name else "Q5_0")


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([PROMPT])).logits
    return found


@pytest.mark.parametrize(("kind", "tied"), [("Llama", True), ("Llama", False), ("Qwen2", True)])
def test_the_blocks_of_a_file_are_kept(kind: str, tied: bool, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny(kind, tie_word_embeddings=tied), mixed)
    full, kept = load_model(file, device="cpu"), load_model(file, device="cpu", weights="file")
    formats = ["Q4_1", "Q5_0", "Q8_0"] if tied else ["F16", "Q4_1", "Q5_0"]
    assert packed_formats(kept.model) == formats and kept.tokenizer.get_vocab() == full.tokenizer.get_vocab()
    assert not [layer for layer in kept.model.modules() if type(layer) is torch.nn.Linear]
    torch.testing.assert_close(logits(kept.model), logits(full.model), rtol=1e-4, atol=1e-5)
    targets = [Target(each.model, each.tokenizer) for each in (full, kept)]
    assert fingerprint(targets[0]) == fingerprint(targets[1])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("wide", [("token_embd",), ("output",), ("token_embd", "output"), ("blk.0",)])
def test_weights_that_are_stored_in_full_are_kept(wide: tuple[str, ...], tied: bool, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny(tie_word_embeddings=tied), lambda name: "F32" if name.startswith(wide) else mixed(name))
    full, kept = load_model(file, device="cpu").model, load_model(file, device="cpu", weights="file").model
    torch.testing.assert_close(logits(kept), logits(full), rtol=1e-4, atol=1e-5)
    assert (type(kept.lm_head) is torch.nn.Linear) == ("token_embd" in wide if tied else "output" in wide)


@pytest.mark.parametrize("first", ["file", None])
def test_a_file_can_be_kept_and_converted(first: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDFALL_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf", tiny(), mixed)
    for weights in (first, None, "file"):
        model = load_model(tmp_path / "tiny.gguf", device="cpu", weights=weights).model
        assert bool(packed_formats(model)) == (weights == "file")


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_weights_are_rounded(weights: str, tmp_path: Path) -> None:
    model = tiny(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, device="cpu", weights=weights).model
    assert packed_formats(loaded) == [weights] and {each.dtype for each in loaded.parameters()} == {torch.float32}
    rough = logits(model)
    assert 0 < (logits(loaded) - rough).abs().max() < 0.05 * rough.abs().max()
    assert fingerprint(Target(loaded)) == fingerprint(Target(model))
    name, layer = next((name, each) for name, each in loaded.named_modules() if isinstance(each, PackedLinear))
    if weights == "bf16":
        assert torch.equal(layer.weight, model.get_submodule(name).weight.bfloat16().float())


@pytest.mark.parametrize("weights", ["bf16", "int8", "file"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}])
def test_texts_do_not_depend_on_drafts(weights: str, sampling: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny(), mixed)
    texts = []
    for policy, drafter in (("none", "ngram"), ("beam", "self"), ("auto", "ngram"), ("salf", "self")):
        engine = windfall.load(file, drafter, policy, device="cpu", weights=weights)
        how = {"max_new_tokens": 40, "eos": (), **sampling}
        texts.append(engine.generate(PROMPT, **how).token_ids)
        together = engine.generate_batch([PROMPT, PROMPT[:3]], **how)
        texts.append(together[0].token_ids)
    assert len(texts[0]) == 40 and all(text == texts[0] for text in texts)
    assert "Q" in repr(engine) or weights in repr(engine)


@pytest.mark.parametrize(
    ("how", "packed"),
    [({}, True), ({"weights": "full"}, False), ({"dtype": "bfloat16"}, False), ({"dtype": "float32"}, True)],
)
def test_files_are_kept_by_default(how: dict[str, Any], packed: bool, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny(), mixed)
    engine = windfall.load(file, "ngram", device="cpu", **how)
    assert bool(packed_formats(engine.target.model)) == packed
    tiny().save_pretrained(tmp_path / "folder")
    assert model_hash(engine.target.model) == model_hash(load_model(file, device="cpu", dtype=how.get("dtype")).model)
    assert not packed_formats(windfall.load(tmp_path / "folder", "ngram", device="cpu", **how).target.model)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Phi3"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_in_bf16_stay_in_bf16(kind: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "bf16_is_faster", lambda kernel: True)
    model = tiny(kind, tie_word_embeddings=tied).bfloat16()
    model.save_pretrained(tmp_path)
    full = load_model(tmp_path, device="cpu").model
    engine = windfall.load(tmp_path, "ngram", device="cpu")
    kept: Any = engine.target.model
    assert packed_formats(kept) == ["bf16"] and "bf16" in repr(engine)
    assert not [layer for layer in kept.modules() if type(layer) is torch.nn.Linear]
    assert model_hash(kept) == model_hash(full)
    torch.testing.assert_close(logits(kept), logits(full), rtol=1e-5, atol=1e-6)
    text = engine.generate(PROMPT, max_new_tokens=20, eos=()).token_ids
    plain = windfall.load(tmp_path, "ngram", "none", device="cpu", weights="full")
    assert not packed_formats(plain.target.model)
    assert text == plain.generate(PROMPT, max_new_tokens=20, eos=()).token_ids


def test_weights_are_only_packed_without_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "bf16_is_faster", lambda kernel: True)
    model = tiny()
    model.save_pretrained(tmp_path / "float32")
    model.half().save_pretrained(tmp_path / "float16")
    tiny().bfloat16().save_pretrained(tmp_path / "bf16")
    mixed_model = tiny().bfloat16().float()
    wide = mixed_model.model.layers[0].mlp.up_proj
    wide.weight.data += 2.0**-20
    mixed_model.save_pretrained(tmp_path / "mixed")
    kept = {name: load_fastest(tmp_path / name, device="cpu").model for name in ("float32", "float16", "mixed")}
    assert not packed_formats(kept["float32"]) and not packed_formats(kept["float16"])
    plain = [layer for layer in kept["mixed"].modules() if type(layer) is torch.nn.Linear]
    assert packed_formats(kept["mixed"]) == ["bf16"] and len(plain) == 1 and torch.equal(plain[0].weight, wide.weight)
    for how in ({"dtype": "bfloat16"}, {"weights": "full"}):
        assert not packed_formats(load_fastest(tmp_path / "bf16", device="cpu", **how).model)
    monkeypatch.setattr(packed, "bf16_is_faster", lambda kernel: False)
    assert not packed_formats(load_fastest(tmp_path / "bf16", device="cpu").model)


def test_files_that_cannot_be_kept_are_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDFALL_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny(), mixed)
    assert architecture_of(file) == "llama" and architecture_of(Path(__file__)) is None
    monkeypatch.setattr(packed, "matched", lambda contents: None)
    assert not packed_formats(windfall.load(file, "ngram", device="cpu").target.model)
    monkeypatch.setattr(packed, "cpu_kernel", lambda folder: None)
    assert not packed_formats(windfall.load(file, "ngram", device="cpu").target.model)


def test_requests_do_not_decode_the_vocabulary_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny(tie_word_embeddings=False), mixed)
    engine = windfall.load(file, "ngram", "beam", device="cpu", weights="file")
    monkeypatch.setattr(PackedLinear, "weight", property(lambda self: pytest.fail("weights were decoded")))
    assert engine.target.vocab_size == SIZES["vocab_size"]
    assert len(engine.generate(PROMPT, max_new_tokens=4, eos=(), logit_bias={3: 1.0}).token_ids) == 4


def test_greedy_text_is_that_of_transformers(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny(), mixed)
    engine = windfall.load(file, "self", "beam", device="cpu", weights="file")
    with torch.inference_mode(), quiet():
        wanted = engine.target.model.generate(torch.tensor([PROMPT]), max_new_tokens=30, do_sample=False)
    found = engine.generate(PROMPT, max_new_tokens=30).token_ids
    assert found == wanted[0, len(PROMPT) :].tolist()[: len(found)]


def test_wrong_uses_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny().save_pretrained(tmp_path)

    def refusal(source: Any = tmp_path, **how: Any) -> str:
        with pytest.raises(InputError) as refused:
            windfall.load(source, **{"device": "cpu", **how})
        return str(refused.value)

    assert refusal(weights="int4") == "there are no weights 'int4'; choose from bf16, int8, file, full"
    assert "only a GGUF file has weights to keep" in refusal(weights="file")
    assert "packed weights are computed in float32, not in bfloat16" in refusal(weights="int8", dtype="bf16")
    assert "weights are packed while a model is loaded" in refusal(tiny(), weights="int8")
    monkeypatch.setattr(packed, "cpu_kernel", lambda folder: None)
    assert "need Linux and a C compiler" in refusal(weights="int8")
    with pytest.raises(InputError, match="for a CPU, not for cuda"):
        packed.required_kernel(torch.device("cuda"))


def test_a_file_of_another_kind_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny(), mixed)
    monkeypatch.setattr("windfall.checkpoints.gguf.ARCHITECTURES", ("qwen2",))
    monkeypatch.setenv("WINDFALL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(InputError, match="cannot stay packed"):
        load_model(file, device="cpu", weights="file")


def test_a_model_can_be_copied_and_saved(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny(), mixed)
    made = load_model(file, device="cpu", weights="file").model
    made.save_pretrained(tmp_path / "folder")
    saved = load_model(tmp_path / "folder", device="cpu").model
    assert not packed_formats(saved) and {*saved.state_dict()} == {*made.state_dict()}
    assert all(torch.equal(tensor, made.state_dict()[name]) for name, tensor in saved.state_dict().items())
    made.load_state_dict(made.state_dict())
    doubled = {name: 2 * tensor for name, tensor in made.state_dict().items()}
    with pytest.raises(RuntimeError, match="is packed; load the model with full weights"):
        made.load_state_dict(doubled)
    made = load_model(file, device="cpu", weights="file").model
    torch.save(made, tmp_path / "whole.pt")
    for other in (copy.deepcopy(made), torch.load(tmp_path / "whole.pt", weights_only=False)):
        assert torch.equal(logits(other), logits(made))


def test_drafters_can_be_made_of_packed_layers(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny(), mixed)
    targets = [Target(load_model(file, device="cpu", weights=weights).model) for weights in (None, "file")]
    for make in (lambda target: new_student(target, Shape("1")).body, lambda target: new_block(target, {"layers": 2})):
        torch.manual_seed(0)
        one = make(targets[0]).state_dict()
        torch.manual_seed(0)
        other = make(targets[1]).state_dict()
        assert {*one} == {*other} and all(torch.equal(other[name], tensor) for name, tensor in one.items())


@pytest.mark.parametrize(("weights", "formats"), [("auto", ["F16", "Q4_1", "Q5_0"]), ("full", []), ("int8", ["int8"])])
def test_the_weights_of_a_drafter_are_packed(weights: str, formats: list[str], tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny(), mixed)
    drafter = LMDrafter(file, weights=weights)
    texts = []
    for policy in ("none", "beam"):
        engine = windfall.load(file, drafter, policy, device="cpu", weights="full")
        texts.append(engine.generate(PROMPT, max_new_tokens=12, eos=()).token_ids)
    assert packed_formats(drafter.decoder.model) == formats
    assert texts[0] == texts[1]
