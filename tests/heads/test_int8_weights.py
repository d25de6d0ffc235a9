"""Draft heads with int8 weights on a CPU: nearly the same logits, exactly the same text."""

from __future__ import annotations

import pytest
import torch

from helpers.cpu_kernel import use_compiled
from helpers.random_heads import random_head
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.core.errors import InputError
from windfall.core.levels import BLOCK, most_likely
from windfall.core.types import GpuOptions
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.engine.engine import Engine
from windfall.heads import packed
from windfall.kernels.packed import PackedLinear
from windfall.model.target import Target


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights count as large."""
    use_compiled()
    monkeypatch.setattr(packed, "MIN_NUMBERS", 0)
    monkeypatch.setattr(packed, "MIN_VOCABULARY", 0)


def attached(weights: str, kind: str = "eagle3-pruned", **changes: int) -> FeatureHeadDrafter:
    drafter = FeatureHeadDrafter(random_head(kind, **changes), weights=weights)
    drafter.attach(Target(tiny()))
    return drafter


def layers(drafter: FeatureHeadDrafter) -> list[PackedLinear]:
    return [module for module in drafter.head.modules() if isinstance(module, PackedLinear)]


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_int8_weights_change_no_text(temperature: float) -> None:
    target, head, texts = Target(tiny()), random_head("eagle3-pruned"), []
    for weights, graphs in (("full", False), ("int8", False), ("int8", True)):
        drafter = FeatureHeadDrafter(head, weights=weights)
        engine = Engine(target, drafter, registry.policy("beam"), True, GpuOptions(graphs))
        assert bool(layers(drafter)) == (weights == "int8")
        done = engine.generate(prompt(), max_new_tokens=30, temperature=temperature, seed=3)
        texts.append(done.token_ids)
        assert bool(engine.fallback) != graphs
    plain = Engine(target, registry.drafter("ngram"), registry.policy("none"), True)
    texts.append(plain.generate(prompt(), max_new_tokens=30, temperature=temperature, seed=3).token_ids)
    assert texts[0] == texts[1] == texts[2] == texts[3]


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("kind", ["eagle3-pruned", "eagle3-before-fc", "eagle", "griffin"])
def test_full_weights_go_and_the_given_head_stays(kind: str) -> None:
    head = random_head(kind)
    drafter = FeatureHeadDrafter(head, weights="int8")
    drafter.attach(Target(tiny()))
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    state = torch.randn(3, head.config.layer.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        full, quick = head.logits(state), drafter.head.logits(state)
    assert 0 < float((full - quick).abs().max()) < 0.05 * float(full.std())
    assert drafter.head.lm_head is None and "vocabulary" not in drafter.head._shared
    assert head.packed_vocabulary is None and len(head.vocabulary) == full.shape[-1]
    assert not any(isinstance(module, PackedLinear) for module in head.modules()) and len(layers(drafter)) > 1
    assert all(torch.equal(before[name], tensor) for name, tensor in head.state_dict().items())


def test_auto_packs_large_weights_if_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiled()
    assert not layers(attached("auto")) and len(layers(attached("int8"))) == 1  # the vocabulary
    monkeypatch.setattr(packed, "MIN_NUMBERS", 0)
    monkeypatch.setattr(packed, "MIN_VOCABULARY", 0)
    monkeypatch.setattr(packed, "is_faster", lambda work, other: True)
    assert layers(attached("auto")) and not layers(attached("full"))
    monkeypatch.setattr(packed, "is_faster", lambda work, other: False)
    assert not layers(attached("auto"))


def test_weights_stay_full_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "MIN_VOCABULARY", 0)
    monkeypatch.setattr(packed, "prepared_kernel", lambda: None)
    assert not layers(attached("auto"))
    with pytest.raises(InputError, match="leave weights out"):
        attached("int8")
    with pytest.raises(InputError, match="one of auto, full, int8"):
        attached("int4")


@pytest.mark.parametrize("size", [BLOCK * 40, BLOCK * 40 + 1, 5])
def test_likeliest_equals_topk(size: int) -> None:
    logq = torch.randn(3, size, generator=torch.Generator().manual_seed(4))
    logq[1, 4:] = -torch.inf
    values, places = most_likely(logq, min(8, size))
    assert torch.equal(values, logq.topk(min(8, size)).values)
    assert torch.equal(logq.gather(1, places), values)
    assert all(len(set(row.tolist())) == len(row) for row in places), "siblings are different"
