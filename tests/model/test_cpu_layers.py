"""Layers with kernels in C compute what transformers computes, in plain text, in trees and in batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from helpers.cpu_kernel import no_kernel
from windfall.checkpoints.find import cache_dir
from windfall.core.tree import DraftTree
from windfall.drafters.self_skip import without_layers
from windfall.kernels.cpu_layers import LayerKernels, prepare_layer_kernels, prepared_kernels
from windfall.kernels.few_rows import cpu_kernel, prepare_few_rows
from windfall.kernels.packed import PackedLinear
from windfall.kernels.panels import of_halves
from windfall.model import cpu_layers
from windfall.model.cpu_layers import CpuDecoderLayer, use_cpu_layers
from windfall.model.cpu_modules import CpuAttention, CpuMlp, CpuNorm
from windfall.model.target import Target

SIZES = {
    "vocab_size": 60,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
FAMILIES = {"Llama": {}, "Mistral": {"sliding_window": 6}, "Qwen2": {}, "Qwen3": {}}
PROMPTS = [[5, 9, 12, 9, 12, 3, 8, 40], [7, 7, 30]]


def made(family: str, **more: Any) -> Any:
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family], **more})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def with_kernels(model: Any) -> Any:
    prepare_layer_kernels(cache_dir() / "kernels")
    if prepared_kernels() is None:
        no_kernel()
    prepare_few_rows(cache_dir() / "kernels")
    use_cpu_layers(model)
    return model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each layer that the kernel computes."""
    seen: list[int] = []
    own = LayerKernels.decoder_layers

    def decoder_layers(self: LayerKernels, layers: Any, x: torch.Tensor, *more: Any) -> Any:
        seen.extend([x.shape[:-1].numel()] * len(layers))
        return own(self, layers, x, *more)

    monkeypatch.setattr(LayerKernels, "decoder_layers", decoder_layers)
    return seen


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of layers in each call of the kernel."""
    seen: list[int] = []
    own = LayerKernels.decoder_layers

    def decoder_layers(self: LayerKernels, layers: Any, *more: Any) -> Any:
        seen.append(len(layers))
        return own(self, layers, *more)

    monkeypatch.setattr(LayerKernels, "decoder_layers", decoder_layers)
    return seen


def tree_of(root: int) -> DraftTree:
    tree = DraftTree.root(root)
    for parent, token in ((0, 4), (0, 9), (1, 21), (1, 22), (3, 8)):
        tree = tree.extend(torch.tensor([parent]), torch.tensor([token]), torch.zeros(1), torch.zeros(1).long())
    return tree


@pytest.mark.parametrize("whole", [True, False], ids=["whole layers", "parts"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS])
def test_trees_are_scored_as_by_transformers(
    family: str, prompts: list[list[int]], whole: bool, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = made(family)
    if not whole:
        monkeypatch.delitem(cpu_layers.PARTS, "DecoderLayer")
    targets = [Target(plain), Target(with_kernels(copy.deepcopy(plain)))]
    kinds = {type(module).__mro__[1] for module in targets[1].model.modules()}
    assert kinds >= {CpuNorm, CpuMlp, CpuAttention} and (CpuDecoderLayer in kinds) == whole
    calls.clear()
    found = []
    for target in targets:
        target.prefill(prompts, taps=(1, -1))
        passes = []
        for _ in range(2):
            trees = [tree_of(prompt[-1]) for prompt in prompts]
            passes += [torch.cat([scores.logits, scores.hidden], 1) for scores in target.score(trees)]
            target.commit([torch.tensor([0, 1, 3])] * len(prompts))
        found.append(torch.cat(passes))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    trees, layers = 2 * [6 * len(prompts)], SIZES["num_hidden_layers"]
    assert [*reversed(calls)][: 2 * layers : layers] == (trees if whole else [])


def test_a_row_of_a_layer_has_the_same_bits_in_every_pass(calls: list[int]) -> None:
    target = Target(with_kernels(made("Qwen3")), check=False)
    target.prefill([PROMPTS[0]], taps=(-1,))
    tree = target.score([tree_of(PROMPTS[0][-1])])[0].hidden[[0, 1, 3, 5]]
    target.prefill([PROMPTS[0]], taps=(-1,))
    alone = []
    for token in (PROMPTS[0][-1], 4, 21, 8):
        alone.append(target.score([DraftTree.root(token)])[0].hidden[0])
        target.commit([torch.tensor([0])])
    assert torch.equal(tree, torch.stack(alone)) and 1 in calls and 6 in calls


def test_packed_layers(calls: list[int]) -> None:
    plain = made("Llama")
    swapped, kernel = with_kernels(copy.deepcopy(plain)), cpu_kernel(cache_dir() / "kernels")
    assert kernel is not None
    for name, layer in [*swapped.model.named_modules()]:
        if name.endswith("_proj"):
            halves = layer.weight.detach().bfloat16()
            plain.model.get_submodule(name).weight.data = halves.float()
            packed = PackedLinear(kernel, of_halves(halves), "bf16")
            swapped.model.set_submodule(name, packed)
    wanted = scored(plain)
    calls.clear()
    torch.testing.assert_close(scored(swapped), wanted, rtol=1e-4, atol=1e-5)
    assert calls


def test_changes_of_a_layer_are_seen(calls: list[int]) -> None:
    plain = made("Llama")
    swapped = with_kernels(copy.deepcopy(plain))
    scored(swapped)
    for model in (plain, swapped):
        layer = model.model.layers[1]
        layer.mlp.up_proj.weight.data = 2 * layer.mlp.up_proj.weight.data
        layer.self_attn.o_proj.weight.data.mul_(3)
        layer.input_layernorm.weight = torch.nn.Parameter(layer.input_layernorm.weight + 1)
    torch.testing.assert_close(scored(swapped), scored(plain), rtol=1e-4, atol=1e-5)
    for model in (plain, swapped):
        model.model.layers[0].mlp.register_forward_hook(lambda module, given, found: 2 * found)
    calls.clear()
    torch.testing.assert_close(scored(swapped), scored(plain), rtol=1e-4, atol=1e-5)
    assert len(calls) == 2  # of the other layer, in a prefill and in a tree


def deep_pair(family: str = "Llama") -> tuple[Any, Any]:
    """A model of six layers, and one with kernels."""
    plain = made(family, num_hidden_layers=6)
    return plain, with_kernels(copy.deepcopy(plain))


def passes(model: Any, count: int = 3, taps: tuple[int, ...] = ()) -> torch.Tensor:
    """What a target returns in some passes over trees."""
    target, found = Target(model, check=False), []
    target.prefill(PROMPTS[:1], taps)
    for _ in range(count):
        scores = target.score([tree_of(PROMPTS[0][-1])])[0]
        found.append(scores.logits if scores.hidden is None else torch.cat([scores.logits, scores.hidden], 1))
        target.commit([torch.tensor([0, 1, 3])])
    return torch.cat(found)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("taps", [(), (0, 2, 5, -1)])
def test_one_call_computes_all_layers(family: str, taps: tuple[int, ...], runs: list[int]) -> None:
    plain, swapped = deep_pair(family)
    torch.testing.assert_close(passes(swapped, taps=taps), passes(plain, taps=taps), rtol=1e-4, atol=1e-5)
    assert runs == [6] * 4  # the first is that of the prompt


@pytest.mark.parametrize("before", [True, False])
def test_hooks_between_layers_see_and_change_states(before: bool, runs: list[int]) -> None:
    pair = deep_pair()
    for model in pair:
        layer = model.model.layers[2]
        if before:
            layer.register_forward_pre_hook(lambda module, given: (given[0] * 2, *given[1:]))
        else:
            layer.register_forward_hook(lambda module, given, found: found * 2)
    torch.testing.assert_close(passes(pair[1]), passes(pair[0]), rtol=1e-4, atol=1e-5)
    assert runs == [1] * 6 * 4


def test_layers_that_are_left_out_or_swapped_are_seen(runs: list[int]) -> None:
    """The self drafter shares layers with its target, and leaves out some."""
    plain, swapped = deep_pair()
    for keep in ([0, 1, 4, 5], [0, 2, 3, 5], [0, 1, 2, 3, 4, 5]):
        found = []
        for model in (plain, swapped):
            fewer = without_layers(model, sorted({*range(6)} - {*keep})) if len(keep) < 6 else model
            found.append(passes(fewer))
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert runs == [4] * 4 + [4] * 4 + [6] * 4
    target, found = [Target(model, check=False) for model in (plain, swapped)], [[], []]
    for each, own in zip(target, found, strict=True):
        each.prefill(PROMPTS[:1])
        for order in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 3, 2, 4, 5]):
            layers = each.model.model.layers
            each.model.model.layers = torch.nn.ModuleList([layers[place] for place in order])
            own.append(each.score([tree_of(8)])[0].logits)
            each.commit([torch.tensor([0, 1])])
    torch.testing.assert_close(torch.cat(found[1]), torch.cat(found[0]), rtol=1e-4, atol=1e-5)


def test_large_layers_use_torch_where_it_is_faster(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_layers, "SMALL_LAYER", 100)
    monkeypatch.setattr(cpu_layers, "rows_of_kernel", lambda: range(4, 9))
    target = Target(with_kernels(made("Llama")), check=False)
    target.prefill(PROMPTS[:1])
    calls.clear()
    target.score([DraftTree.root(8)])
    target.commit([torch.tensor([0])])
    assert not calls
    target.score([tree_of(8)])
    assert calls == [6, 6]


def test_other_uses_of_the_model_are_unchanged() -> None:
    plain = made("Llama")
    swapped, tokens = with_kernels(copy.deepcopy(plain)), torch.tensor([PROMPTS[0]])
    loss = swapped(tokens, labels=tokens).loss
    loss.backward()
    assert swapped.model.layers[0].self_attn.q_proj.weight.grad is not None
    torch.testing.assert_close(loss, plain(tokens, labels=tokens).loss)
    swapped.zero_grad()
    texts = [
        model.generate(tokens, max_new_tokens=20, do_sample=False, pad_token_id=0).tolist()
        for model in (plain, swapped)
    ]
    assert texts[0] == texts[1]
    with torch.inference_mode():
        half = copy.deepcopy(swapped).bfloat16()(tokens).logits
        torch.testing.assert_close(half, plain.bfloat16()(tokens).logits)


def scored(model: Any) -> torch.Tensor:
    """The logits of a tree after a prompt, of a target that is not checked."""
    target = Target(model, check=False)
    target.prefill(PROMPTS[:1])
    return target.score([tree_of(PROMPTS[0][-1])])[0].logits


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_autocast_computes_as_without_kernels(family: str) -> None:
    plain = made(family)
    swapped = with_kernels(copy.deepcopy(plain))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(scored(swapped), scored(plain), rtol=0, atol=0)


class Turned(torch.nn.Linear):
    """Its results are not contiguous."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mT.contiguous().mT


