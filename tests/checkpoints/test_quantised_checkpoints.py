"""Quantised checkpoints, loaded by transformers' own quantisers; each needs a library that may be missing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from helpers.exact import check_rows, check_texts
from helpers.tiny import prompt, tiny
from windfall.core.errors import InputError
from windfall.core.types import GpuOptions
from windfall.engine.gpu.fused import FusedForward
from windfall.engine.gpu.target import choose_forward
from windfall.engine.loading import as_target, load

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}


def folder(path: Path, quantisation: dict[str, Any]) -> Path:
    """A tiny model whose configuration says that it is quantised in this way."""
    tiny().save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    return path


@pytest.mark.parametrize(
    ("package", "quantisation"),
    [
        ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ("optimum", {"quant_method": "gptq", "bits": 4, "group_size": 32}),
        ("gptqmodel", {"quant_method": "awq", "bits": 4, "group_size": 32}),
        ("compressed_tensors", {"quant_method": "compressed-tensors", "format": "float-quantized"}),
        ("torchao", {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}),
    ],
)
def test_a_missing_library_is_named_in_one_line(package: str, quantisation: dict[str, Any], tmp_path: Path) -> None:
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(InputError, match=rf"^cannot load '.*': .*{package.replace('_', '-')}") as caught:
        load(folder(tmp_path, quantisation))
    assert "\n" not in str(caught.value)


def test_a_method_that_transformers_does_not_know_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="is quantised by the method exl3, which this version of transformers does not"
    ):
        load(folder(tmp_path, {"quant_method": "exl3"}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes in fp8")
def test_fp8_checkpoints_are_dequantised_where_there_is_no_gpu(tmp_path: Path) -> None:
    made = as_target(folder(tmp_path, FP8))
    assert type(made.model.model.layers[0].mlp.up_proj) is torch.nn.Linear


def test_quantised_checkpoints_are_checked_whenever_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether their layers work depends on further libraries."""
    checks = []
    monkeypatch.setattr("windfall.model.target.Target._tree_gap", lambda self: checks.append(self) or 0.0)
    monkeypatch.setattr("windfall.engine.check_records.is_quantised", lambda config: True)
    made = folder(tmp_path, FP8)
    assert [as_target(made) for _ in range(2)] == checks


def test_a_model_that_cannot_be_moved_says_so() -> None:
    class Fixed(type(tiny())):  # type: ignore[misc]
        def to(self, *_: Any, **__: Any) -> Any:
            raise ValueError("You cannot cast this model.\nMore about it.")

    model: Any = tiny()
    model.__class__ = Fixed
    assert as_target(model, dtype="float32").model is model
    with pytest.raises(InputError, match=r"^cannot move Fixed to torch\.bfloat16: You cannot cast this model$"):
        as_target(model, dtype="bfloat16")


# ---- with the libraries


def bitsandbytes(**how: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(**how)


def torchao(name: str) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    return TorchAoConfig(getattr(quantization, name)())


@pytest.mark.parametrize(
    ("make", "layer", "exact"),
    [
        (lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"), "Linear4bit", True),
        (lambda: bitsandbytes(load_in_8bit=True), "Linear8bitLt", False),
        (lambda: torchao("Int8WeightOnlyConfig"), "Linear", True),
    ],
    ids=["bitsandbytes-4", "bitsandbytes-8", "torchao-8"],
)
def test_models_of_libraries_decode_on_the_fast_path(make: Any, layer: str, exact: bool, tmp_path: Path) -> None:
    """Loaded from a folder that was saved with its quantised weights."""
    quantisation = make()
    tiny(hidden_size=64, intermediate_size=64, num_hidden_layers=2).save_pretrained(tmp_path / "plain")
    made = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=quantisation, dtype=torch.bfloat16
    )
    made.save_pretrained(tmp_path / "own")
    model = as_target(tmp_path / "own", dtype="bfloat16").model
    assert type(model.model.layers[0].mlp.up_proj).__name__ == layer
    forward, reason = choose_forward(model, GpuOptions(True))
    assert isinstance(forward, FusedForward) and forward.module_products
    assert (reason == "") == exact
    if exact:
        check_rows(model, 40, 12)
        assert check_texts(model, "beam", None, (20,), 8) > 1.5
    else:
        assert reason == f"in its {layer} layers a row depends on the other rows of a pass"


@pytest.mark.parametrize("graphs", [False, True])
def test_adapters_decode_on_the_fast_path(graphs: bool) -> None:
    """LoRA layers that are not merged compute their products themselves; turning them off is noticed."""
    peft = pytest.importorskip("peft")
    model: Any = tiny(num_hidden_layers=2)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    made = load(model.eval(), drafter="lm", policy="beam", graphs=graphs)
    texts = []
    for change in (lambda: None, model.disable_adapters):
        change()
        found = made.generate(prompt(), max_new_tokens=8, eos=()).token_ids
        given = torch.tensor([prompt()])
        wanted = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=8, do_sample=False, eos_token_id=None
        )
        assert found == wanted[0, len(prompt()) :].tolist()
        texts.append(found)
    assert texts[0] != texts[1]
    if graphs:
        assert made.gpu_runner is not None and made.exact_passes
