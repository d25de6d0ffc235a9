"""Widened models and heads compute what the small ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.random_heads import random_block, random_head
from helpers.tiny import VOCABULARY, features_of, prompt, tiny
from helpers.widen import LARGER
from windfall import registry
from windfall.bench.widen import SHAPES, Shape, widen, widen_head, widen_pair
from windfall.core.types import InputError
from windfall.engine.engine import Engine, Generation
from windfall.engine.loading import as_drafter
from windfall.heads.fitting import fit
from windfall.heads.layers import Unrolled
from windfall.model.target import Target

UNGROUPED = Shape(hidden=64, layers=4, intermediate=48, heads=4, kv_heads=4, head_dim=8)  # a key is needed twice
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "scaled-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
}


def small_model(name: str = "llama", **changes: Any) -> Any:
    family, own = MODELS[name]
    model = tiny(family, rms_norm_eps=0.05, **own, **changes)  # so large that forgetting to scale it would show
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms are ones and biases zeros until they are trained
                parameter.add_(torch.rand_like(parameter) - 0.3)
    return model


@torch.inference_mode()
def states(model: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    ids = torch.tensor([prompt(40)])
    out = model(ids, output_hidden_states=True)
    return out.logits, out.hidden_states


@pytest.mark.parametrize("shape", [LARGER, UNGROUPED], ids=["larger", "ungrouped"])
@pytest.mark.parametrize("name", MODELS)
def test_a_widened_model_gives_the_same_numbers(name: str, shape: Shape) -> None:
    model = small_model(name)
    wide = widen(model, shape)
    (logits, hidden), (wide_logits, wide_hidden) = states(model), states(wide)
    scale = float(logits.abs().max())
    torch.testing.assert_close(wide_logits / scale, logits / scale, atol=1e-5, rtol=0)
    assert len(wide_hidden) == shape.layers + 1
    for own, same in [*zip(hidden[:-1], wide_hidden, strict=False), (hidden[-1], wide_hidden[-1])]:
        torch.testing.assert_close(same[..., :32], own, atol=1e-5 * float(own.abs().max()), rtol=0)
        assert not same[..., 32:].any()


def test_a_widened_model_has_the_size_of_its_shape() -> None:
    wide = widen(small_model("tied"), LARGER)
    layer = 2 * 72 * 9 * 16 + 2 * 72 * 3 * 16 + 3 * 72 * 96 + 2 * 72
    assert sum(parameter.numel() for parameter in wide.parameters()) == VOCABULARY * 72 + 6 * layer + 72
    assert wide.lm_head.weight is wide.model.embed_tokens.weight
    assert not any(parameter.requires_grad for parameter in wide.parameters())


def test_known_shapes_are_those_of_their_models() -> None:
    sizes = {
        name: s.layers * s.hidden * (2 * s.head_dim * (s.heads + s.kv_heads) + 3 * s.intermediate)
        for name, s in SHAPES.items()
    }  # without embeddings and norms
    published = {"llama-3.2-1b": 1.236e9, "llama-3.2-3b": 3.21e9, "llama-3.1-8b": 8.03e9, "llama-3.1-70b": 70.6e9}
    tables = {"llama-3.2-1b": 1, "llama-3.2-3b": 1, "llama-3.1-8b": 2, "llama-3.1-70b": 2}  # 1: tied
    for name, size in sizes.items():
        assert size + tables[name] * 128256 * SHAPES[name].hidden == pytest.approx(published[name], rel=3e-3)


def test_in_bfloat16_no_more_is_lost_than_by_rounding() -> None:
    model, rounded = small_model(), small_model(dtype=torch.bfloat16)
    precise, coarse = states(model)[0], states(rounded)[0].float()
    wide = widen(model, LARGER, dtype=torch.bfloat16)
    assert wide.dtype == torch.bfloat16 and wide.model.rotary_emb.inv_freq.dtype == torch.float32
    error, usual = ((each - precise).pow(2).mean().sqrt() for each in (states(wide)[0].float(), coarse))
    assert error < 1.5 * usual


def test_the_same_text_under_a_name_that_says_what_it_is() -> None:
    model = small_model()
    model.config._name_or_path = "some/where/tiny-model"
    model.generation_config.eos_token_id = 7
    target, wide = Target(model), Target(widen(model, LARGER))
    assert wide.name == "tiny-model widened to a larger shape's cost"
    assert Target(widen(model, LARGER, name="mine")).name.startswith("mine widened")
    deep = widen(model, Shape(40, 2, 48, 4, 2, 8))
    assert Target(deep).name.endswith("cost with 3 layers") and deep.config.num_hidden_layers == 3
    assert wide.eos == target.eos == (7,)
    texts = [plain(each, max_new_tokens=40, temperature=0.7, seed=3, eos=()) for each in (target, wide)]
    assert texts[0].token_ids == texts[1].token_ids


def plain(target: Target, **sampling: Any) -> Generation:
    return Engine(target, registry.drafter("ngram"), registry.policy("none")).generate(prompt(), **sampling)


@pytest.mark.parametrize("kind", ["eagle3", "eagle3-normed", "eagle3-before-fc", "eagle3-pruned", "eagle3-deep"])
def test_a_widened_head_guesses_the_same(kind: str) -> None:
    model, head = small_model(), random_head(kind)
    head.config.layer.rms_norm_eps = 0.05
    head = type(head)(head.config).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    head.draft_tokens = random_head(kind).draft_tokens
    pair = widen_pair(model, head, LARGER)
    guesses = [guess(Target(model), head), guess(Target(pair.model), pair.head)]
    assert pair.head.config.taps == (1, 2, 6)  # what was the last layer still is
    for own, same in zip(*guesses, strict=True):
        torch.testing.assert_close(same[..., : own.shape[-1]], own, atol=2e-5 * float(own.abs().max()), rtol=0)
        assert not same[..., own.shape[-1] :].any()


@torch.inference_mode()
def guess(target: Target, head: Any) -> tuple[torch.Tensor, ...]:
    """State, recycled state and logits after every token of a prompt."""
    head, ids = fit(head, target), torch.tensor([prompt(20)])
    features = features_of(target.model, ids[0].tolist(), head.config.taps)[:, :-1]
    memory = Unrolled()
    memory.mask = torch.ones(1, 19, 19, dtype=torch.bool).tril()
    found = head(ids[:, 1:], head.fuse(features), torch.arange(19)[None], memory)
    return found.state, found.recycled, head.logits(found.state)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["eagle3-pruned", "block", "block-pruned", "block-path"])
def test_a_widened_pair_drafts_the_same_trees(kind: str, temperature: float) -> None:
    model = small_model()
    head: Any = random_block(kind) if kind.startswith("block") else random_head(kind, seed=3)
    pair = widen_pair(model, head, LARGER, "tiny")
    runs = [speculate(Target(model), head, temperature), speculate(Target(pair.model), pair.head, temperature)]
    assert runs[0].token_ids == runs[1].token_ids
    assert runs[0].stats.tau == runs[1].stats.tau > 1
    for one, other in zip(runs[0].steps, runs[1].steps, strict=True):
        assert one.drafted.tokens.tolist() == other.drafted.tokens.tolist()
        assert one.drafted.parents.tolist() == other.drafted.parents.tolist()


def speculate(target: Target, head: Any, temperature: float) -> Generation:
    policy = registry.policy("beam", depth=3, k=4, nodes=12)
    engine = Engine(target, as_drafter(head), policy)
    return engine.generate(prompt(), max_new_tokens=40, temperature=temperature, seed=0)


def test_what_cannot_be_widened_is_refused() -> None:
    model, small = small_model(), Shape(16, 8, 96, 8, 4, 16)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    for refused, message in (
        (lambda: widen(model, "llama-9b"), "there is no shape 'llama-9b'; choose from llama-3.2-1b"),
        (lambda: widen(model, small), "is smaller: its hidden width is 16, this model's 32; choose from llama-3.2-1b"),
        (lambda: widen(model, Shape(72, 4, 96, 6, 1, 16)), "4 heads that share 2 keys do not fit"),
        (lambda: widen(model, Shape(72, 4, 96, 6, 3, 12)), "heads of 8 do not fit the rotary frequencies"),
        (lambda: widen(tiny(rope_parameters=yarn), LARGER), "rotary positions of the type yarn change"),
        (lambda: widen(tiny("gemma"), LARGER), "only models of the families llama, mistral, qwen2, qwen3"),
        (
            lambda: widen_head(random_head("eagle"), LARGER),
            "only eagle3 heads and block heads without tables can be widened, not eagle",
        ),
    ):
        with pytest.raises(InputError, match=message):
            refused()
