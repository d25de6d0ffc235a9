from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from packaging.version import Version

from helpers.architectures import build
from helpers.quantised import OneScaleLinear, quantised, subclassed
from helpers.tiny import FAMILIES, SHAPE, prompt, tiny
from windfall import registry
from windfall.core.tree import DraftTree
from windfall.core.types import InputError
from windfall.drafters.ngram import NGramDrafter
from windfall.engine.engine import Engine
from windfall.engine.loading import as_target
from windfall.kernels.few_rows import FewRowsLinear
from windfall.model.decoder import RESERVED_TREE_ROWS
from windfall.model.kv_cache import GROWTH_ROWS
from windfall.model.target import Target, logit_tolerance


def some_tree(root: int) -> DraftTree:
    """Three levels, siblings and cousins: 0 → 1, 2, 3; 1 → 4, 5; 3 → 6; 5 → 7."""
    parents = [0, 0, 0, 1, 1, 3, 5]
    tree = DraftTree.root(root)
    return (
        tree.extend(torch.tensor(parents[:3]), torch.tensor([7, 11, 13]), torch.zeros(3), torch.arange(3))
        .extend(torch.tensor(parents[3:6]), torch.tensor([3, 17, 5]), torch.zeros(3), torch.tensor([0, 1, 0]))
        .extend(torch.tensor([5]), torch.tensor([19]), torch.zeros(1), torch.tensor([0]))
    )


def path_logits(model: Any, prefix: list[int], tree: DraftTree, node: int) -> torch.Tensor:
    """What the model says after this node when it reads the path as plain text, with no cache at all."""
    tokens = prefix + tree.tokens[tree.path(node)].tolist()
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, -1]


IN_FP64 = {family: 1e-9 for family in FAMILIES if family != "mixtral"}  # whose experts torch has no product for
IN_FP64["gemma2"] = 1e-4  # transformers computes its softmax in fp32


@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"),
    [(family, torch.float64, tolerance) for family, tolerance in IN_FP64.items()]
    + [(family, torch.float32, 1e-4) for family in FAMILIES],
)
def test_tree_scores_are_path_scores(family: str, dtype: torch.dtype, tolerance: float) -> None:
    model = tiny(family, dtype=dtype)
    target, tokens = Target(model), prompt(15)
    target.prefill([tokens])
    tree = some_tree(tokens[-1])
    logits = target.score([tree])[0].logits
    for node in range(len(tree)):
        assert float((logits[node] - path_logits(model, tokens[:-1], tree, node)).abs().max()) < tolerance


def test_committed_cache_rows_equal_those_of_a_new_prefill() -> None:
    model = tiny(dtype=torch.float64)
    target, tokens = Target(model), prompt(8)
    target.prefill([tokens])
    tree = some_tree(tokens[-1])
    target.score([tree])
    path = torch.tensor(tree.path(7))
    target.commit([path])
    rebuilt = Target(model)
    rebuilt.prefill([tokens + tree.tokens[path[1:]].tolist() + [1]])
    assert target.decoder.lengths == rebuilt.decoder.lengths == [len(tokens) + 3]
    length = rebuilt.decoder.lengths[0]
    for ours, theirs in zip(target.decoder.cache.layers, rebuilt.decoder.cache.layers, strict=True):
        assert torch.allclose(ours.keys[:, :, :length], theirs.keys[:, :, :length], atol=1e-12)
        assert torch.allclose(ours.values[:, :, :length], theirs.values[:, :, :length], atol=1e-12)


def test_several_trees_in_one_forward() -> None:
    model = tiny(dtype=torch.float64)
    target, prompts = Target(model), [prompt(4, 1), prompt(13, 2), prompt(1, 3)]
    trees = [some_tree(prompts[0][-1]), DraftTree.root(prompts[1][-1]), some_tree(prompts[2][-1])]
    target.prefill(prompts)
    for _ in range(2):
        together = target.score(trees)
        for tokens, tree, scores in zip(prompts, trees, together, strict=True):
            for node in range(len(tree)):
                wanted = path_logits(model, tokens[:-1], tree, node)
                assert float((scores.logits[node] - wanted).abs().max()) < 1e-9
        paths = [torch.tensor(tree.path(len(tree) - 1)) for tree in trees]
        target.commit(paths)
        for b, path in enumerate(paths):
            prompts[b] = prompts[b] + trees[b].tokens[path[1:]].tolist() + [20 + b]
        trees = [some_tree(prompts[0][-1]), some_tree(prompts[1][-1]), DraftTree.root(prompts[2][-1])]
    target.commit([torch.tensor([0])] * 3)
    target.retain([2, 0])
    assert target.decoder.lengths == [len(prompts[2]), len(prompts[0])]


