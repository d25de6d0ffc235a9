"""Packed weights are decoded as the gguf package decodes them, and multiplied alike for any number of rows."""

from __future__ import annotations

import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import nn

from helpers.cpu_kernel import compiled
from windfall.checkpoints.gguf_blocks import panels
from windfall.kernels.cpu import compile as compiling
from windfall.kernels.few_rows import SOURCE, Kernel
from windfall.kernels.packed import PackedLinear, packed_formats, weights_of
from windfall.kernels.panels import INTEGERS, LARGEST, Panels, of_integers, rounded

SCALES = {  # where a block has numbers in float16; all other bytes may have any value
    **{"F16": (), "BF16": (), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)},
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
}
OUTPUTS, INPUTS = 37, 1536


def random_blocks(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Random blocks [OUTPUTS, bytes] in this format, and their weights."""
    kind, chance = gguf.GGMLQuantizationType[name], np.random.default_rng(len(name))
    if not SCALES[name]:
        numbers = chance.standard_normal((OUTPUTS, INPUTS)).astype(np.float32)
        blocks = gguf.quantize(numbers, kind).view(np.uint8)
    else:
        size, count = gguf.GGML_QUANT_SIZES[kind]
        blocks = chance.integers(0, 256, (OUTPUTS, INPUTS // size, count), dtype=np.uint8)
        for at in SCALES[name]:
            numbers = chance.standard_normal((*blocks.shape[:2], 1)).astype(np.float16)
            blocks[..., at : at + 2] = numbers.view(np.uint8)
        blocks = blocks.reshape(OUTPUTS, -1)
    return blocks, gguf.dequantize(blocks, kind).reshape(OUTPUTS, INPUTS)


@pytest.mark.parametrize("name", SCALES)
def test_blocks_are_decoded_and_multiplied(name: str) -> None:
    kernel, (blocks, weights) = compiled(), random_blocks(name)
    layer = PackedLinear(kernel, panels(blocks, name, INPUTS), name)
    assert np.array_equal(layer.weight.numpy(), weights) and packed_formats(layer) == [name]
    assert np.array_equal(np.signbit(layer.weight.numpy()), np.signbit(weights))  # of zeros, too
    x = torch.randn(70, INPUTS, generator=torch.Generator().manual_seed(0))
    found, wanted = layer(x), x.double() @ torch.from_numpy(weights).double().T
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    for rows in (1, 2, 3, 4, 5, 6, 9, 16, 17, 34, 64):
        assert torch.equal(layer(x[:rows]), found[:rows])
    assert torch.equal(layer(x[40:41]), found[40:41])


def some_panels(bits: int, group: int, addends: bool, inputs: int = 96) -> tuple[Panels, torch.Tensor]:
    """Random integers with random scales, and what they are in float64."""
    chance = torch.Generator().manual_seed(bits + group)
    least = 0 if bits == 4 and addends else -(2 ** (bits - 1))
    values = torch.randint(least, least + 2**bits, (OUTPUTS, inputs), generator=chance)
    scales, added = (torch.randn(OUTPUTS, inputs // group, generator=chance) for _ in range(2))
    wide, rest = (numbers.repeat_interleave(group, 1).double() for numbers in (scales, added))
    weight = of_integers(values.to(torch.int8), scales, added if addends else None, bits)
    return weight, values * wide + (rest if addends else 0)


@pytest.mark.parametrize(("bits", "group", "addends"), INTEGERS)
@pytest.mark.parametrize("inputs", [32, 96, 128])  # an even and an odd number of groups
def test_all_kinds_of_panels(bits: int, group: int, addends: bool, inputs: int) -> None:
    weight, wanted = some_panels(bits, group, addends, inputs)
    assert torch.equal(compiled().unpack(weight), wanted.float())
    x = torch.randn(20, inputs, generator=torch.Generator().manual_seed(0))
    exact = x.double() @ wanted.T
    for rows in (1, 3, 7, 20):
        found = compiled().product_of_panels(x[:rows], weight)
        assert (found - exact[:rows]).abs().max() < 2e-6 * exact.abs().max()


@pytest.mark.parametrize(("bits", "group", "addends"), INTEGERS)
def test_rows_of_any_size(bits: int, group: int, addends: bool) -> None:
    weight, wanted = some_panels(bits, group, addends)
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([1, 1e-30, 1e30, 0, 2.0**-20, 1, 1])[:, None]
    x = x * sizes
    x[5, 3], x[6, 90] = torch.inf, torch.nan
    found, exact = compiled().product_of_panels(x, weight), x.double() @ wanted.T
    worst = (found - exact).abs().amax(1) / exact.abs().amax(1).clamp(min=1e-300)
    assert worst[:5].max() < 2e-6 and not found[5:].isfinite().any()
    x[0] = 1.0
    x[0, ::2] = -16_777_215 / 2**24  # numbers of 24 bits, all at the limit
    found, exact = compiled().product_of_panels(x[:1], weight), x[:1].double() @ wanted.T
    assert (found - exact).abs().max() < 2e-6 * (x[:1].abs().double() @ wanted.abs().T).max()


NO_AMX = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")


@pytest.mark.parametrize("without", [NO_AMX, (*NO_AMX, "-mno-avx512f", "-mno-avx512vnni")])
def test_integers_have_the_same_sums_on_other_cpus(
    without: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "FLAGS", (*compiling.FLAGS, *without))
    found = compiling.library(SOURCE, tmp_path)
    if found is None or not without_floats():
        pytest.skip("this CPU or compiler has no such instructions")
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(0))
    for kind in INTEGERS:
        weight, _ = some_panels(*kind)
        assert torch.equal(Kernel(*found).product_of_panels(x, weight), compiled().product_of_panels(x, weight))


def without_floats() -> bool:
    """Whether this CPU multiplies integers with and without AVX-512."""
    flags = {*Path("/proc/cpuinfo").read_text("utf-8").partition("flags")[2].partition("\n")[0].split()}
    return {"avx512_vnni", "avx_vnni"} <= flags


@pytest.mark.parametrize("name", ["BF16", "Q8_0", "Q4_1"])
def test_the_number_of_threads_changes_nothing(name: str) -> None:
    blocks, _ = random_blocks(name)
    layer, x = PackedLinear(compiled(), panels(blocks, name, INPUTS), name), torch.randn(5, INPUTS)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(layer(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_keeps_the_largest_weight_of_a_group(bits: int) -> None:
    weight = torch.randn(OUTPUTS, 96, generator=torch.Generator().manual_seed(0))
    found, largest = compiled().unpack(rounded(weight, bits=bits)), weight.view(OUTPUTS, 3, 32).abs().amax(2)
    assert torch.allclose(found.view(OUTPUTS, 3, 32).abs().amax(2), largest)
    assert (found - weight).abs().max() <= 0.51 * largest.max() / LARGEST[bits]


def test_a_layer_has_a_bias_and_any_shape() -> None:
    blocks, weights = random_blocks("Q8_0")
    bias = nn.Parameter(torch.randn(OUTPUTS), requires_grad=False)
    layer = PackedLinear(compiled(), panels(blocks, "Q8_0", INPUTS), "Q8_0", bias)
    x = torch.randn(2, INPUTS, 3).transpose(1, 2)
    wanted = x.double() @ torch.from_numpy(weights).double().T + bias
    assert layer(x).shape == wanted.shape and (layer(x) - wanted).abs().max() < 1e-5 * wanted.abs().max()


def packed_layer(bias: nn.Parameter | None = None) -> tuple[PackedLinear, nn.Linear]:
    """A packed layer, and a plain one with the same weights."""
    blocks, weights = random_blocks("Q8_0")
    plain = nn.Linear(INPUTS, OUTPUTS, bias is not None).requires_grad_(False)
    plain.weight.data, plain.bias = torch.from_numpy(weights), bias
    return PackedLinear(compiled(), panels(blocks, "Q8_0", INPUTS), "Q8_0", bias), plain


@pytest.mark.parametrize("shape", [(3, INPUTS - 16), (3, INPUTS + 32), (2, 3, 1), (0, 5), ()])
def test_inputs_of_another_width_are_refused(shape: tuple[int, ...]) -> None:
    layer, _ = packed_layer()
    with pytest.raises(RuntimeError, match=f"this layer takes rows of {INPUTS} numbers"):
        layer(torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_inputs_in_other_dtypes_are_multiplied_by_torch(dtype: torch.dtype) -> None:
    layer, plain = packed_layer(nn.Parameter(torch.randn(OUTPUTS), requires_grad=False))
    x = torch.randn(5, INPUTS).to(dtype)
    for each in (layer, plain):
        with pytest.raises(RuntimeError, match="dtype"):
            each(x)
        with pytest.raises(RuntimeError, match=r"dtype|not implemented"):
            each(x.int())
    assert torch.equal(layer.to(dtype)(x), plain.to(dtype)(x))


def test_other_uses_are_left_to_torch() -> None:
    layer, plain = packed_layer(nn.Parameter(torch.randn(OUTPUTS), requires_grad=False))
    x = torch.randn(5, INPUTS)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), plain(x)) and layer(x).dtype is torch.bfloat16
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for each, own in zip((layer, plain), inputs, strict=True):
        each(own).square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert layer(x[:0]).shape == (0, OUTPUTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that tracing is deprecated
        traced = torch.jit.trace(layer, x)
    filled = [torch.full((OUTPUTS, INPUTS), torch.nan) for _ in range(9)]
    del filled  # what new tensors get is not the weights by chance
    for each in (traced, torch.compile(layer, backend="eager")):
        torch.testing.assert_close(each(2 * x), plain(2 * x), rtol=1e-4, atol=1e-3)


def test_all_weights_of_a_model_in_the_order_of_its_parameters() -> None:
    plain = nn.Sequential(nn.Embedding(OUTPUTS, INPUTS), nn.Linear(INPUTS, OUTPUTS), nn.Linear(INPUTS, OUTPUTS))
    blocks, weights = random_blocks("Q4_1")
    for layer in plain:
        layer.weight.data = torch.from_numpy(weights)
    plain[2].weight = plain[0].weight
    given = compiled(), panels(blocks, "Q4_1", INPUTS), "Q4_1"
    packed = nn.Sequential(
        plain[0], PackedLinear(*given, plain[1].bias), PackedLinear(*given, plain[2].bias, embedding=plain[0])
    )
    wanted, found = [*plain.parameters()], [*weights_of(packed)]
    assert len(wanted) == len(found) == 4 and all(map(torch.equal, wanted, found))
    assert packed[2].weight is plain[0].weight and packed_formats(packed) == ["Q4_1"]