class Double(torch.nn.Linear):
    """Its results are in float64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).double()


class Outer(torch.nn.Module):
    """Computes what the layer inside does, but has results in float32."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *given: Any, **named: Any) -> torch.Tensor:
        return self.inner(*(each.float() for each in given), **named).float()


@pytest.mark.parametrize("kind", [Turned, Double])
@pytest.mark.parametrize("names", [("up_proj", "gate_proj"), ("q_proj", "k_proj", "v_proj")])
def test_results_that_kernels_cannot_read_are_left_to_torch(kind: type, names: tuple[str, ...]) -> None:
    plain = made("Qwen3")
    for layer in plain.model.layers:
        for part in (layer.mlp, layer.self_attn):
            for name in set(names) & {*dict(part.named_children())}:
                getattr(part, name).__class__ = kind
        if kind is Double:
            layer.mlp.down_proj, layer.self_attn.o_proj = Outer(layer.mlp.down_proj), Outer(layer.self_attn.o_proj)
    torch.testing.assert_close(scored(with_kernels(copy.deepcopy(plain))), scored(plain), rtol=1e-4, atol=1e-5)


def test_norms_in_other_dtypes_are_left_to_torch() -> None:
    plain = made("Llama")
    norm = with_kernels(copy.deepcopy(plain)).model.norm
    x = torch.randn(3, SIZES["hidden_size"])
    with torch.inference_mode():
        assert torch.equal(norm.double()(x), plain.model.norm.double()(x))
        with pytest.raises(RuntimeError, match="must match"):
            norm.float()(x[:, :32])