def test_rows_grow_in_steps() -> None:
    target = Target(tiny(max_position_embeddings=4 * GROWTH_ROWS))
    tokens = prompt(GROWTH_ROWS - 3)
    target.prefill([tokens])
    assert target.decoder.cache.capacity == GROWTH_ROWS
    target.score([some_tree(tokens[-1])])
    assert target.decoder.cache.capacity > GROWTH_ROWS
    assert target.decoder.cache.capacity % GROWTH_ROWS == 0
    target.commit([torch.tensor([0, 2])])
    target.decoder.cache.check()
    assert target.decoder.lengths == [GROWTH_ROWS - 4 + 2]


def test_truncate_forgets_rows() -> None:
    target, tokens = Target(tiny(dtype=torch.float64)), prompt(10)
    target.prefill([tokens])
    target.decoder.cache.truncate([6])
    logits = target.score([DraftTree.root(tokens[6])])[0].logits[0]
    with torch.no_grad():
        wanted = target.model(torch.tensor([tokens[:7]])).logits[0, -1]
    assert torch.allclose(logits, wanted, atol=1e-9)


def test_a_long_prompt_goes_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windfall.model.decoder.MAX_PREFILL_ROWS", 7)
    target, prompts = Target(tiny(dtype=torch.float64)), [prompt(40, 1), prompt(12, 2)]
    target.prefill(prompts)
    scores = target.score([DraftTree.root(p[-1]) for p in prompts])
    for tokens, score in zip(prompts, scores, strict=True):
        with torch.no_grad():
            wanted = target.model(torch.tensor([tokens])).logits[0, -1]
        assert torch.allclose(score.logits[0], wanted, atol=1e-9)


def test_hidden_states_on_request() -> None:
    target, tokens = Target(tiny(dtype=torch.float64, num_hidden_layers=4)), prompt(10)
    prefix = target.prefill([tokens], (1, 3))
    tree = some_tree(tokens[-1])
    hidden = target.score([tree])[0].hidden
    assert prefix is not None
    assert hidden is not None
    for node in (0, 4, 7):
        path = tokens[:-1] + tree.tokens[tree.path(node)].tolist()
        with torch.no_grad():
            states = target.model(torch.tensor([path]), output_hidden_states=True).hidden_states
        wanted = torch.cat([states[1], states[3]], -1)[0]
        assert torch.allclose(prefix[0], wanted[: len(tokens) - 1], atol=1e-9)
        assert torch.allclose(hidden[node], wanted[-1], atol=1e-9)


def test_end_of_text_ids_are_collected() -> None:
    model = tiny()
    model.generation_config.eos_token_id = [4, 9]
    model.config.eos_token_id = 2
    assert Target(model).eos == (2, 4, 9)


def test_rotary_factors_that_depend_on_the_length_limit_the_context() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = tiny("phi3", rope_parameters=rope, original_max_position_embeddings=32, max_position_embeddings=256)
    assert Target(model).context == 32


def unsupported() -> dict[str, Any]:
    small = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}
    return {
        "encoder–decoder": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=61, d_model=32, d_ff=32, d_kv=8, num_layers=1, num_heads=4)
        ),
        "linear_attention layers": lambda: transformers.MambaForCausalLM(
            transformers.MambaConfig(**small, state_size=4)
        ),
        "linear_attention": lambda: transformers.Qwen3NextForCausalLM(
            transformers.Qwen3NextConfig(
                **{**SHAPE, "num_hidden_layers": 4},
                head_dim=8,
                num_key_value_heads=2,
                linear_num_key_heads=2,
                linear_num_value_heads=2,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
                num_experts=2,
                num_experts_per_tok=1,
                moe_intermediate_size=8,
                shared_expert_intermediate_size=8,
            )
        ),
        "masks by places in the cache": lambda: transformers.GPTNeoForCausalLM(
            transformers.GPTNeoConfig(
                vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
            )
        ),
        "ALiBi": lambda: transformers.BloomForCausalLM(
            transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4)
        ),
        "ALiBi attention": lambda: build("falcon, ALiBi"),
        "patches of varying length": lambda: build("blt"),
        "load it with attention_type='original_full'": lambda: build("big_bird"),
        "takes no position_ids": lambda: build("bart"),
        "has offloaded weights .* without offloading": lambda: accelerate.cpu_offload(tiny(), torch.device("cpu")),
        "on the meta device": lambda: tiny().to("meta"),
        "reads ahead; load it with is_decoder=True": lambda: roberta(is_decoder=False),
    }


