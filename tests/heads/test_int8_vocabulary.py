"""Vocabularies in int8: nearly the same logits, exactly the same text, and the full product where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from helpers.random_heads import random_head
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.core.errors import InputError
from windfall.core.levels import BLOCK, most_likely
from windfall.core.types import GpuOptions
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.engine.engine import Engine
from windfall.heads import int8_vocabulary
from windfall.model.target import Target


def matrix(rows: int = 500, width: int = 96) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)) * 0.05


needs_int8 = pytest.mark.skipif(
    int8_vocabulary.quantise_vocabulary(matrix()) is None, reason="this torch has no int8 product here"
)


def attached(precision: str, kind: str = "eagle3-pruned", **changes: int) -> FeatureHeadDrafter:
    drafter = FeatureHeadDrafter(random_head(kind, **changes), vocabulary_precision=precision)
    drafter.attach(Target(tiny()))
    return drafter


@needs_int8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_vocabulary_loses_precision(dtype: torch.dtype) -> None:
    vocabulary, bias = matrix().to(dtype), torch.linspace(-1, 1, 500).to(dtype)
    whole, scales = int8_vocabulary.round_rows(vocabulary.float())
    assert float((whole * scales - vocabulary.float()).abs().max()) <= 0.51 * float(scales.max())
    hidden = torch.randn(5, 96, generator=torch.Generator().manual_seed(2))
    hidden[:, 7] = 40.0  # an outlier, beside which int8 would see little else
    product = int8_vocabulary.quantise_vocabulary(vocabulary, bias)
    assert product is not None
    logits = F.linear(hidden.to(dtype).float(), whole * scales, bias.float())
    assert torch.allclose(product(hidden.to(dtype)), logits, atol=2e-3)
    assert torch.isfinite(product(torch.zeros(1, 96, dtype=dtype))).all()


@needs_int8
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_int8_vocabulary_changes_no_text(temperature: float) -> None:
    target, head, texts = Target(tiny()), random_head("eagle3-pruned"), []
    for precision, graphs in (("full", False), ("int8", False), ("int8", True)):
        drafter = FeatureHeadDrafter(head, vocabulary_precision=precision)
        engine = Engine(target, drafter, registry.policy("beam"), True, GpuOptions(graphs))
        assert (drafter.head.int8_vocabulary is not None) == (precision == "int8")
        done = engine.generate(prompt(), max_new_tokens=30, temperature=temperature, seed=3)
        texts.append(done.token_ids)
        assert bool(engine.fallback) != graphs
    plain = Engine(target, registry.drafter("ngram"), registry.policy("none"), True)
    texts.append(plain.generate(prompt(), max_new_tokens=30, temperature=temperature, seed=3).token_ids)
    assert texts[0] == texts[1] == texts[2] == texts[3]


@needs_int8
@pytest.mark.parametrize("kind", ["eagle3-pruned", "eagle3-before-fc"])
def test_the_full_vocabulary_goes_and_the_given_head_stays(kind: str) -> None:
    head = random_head(kind)
    drafter = FeatureHeadDrafter(head, vocabulary_precision="int8")
    drafter.attach(Target(tiny()))
    state = torch.randn(3, head.config.layer.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        full, quick = head.logits(state), drafter.head.logits(state)
    assert 0 < float((full - quick).abs().max()) < 0.05 * float(full.std())
    assert drafter.head.lm_head is None and "vocabulary" not in drafter.head._shared
    assert head.int8_vocabulary is None and len(head.vocabulary) == full.shape[-1]


@needs_int8
def test_auto_quantises_large_vocabularies_if_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attached("auto").head.int8_vocabulary is None
    monkeypatch.setattr(int8_vocabulary, "MIN_ELEMENTS", 0)
    monkeypatch.setattr(int8_vocabulary, "slowdown", lambda product, full: 0.5)
    assert attached("auto").head.int8_vocabulary is not None
    assert attached("full").head.int8_vocabulary is None
    monkeypatch.setattr(int8_vocabulary, "slowdown", lambda product, full: 2.0)
    assert attached("auto").head.int8_vocabulary is None


def test_a_cpu_without_fast_code_is_found_by_one_small_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """On such a CPU a product with the whole vocabulary takes seconds; only a small part may be multiplied."""
    sizes = []

    class ReferenceCode(int8_vocabulary.Int8Vocabulary):
        def __init__(self, vocabulary: Tensor, bias: Tensor | None = None):
            self.vocabulary = vocabulary

        def __call__(self, hidden: Tensor) -> Tensor:
            sizes.append(len(self.vocabulary))
            clock.now += 0.15
            return F.linear(hidden, self.vocabulary)

    class FakeClock:
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

    clock = FakeClock()
    monkeypatch.setattr(int8_vocabulary, "Int8Vocabulary", ReferenceCode)
    monkeypatch.setattr(int8_vocabulary, "time", clock)
    assert int8_vocabulary.quantise_vocabulary(matrix(5000), only_if_faster=True) is None
    assert sizes == [int8_vocabulary.TRIAL_VOCABULARY] * 2
    assert clock.now < 0.5


@needs_int8
def test_states_are_unsigned_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signed ones run through oneDNN's reference code on CPUs with VNNI and without AMX."""
    product, seen = int8_vocabulary.quantise_vocabulary(matrix()), []
    assert product is not None
    plain = product._product
    monkeypatch.setattr(product, "_product", lambda rows: seen.append(rows) or plain(rows))
    product(torch.randn(3, 96))
    assert [rows.dtype for rows in seen] == [torch.uint8]
    assert len(seen[0]) % int8_vocabulary.ROW_STEP == 0


def no_operator(*_: object) -> Tensor:
    raise AttributeError("'_OpNamespace' 'onednn' object has no attribute 'qlinear_prepack'")


def wrong(self: int8_vocabulary.Int8Vocabulary, hidden: Tensor) -> Tensor:
    return hidden.new_zeros(len(hidden), len(self._zeros))


@pytest.mark.parametrize(("method", "instead"), [("__init__", no_operator), ("__call__", wrong)])
def test_the_vocabulary_stays_full_without_the_operator(
    monkeypatch: pytest.MonkeyPatch, method: str, instead: object
) -> None:
    monkeypatch.setattr(int8_vocabulary, "MIN_ELEMENTS", 0)
    monkeypatch.setattr(int8_vocabulary, "slowdown", lambda product, full: 0.5)
    monkeypatch.setattr(int8_vocabulary.Int8Vocabulary, method, instead)
    assert attached("auto").head.int8_vocabulary is None
    with pytest.raises(InputError, match="leave vocabulary_precision out"):
        attached("int8")
    with pytest.raises(InputError, match="one of auto, int8, full"):
        attached("int4")


@pytest.mark.parametrize("size", [BLOCK * 40, BLOCK * 40 + 1, 5])
def test_likeliest_equals_topk(size: int) -> None:
    logq = torch.randn(3, size, generator=torch.Generator().manual_seed(4))
    logq[1, 4:] = -torch.inf
    values, places = most_likely(logq, min(8, size))
    assert torch.equal(values, logq.topk(min(8, size)).values)
    assert torch.equal(logq.gather(1, places), values)
    assert all(len(set(row.tolist())) == len(row) for row in places), "siblings are different"
