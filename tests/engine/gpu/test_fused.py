"""The fused forward against transformers and against the host loop, for every family that it runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.fused import MODELS, logits_of, model
from helpers.gpu import ON_DEVICE, ON_HOST, PRECISE, paths
from helpers.tiny import features_of, prompt, tiny
from helpers.trees import random_tree
from sweep import PAGE
from windfall import registry
from windfall.core.types import GpuOptions
from windfall.drafters.base import Drafter
from windfall.drafters.lm import LMDrafter
from windfall.engine.engine import Engine, Generation
from windfall.engine.gpu.families import FAMILIES, ExpertsMlp, GatedMlp, describe
from windfall.engine.gpu.forward import Unsupported, paths_of
from windfall.engine.gpu.fused import FusedForward
from windfall.engine.gpu.graphs import GraphCache
from windfall.engine.gpu.host_policy import GraphTarget
from windfall.engine.gpu.target import GpuTarget
from windfall.kernels.rows import place_rows
from windfall.model.target import Target

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.3, 1.7, 2.0],
    "long_factor": [2.0, 3.0, 5.0, 8.0],
    "original_max_position_embeddings": 64,
}
ALIKE = {
    "olmoe",
    "olmo3",
    "cohere",
    "glm",
    "ernie",
    "seed-oss",
    "arcee",
    "ministral",
    "cwm",
    "helium",
}  # as other families, but for what logits show
MIXED = {
    "qwen2, mixed",
    "qwen3, mixed",
    "gemma3",
    "smollm3",
    "olmo3",
    "cohere2",
    "exaone4",
    "mellum",
    "cwm",
}  # some layers have windows


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str) -> None:
    """After a text longer than the windows; one path of the tree is longer than a part of it."""
    made = model(name)
    windows = {layer.window for layer in describe(made).layers}
    assert windows == ({12} if name in ("mistral", "phi3") else {None} if name == "gemma" else windows)
    assert windows == {12, None} or name not in MIXED
    found, wanted = logits_of(made, 40, 12)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_prompts_longer_than_a_chunk_and_exact_passes() -> None:
    found, wanted = logits_of(model("gemma3"), 150, 12, exact=True)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_what_layers_differ_in() -> None:
    """Dense layers between experts, and layers without rotary angles."""
    kinds = [type(layer.mlp) for layer in describe(model("qwen3-moe")).layers]
    assert kinds == [ExpertsMlp, GatedMlp, ExpertsMlp, ExpertsMlp]
    for name, rotary in (("smollm3", [0, -1, 0, -1]), ("cohere2", [0, 0, 0, -1]), ("exaone4", [0, 0, 0, -1])):
        assert [layer.rotary for layer in describe(model(name)).layers] == rotary


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "olmo2", "cohere2", "granite"])
def test_states_are_those_of_transformers(name: str) -> None:
    made, taps, text = model(name), (0, 2, 4, -1), prompt(30)
    target = GraphTarget(GpuTarget(made, taps, GraphCache(torch.device("cpu")), GpuOptions(True)))
    (found,) = target.prefill([[*text, 5]], taps) or []
    torch.testing.assert_close(found, features_of(made, text, taps)[0], atol=1e-4, rtol=1e-4)


def texts(target: Any, drafter: Callable[[], Drafter], policy: str, length: int, new: int) -> list[Generation]:
    """The same text from the host loop and from the GPU runner."""
    chosen = registry.policy(policy, **{**ON_DEVICE, **ON_HOST}[policy])
    made = [Engine(Target(target), drafter(), chosen, gpu_options=GpuOptions(graphs)) for graphs in (False, True)]
    found = [each.generate(prompt(length), max_new_tokens=new, eos=()) for each in made]
    assert made[1].gpu_runner is not None and isinstance(made[1].gpu_runner.gpu_target.forward, FusedForward)
    assert (made[1].fallback == "") == (policy in ON_DEVICE)
    return found


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("gemma", "gemma3, with images", *ALIKE)])
def test_texts_are_those_of_the_host_loop(name: str) -> None:
    wanted, found = texts(model(name), LMDrafter, "beam", 20, 12)
    assert found.token_ids == wanted.token_ids and found.stats.tau > 2


@pytest.mark.parametrize("policy", ["beam", "salf"])
def test_a_drafter_with_windows_drafts_the_same_trees(policy: str) -> None:
    """Also where the policy decides on the host."""
    target = tiny(dtype=PRECISE)
    wanted, found = texts(target, lambda: LMDrafter(tiny("mistral-window", 1, PRECISE)), policy, 30, 12)
    assert found.token_ids == wanted.token_ids
    for one, other in zip(wanted.steps[:4], found.steps[:4], strict=True):
        assert paths(one.drafted) == paths(other.drafted) and len(one.drafted) > 1


def test_angles_of_longrope_are_those_of_the_original_context() -> None:
    """Longer texts would have other angles, and are not written; rows of a tree may reach past the end."""
    made = model("phi3", rope_parameters=dict(LONGROPE), original_max_position_embeddings=64)
    wanted, found = texts(made, LMDrafter, "beam", 50, 40)
    assert found.token_ids == wanted.token_ids and len(found.token_ids) == 14
    assert describe(made).positions == 64


def test_the_families_are_documented() -> None:
    assert {*FAMILIES} <= {*re.findall(r"`(\w+)`", PAGE.read_text("utf-8").partition("## Equal")[0])}


def test_paths_follow_from_a_mask() -> None:
    tree, length = random_tree(20, seed=1), torch.tensor([7])
    mask = tree.mask()
    found = paths_of(mask, length)
    placed = place_rows(length, tree.depth, torch.tensor([20]), mask)
    assert found.lineage is not None and placed.lineage is not None and torch.equal(found.reach, placed.reach)
    for row, depth in enumerate(tree.depth.tolist()):
        assert torch.equal(found.lineage[row, : depth + 1], placed.lineage[row, : depth + 1])
    nothing = paths_of(torch.zeros(2, 3, dtype=torch.bool), length)
    assert nothing.reach.tolist() == [7, 7]


def other_gate(changed: Any) -> None:
    changed.model.layers[1].mlp.act_fn = torch.nn.ReLU()


def another_embedding(changed: Any) -> None:
    changed.model.embed_tokens.__class__ = type("Other", (torch.nn.Embedding,), {})


def wider_heads(changed: Any) -> None:
    attention = changed.model.layers[1].self_attn
    attention.v_proj = torch.nn.Linear(32, 2 * attention.v_proj.out_features, bias=False)


def quantised_experts(changed: Any) -> None:
    changed.model.layers[0].mlp.experts.down_proj.__class__ = type("Packed", (torch.nn.Parameter,), {})


def clipped(changed: Any) -> None:
    changed.config.clip_qkv = 8.0


def relu_experts(changed: Any) -> None:
    changed.model.layers[2].mlp.experts.act_fn = torch.nn.ReLU()


def small_experts(changed: Any) -> None:
    experts = changed.model.layers[2].mlp.experts
    experts.down_proj = torch.nn.Parameter(experts.down_proj.to(torch.float8_e4m3fn), requires_grad=False)


def odd_modules(changed: Any) -> None:
    del changed.model.layers[1].self_attn.o_proj


def odd_activation(changed: Any) -> None:
    changed.model.layers[1].mlp.act = torch.nn.Tanh()


def other_layers(changed: Any) -> None:
    changed.config.layer_types = ["chunked_attention"] * 4


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("mistral", other_gate, "its MLP has a gate of ReLU"),
        ("mistral", another_embedding, "its embedding is not plain but Other"),
        ("mistral", wider_heads, "its layers differ in the shape of keys and values"),
        ("qwen3, mixed", other_layers, "it has layers of the kind chunked_attention"),
        ("gpt-oss", quantised_experts, "its experts are not plain but GptOssExperts"),
        ("qwen3-moe", quantised_experts, "its experts are not plain but Qwen3MoeExperts"),
        ("olmoe", small_experts, "its experts are not plain but OlmoeExperts"),
        ("glm", odd_modules, "its modules are not as expected: 'GlmAttention' object has no attribute 'o_proj'"),
        ("mixtral", relu_experts, "its experts have a gate of ReLU"),
        ("olmoe", clipped, "it clips queries, keys and values"),
        ("starcoder2", odd_activation, "its MLP has an activation of Tanh"),
    ],
)
def test_what_is_not_supported_says_why(name: str, change: Callable[[Any], None], reason: str) -> None:
    changed = model(name)
    change(changed)
    with pytest.raises(Unsupported, match=reason):
        describe(changed)