def roberta(is_decoder: bool) -> Any:
    torch.manual_seed(0)
    shape = {**SHAPE, "max_position_embeddings": 64, "pad_token_id": 1}
    return transformers.RobertaForCausalLM(transformers.RobertaConfig(**shape, is_decoder=is_decoder)).eval()


def test_a_model_that_can_be_an_encoder_is_taken_as_a_decoder() -> None:
    target, texts = Target(roberta(is_decoder=True)), []
    for policy in ("none", "chain"):
        engine = Engine(target, registry.drafter("lm"), registry.policy(policy))
        texts.append(engine.generate(prompt(6), max_new_tokens=6, eos=()).token_ids)
    assert len(texts[0]) == 6
    assert texts[0] == texts[1]


def test_layer_types_decide_whether_a_hybrid_is_recurrent() -> None:
    Target(build("granitemoehybrid, attention only"))
    with pytest.raises(InputError, match="GraniteMoeHybridForCausalLM has linear_attention layers"):
        Target(build("granitemoehybrid"))


DOGE_NEEDS_A_MASK = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"),
    reason="before 5.18 transformers lets SDPA skip doge's mask, so windfall refuses the model",
)


@pytest.mark.parametrize(
    ("family", "field"),
    [("moshi", "sliding_window"), pytest.param("doge", "keep_window_size", marks=DOGE_NEEDS_A_MASK)],
)
def test_a_window_that_masks_cannot_follow_limits_the_context(family: str, field: str) -> None:
    """Past its window the model's own texts depend on how they are read: in one pass, or token by token."""
    model = build(family, window=16)
    target = Target(model)
    assert target.context == 16
    assert getattr(model.config, field) == 16
    engine = Engine(target, registry.drafter("lm"), registry.policy("chain"))
    assert len(engine.generate(prompt(10), max_new_tokens=24).token_ids) == 6
    with pytest.raises(InputError, match="the prompt has 16 tokens"):
        engine.generate(prompt(16))


@pytest.mark.parametrize("field", ["attention_chunk_size", "window_size", "attention_window_size"])
def test_a_window_of_another_name_limits_the_context(field: str) -> None:
    model = tiny()
    assert Target(model).context == 256
    setattr(model.config, field, 40)
    assert Target(model).context == 40


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "llama4_text", "modernbert-decoder", "gpt_oss"])
def test_a_window_that_masks_follow_limits_nothing(family: str) -> None:
    target = Target(build(family, window=16))
    assert target.decoder.windows
    assert target.context == 256


def test_queries_scaled_by_places_in_the_cache_limit_text_and_tree() -> None:
    """A tree's rows lie further back in the cache than their positions say."""
    target = Target(build("llama4_text", floor_scale=600))
    assert target.context == 599 - RESERVED_TREE_ROWS
    tree = DraftTree.root(3).extend(
        torch.zeros(590, dtype=torch.long), torch.arange(590) % 61, torch.zeros(590), torch.arange(590)
    )
    target.prefill([prompt(20)])
    with pytest.raises(InputError, match="takes 580 rows in this pass, not 591"):
        target.score([tree])
    assert Target(build("llama4_text", floor_scale=600, attn_temperature_tuning=False)).context == 256


def test_a_compiled_model_runs_uncompiled() -> None:
    model, tokens = tiny(), prompt(9)
    compiled = as_target(torch.compile(model))
    assert compiled.model is model
    engine = Engine(compiled, NGramDrafter(), registry.policy("chain"))
    plain = Engine(Target(model), NGramDrafter(), registry.policy("none"))
    assert engine.generate(tokens, max_new_tokens=8).token_ids == plain.generate(tokens, max_new_tokens=8).token_ids


def test_an_offloaded_model_is_not_moved() -> None:
    with pytest.raises(InputError, match="has offloaded weights"):
        as_target(accelerate.cpu_offload(tiny(), torch.device("cpu")), device="cpu", dtype="float64")


