"""Models whose linear layers compute their own products: quantised ones, and ones with adapters."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.exact import check_one_hash, check_rows, check_texts, engine
from helpers.quantised import (
    CountingLinear,
    OneScaleLinear,
    OutlierLinear,
    OwnLinear,
    PlaceLinear,
    WideLinear,
    quantise,
    quantised,
)
from helpers.random_heads import random_head
from helpers.tiny import VOCABULARY, prompt, tiny
from windfall import registry
from windfall.core.errors import InexactWarning, InputError
from windfall.core.types import GpuOptions
from windfall.drafters.lm import LMDrafter
from windfall.engine.engine import Engine
from windfall.engine.gpu.forward import Unsupported
from windfall.engine.gpu.fused import FusedForward
from windfall.engine.gpu.graphs import GraphCache
from windfall.engine.gpu.target import GpuTarget, choose_forward
from windfall.engine.profiling import describe
from windfall.heads.fitting import fit
from windfall.model.target import Target

EXACT = GpuOptions(True)


def with_own_vocabulary(model: Any) -> Any:
    model.lm_head = OwnLinear(model.lm_head)
    return model


@pytest.mark.parametrize("kind", [OwnLinear, CountingLinear])
@pytest.mark.parametrize("size", [12, 40])
def test_rows_of_a_tree_are_those_of_plain_decoding(kind: Any, size: int) -> None:
    """Also where the layers use other kernels for a single row and for many."""
    check_rows(with_own_vocabulary(quantised(kind)), 40, size)


def test_logits_have_one_hash_in_trees_and_chunks_of_all_sizes() -> None:
    check_one_hash(with_own_vocabulary(quantised(CountingLinear)), 150, (1, 8, 33, 250), (16, 40, 150, 512), pairs=True)


def test_texts_are_those_of_plain_decoding_and_of_the_model() -> None:
    model = with_own_vocabulary(quantised(CountingLinear, num_attention_heads=8, attention_bias=True))
    assert check_texts(model, "beam", None, (40,), 16) > 1.5
    check_texts(model, "beam", None, (40,), 12, temperature=1.0, top_p=0.9, seed=5)


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "phi3"])
def test_logits_are_those_of_transformers(name: str) -> None:
    model = with_own_vocabulary(quantise(tiny(name)))
    text = prompt(40)
    ours = engine(model, "beam").generate(text, max_new_tokens=16, eos=()).token_ids
    wanted = model.generate(torch.tensor([text]), attention_mask=torch.ones(1, 40), max_new_tokens=16, do_sample=False)
    assert ours == wanted[0, 40:].tolist()


def test_some_layers_may_be_plain() -> None:
    """Their products share a call with those of quantised ones, or are merged."""
    model = quantised(OwnLinear, "q_proj", "down_proj")
    forward = choose_forward(model, EXACT)[0]
    assert isinstance(forward, FusedForward)
    kinds = [product.kinds for product in forward.module_products]
    assert kinds == [["Linear", "OwnLinear"], ["OwnLinear"]] * 2
    assert isinstance(forward.layers[0].mlp.gate_up, Tensor)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [OneScaleLinear, OutlierLinear, PlaceLinear])
def test_rows_that_depend_on_others_are_found(kind: Any) -> None:
    """Such a model runs, but not in exact passes, and says why."""
    made = engine(quantised(kind, "o_proj", "down_proj"), "beam")
    with pytest.warns(InexactWarning, match=f"in its {kind.__name__} layers a row depends on the other rows of a pass"):
        found = made.generate(prompt(), max_new_tokens=8, eos=())
    assert len(found.token_ids) == 8 and not made.exact_passes
    assert made.gpu_runner is not None and isinstance(made.gpu_runner.gpu_target.forward, FusedForward)


def test_rows_that_depend_on_others_are_reported_on_a_cpu_too() -> None:
    model = quantised(OneScaleLinear, dtype=torch.float32)
    about = (
        "the text of small in float32 may differ from plain decoding's where two tokens are almost equally likely, "
        "because this model does not run in exact passes (in its quantised layers a row depends on the other rows of a "
        "pass); `windfall audit` counts the differences"
    )
    for made, wanted in ((model, [about]), (quantised(dtype=torch.float32), []), (tiny(), [])):
        on_cpu = Engine(Target(made, name="small"), LMDrafter(), registry.policy("beam"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", InexactWarning)
            on_cpu.generate(prompt(), max_new_tokens=4, eos=())
        assert [str(each.message) for each in caught if each.category is InexactWarning] == wanted


def test_rows_of_models_that_are_not_quantised_may_depend_on_others() -> None:
    target = Target(tiny(dtype=torch.bfloat16))
    target.rows_depend = True
    with pytest.warns(InexactWarning, match=r"\(a row depends on the other rows of a pass\).*differences$"):
        Engine(target, LMDrafter(), registry.policy("beam")).generate(prompt(), max_new_tokens=4, eos=())


@pytest.mark.parametrize("exact", [False, True])
def test_layers_that_return_another_dtype_are_not_supported(exact: bool) -> None:
    reason = r"its WideLinear layers return torch\.float32, but the model has torch\.bfloat16"
    with pytest.raises(Unsupported, match=reason):
        FusedForward(quantised(WideLinear, "down_proj"), exact)


def test_modules_that_are_not_linear_layers_are_not_supported() -> None:
    model = quantised()
    model.model.layers[1].mlp.down_proj = nn.Sequential(model.model.layers[1].mlp.down_proj, nn.Tanh())
    with pytest.raises(Unsupported, match="its products are not linear layers but Sequential"):
        FusedForward(model)


def test_rounds_of_several_requests_write_the_same_texts() -> None:
    made, alone = (engine(quantised(CountingLinear), "beam") for _ in range(2))
    prompts = [prompt(length, seed=length) for length in (9, 40, 70)]
    texts = made.generate_batch(prompts, max_new_tokens=10, eos=())
    for each, given in zip(texts, prompts, strict=True):
        assert each.token_ids == alone.generate(given, max_new_tokens=10, eos=()).token_ids


class Adapted(OwnLinear):
    """Has an adapter that can be turned off, as those of peft."""

    def __init__(self, plain: nn.Linear):
        super().__init__(plain)
        self.active, self.factors = ["default"], {"default": 2.0}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.factors["default"] if self.active else 1)


def turn_off(layer: Any) -> None:
    layer.active = []


def weaken(layer: Any) -> None:
    layer.factors["default"] = 1.0


@pytest.mark.parametrize("change", [turn_off, weaken])
def test_changed_settings_of_adapters_outdate_the_graphs(change: Any) -> None:
    model = quantised(Adapted, "up_proj")
    made, fresh = (engine(model, "beam") for _ in range(2))
    first = made.generate(prompt(), max_new_tokens=8, eos=()).token_ids
    runner = made.gpu_runner
    assert runner is not None and not runner.outdated
    for layer in model.model.layers:
        change(layer.mlp.up_proj)
    assert runner.outdated
    found = made.generate(prompt(), max_new_tokens=8, eos=()).token_ids
    assert found == fresh.generate(prompt(), max_new_tokens=8, eos=()).token_ids != first
    assert made.gpu_runner is not runner


def test_other_weights_have_another_profile() -> None:
    plain, other = (describe(engine(made, "beam"))["target"] for made in (tiny(), quantised()))
    assert "linear" not in plain and other["linear"] == ["OwnLinear"]


def test_heads_cannot_read_a_quantised_vocabulary() -> None:
    target = Target(with_own_vocabulary(tiny()), name="small")
    assert target.vocab_size == VOCABULARY
    with pytest.raises(InputError, match="small has a quantised OwnLinear there; load it with these in full precision"):
        fit(random_head(), target)


# ---- capture


def on_trial(monkeypatch: pytest.MonkeyPatch, model: Any, reason: str) -> tuple[GraphCache, list[str]]:
    """The graph cache of a target whose layers are captured with this result, and its warnings."""
    cache, tried = GraphCache(torch.device("cpu")), []

    def capture(graph: Any, work: Any, device: Any, memory: Any = None) -> str:
        tried.append(work())
        return reason

    cache.enabled = True
    monkeypatch.setattr("windfall.engine.gpu.graphs.capture_failure", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        GpuTarget(model, (), cache, EXACT)
    assert len(tried) == (isinstance(model.model.layers[0].self_attn.o_proj, OwnLinear))
    return cache, [str(each.message) for each in caught]


def test_layers_that_cannot_be_captured_turn_graphs_off(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, warned = on_trial(monkeypatch, quantised(), "operation not permitted when stream is capturing")
    assert not cache.enabled
    assert warned == [
        "passes are launched kernel by kernel: its OwnLinear layers cannot be captured as a CUDA graph: "
        "operation not permitted when stream is capturing"
    ]


@pytest.mark.parametrize("own", [False, True])
def test_other_layers_leave_graphs_on(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, warned = on_trial(monkeypatch, quantised() if own else tiny(), "")
    assert cache.enabled and not warned