def test_outputs_that_hooks_keep_do_not_change() -> None:
    model, kept = with_kernels(made("Llama")), []
    for name, part in model.named_modules():
        if name.endswith("_proj"):
            part.register_forward_hook(lambda _, given, found: kept.append((found, found.clone())))
    scored(model)
    assert len(kept) == 2 * 2 * 7 and all(torch.equal(found, before) for found, before in kept)


def test_layers_that_do_not_fit_are_left_alone() -> None:
    odd = with_kernels(made("Llama", head_dim=8, hidden_act="gelu", hidden_size=40))
    assert not any(isinstance(module, CpuNorm | CpuMlp | CpuAttention) for module in odd.modules())


class Adapted(torch.nn.Module):
    """What an adapter puts in the place of a linear layer, which it keeps."""

    def __init__(self, base_layer: torch.nn.Linear):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.base_layer(x)


def test_modules_that_are_replaced_later_are_seen(runs: list[int]) -> None:
    pair = deep_pair()
    passes(pair[1])
    for model in pair:
        attention, mlp = model.model.layers[1].self_attn, model.model.layers[3].mlp
        attention.q_proj, mlp.down_proj = Adapted(attention.q_proj), Adapted(mlp.down_proj)
    runs.clear()
    torch.testing.assert_close(passes(pair[1]), passes(pair[0]), rtol=1e-4, atol=1e-5)
    assert runs == [1] * 4 * 4  # of the other layers


def test_classes_with_the_name_of_a_known_model_are_left_alone(runs: list[int]) -> None:
    plain, swapped = deep_pair()
    scaled = type("LlamaForCausalLM", (type(plain),), {"forward": scaled_logits})
    plain.__class__ = swapped.__class__ = scaled
    torch.testing.assert_close(passes(swapped), passes(plain), rtol=1e-4, atol=1e-5)
    assert 6 not in runs


def scaled_logits(
    self: Any, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, past_key_values: Any = None,
    **more: Any,
) -> Any:  # fmt: skip
    found = transformers.LlamaForCausalLM.forward(
        self, input_ids, attention_mask, position_ids, past_key_values, **more
    )
    found.logits = 3 * found.logits
    return found