@pytest.mark.parametrize("reason", unsupported())
def test_models_that_would_go_wrong_are_refused_by_name(reason: str) -> None:
    model = unsupported()[reason]()
    with pytest.raises(InputError, match=reason) as error:
        Target(model.eval())
    assert type(model).__name__ in str(error.value)


def test_a_model_that_ignores_the_mask_is_noticed() -> None:
    model = tiny()
    forward = model.forward

    def careless(**inputs: Any) -> Any:
        return forward(**(inputs | {"attention_mask": None}))

    careless.__signature__ = __import__("inspect").signature(forward)  # type: ignore[attr-defined]
    model.forward = careless
    with pytest.raises(InputError, match="does not score a tree as it scores the tree's paths"):
        Target(model)


def test_models_whose_rows_depend_on_each_other_may_differ_by_more() -> None:
    """One scale for the inputs of all rows: a row is rounded in another way in every pass."""
    model = quantised(OneScaleLinear, dtype=torch.float32)
    target = Target(model)
    assert target._tree_gap() > 0.01
    forward = model.forward
    model.forward = lambda input_ids, past_key_values=None, position_ids=None, use_cache=None, **_: forward(
        input_ids=input_ids, past_key_values=past_key_values, position_ids=position_ids, use_cache=use_cache
    )
    with pytest.raises(InputError, match="does not score a tree as it scores the tree's paths"):
        Target(model)


def one_scale(module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Rounds the input of a module, with one scale for all rows."""
    scale = given[0].abs().max() / 31
    return ((given[0] / scale).round() * scale, *given[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_depend_on_each_other_are_noticed(dtype: torch.dtype) -> None:
    """In any layer, and in any precision if the logits differ by more than those of other models."""
    model = tiny(dtype=dtype)
    assert not Target(model).rows_depend
    hooks = [layer.mlp.register_forward_pre_hook(one_scale) for layer in model.model.layers]
    target = Target(model)
    assert target._tree_gap() > logit_tolerance(dtype) and target.rows_depend and not target.has_own_products
    for hook in hooks:
        hook.remove()
    assert not Target(model).rows_depend


@pytest.mark.parametrize(("gaps", "depend"), [((0.001, 0.001), True), ((0.001, 0.0), False), ((0.0, 0.001), False)])
def test_in_full_precision_small_differences_count(
    gaps: tuple[float, float], depend: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, gap in zip(("_tree_gap", "_own_gap"), gaps, strict=True):
        monkeypatch.setattr(Target, name, lambda self, gap=gap: gap)
    assert Target(tiny()).rows_depend == depend and not Target(tiny(dtype=torch.bfloat16)).rows_depend


def test_subclasses_of_linear_layers_have_their_own_products() -> None:
    target = Target(quantised(subclassed, dtype=torch.float32))
    assert target.has_own_products and target.rows_depend
    assert not Target(build("falcon")).has_own_products
    model = tiny()
    for layer in model.modules():
        if type(layer) is torch.nn.Linear:
            layer.__class__ = FewRowsLinear
    assert not Target(model).has_own_products


def test_a_model_whose_rows_depend_on_each_other_is_checked_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDFALL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Target, "_tree_gap", lambda self: 0.1)
    monkeypatch.setattr(Target, "_own_gap", lambda self: 0.1)
    tiny().save_pretrained(tmp_path / "tiny")
    assert all(as_target(tmp_path / "tiny").rows_depend for _ in range(2))


def test_a_kind_of_model_that_passed_the_check_is_not_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDFALL_CACHE", str(tmp_path / "cache"))
    checks: dict[Target, None] = {}
    check = Target._tree_gap
    monkeypatch.setattr(Target, "_tree_gap", lambda self: checks.update({self: None}) or check(self))
    for family in ("llama", "gemma3"):
        tiny(family).save_pretrained(tmp_path / family)
    load_twice = [as_target(tmp_path / "llama", dtype=dtype) for dtype in ("float32", "float32", "bfloat16")]
    assert list(checks) == [load_twice[0], load_twice[2]]
    windowed = [as_target(tmp_path / "gemma3") for _ in range(2)]
    assert list(checks)[2:] == windowed, "what the check finds out about windows is not kept"
    Target(tiny("llama"))
    assert len(checks) == 5, "a model that was given as an object is always checked"
