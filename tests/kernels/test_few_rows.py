"""Products of a few rows on a CPU: right for all shapes, the same for any number of rows, and torch where need be."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.cpu_kernel import no_kernel
from helpers.tiny import prompt, tiny
from windfall.kernels import few_rows
from windfall.kernels.cpu import compile as compiling
from windfall.kernels.few_rows import (
    SOURCE,
    FewRows,
    FewRowsLinear,
    Kernel,
    _faster_rows,
    linear,
    prepare_few_rows,
    use_few_rows,
)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    found = compiling.library(SOURCE, tmp_path_factory.mktemp("kernels"))
    if found is None:
        no_kernel()
    return Kernel(*found)


@pytest.fixture
def used(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The kernel in use, for all numbers of rows."""
    monkeypatch.setattr(few_rows, "_used", [FewRows(kernel, range(2, 65))])
    return kernel


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Other(torch.Tensor):
    """Such as a quantised weight, which has no memory of its own."""


def some(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(64, 32), (4, 16), (37, 80), (130, 16), (6, 1040), (9, 2048), (5, 1536)]
)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 13, 64, 65])
def test_products_are_right_and_do_not_depend_on_other_rows(
    kernel: Kernel, rows: int, outputs: int, inputs: int
) -> None:
    x, weight = some(rows, inputs), some(outputs, inputs)
    found = kernel.product(x, weight)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)
    assert torch.equal(found, torch.cat([kernel.product(x[row : row + 1], weight) for row in range(rows)]))


def test_the_number_of_threads_changes_nothing(kernel: Kernel) -> None:
    x, weight, before = some(5, 48), some(50, 48), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(kernel.product(x, weight))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_layers_keep_their_shapes_and_biases(used: Kernel) -> None:
    layer, x = nn.Linear(32, 10), some(2, 32, 3).transpose(1, 2)
    wanted = layer(x)
    use_few_rows(layer)
    assert type(layer) is FewRowsLinear and layer(x).shape == (2, 3, 10)
    torch.testing.assert_close(layer(x), wanted)


def test_other_products_are_left_to_torch(used: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernel, "product", lambda *_: pytest.fail("the kernel was used"))
    weight = some(8, 16)
    cases = [
        (some(1, 16), weight),
        (some(65, 16), weight),
        (some(2, 40_000), some(4, 40_000)),
        (some(3, 16).double(), weight.double()),
        (some(3, 16), some(16, 8).T),
        (some(0, 16), weight),
        (some(3, 16), weight.as_subclass(Other)),
        (some(3, 16), some(3, 16)),
        (some(3, 17), some(8, 17)),
    ]
    for x, other in cases:
        assert torch.equal(linear(x, other), F.linear(x, other))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(some(3, 16), weight).dtype == torch.bfloat16
    with torch.inference_mode(False), torch.enable_grad():
        layer = nn.Linear(16, 8)
        use_few_rows(layer)
        layer(some(3, 16)).sum().backward()
        assert layer.weight.grad is not None


def test_a_traced_layer_is_right(used: Kernel) -> None:
    with torch.inference_mode(False), torch.no_grad():
        layer, x = nn.Linear(16, 8), some(3, 16)
        use_few_rows(layer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that tracing is deprecated
            traced = torch.jit.trace(layer, x)
        torch.testing.assert_close(traced(x), F.linear(x, layer.weight, layer.bias))


def test_a_model_computes_the_same_logits(used: Kernel) -> None:
    model, tokens = tiny(), torch.tensor([prompt(7)])
    wanted = model(tokens).logits
    use_few_rows(model)
    assert any(type(layer) is FewRowsLinear for layer in model.modules())
    torch.testing.assert_close(model(tokens).logits, wanted)


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_without_a_compiler_torch_is_used(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(few_rows, "_used", [])
    prepare_few_rows(tmp_path / compiler)
    layer = nn.Linear(16, 8)
    use_few_rows(layer)
    assert not few_rows._used and type(layer) is nn.Linear and not [*tmp_path.rglob("*.so")]


def test_a_choice_is_kept(kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "_used", [])
    monkeypatch.setattr(few_rows, "_faster_rows", lambda kernel: range(2, 5))
    prepare_few_rows(tmp_path / "a")
    assert few_rows._used[0].rows == range(2, 5) and len([*tmp_path.rglob("*.so")]) == 1
    few_rows._used.clear()
    monkeypatch.setattr(few_rows, "_faster_rows", lambda kernel: pytest.fail("this is known"))
    prepare_few_rows.cache_clear()
    prepare_few_rows(tmp_path / "a")
    assert few_rows._used[0].rows == range(2, 5)


def test_a_slower_kernel_is_not_used(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "MANY_OUTPUTS", 64)
    for faster, rows in (("11000", range(2, 5)), ("01101", range(4, 9)), ("000000", range(0))):
        outcomes = iter(faster)
        monkeypatch.setattr(few_rows, "is_faster", lambda work, other, outcomes=outcomes: next(outcomes) == "1")
        assert _faster_rows(kernel) == rows


def test_whether_bf16_is_faster_is_kept(kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "LARGE_OUTPUTS", 64)
    monkeypatch.setattr(kernel, "file", tmp_path / "kernel.so")
    for faster in (True, False):
        monkeypatch.setattr(few_rows, "is_faster", lambda work, other, faster=faster: faster)
        few_rows.bf16_is_faster.cache_clear()
        assert few_rows.bf16_is_faster(kernel)
    few_rows.bf16_is_faster.cache_clear()


@pytest.mark.parametrize("method", ["product", "product_of_panels"])
def test_a_wrong_kernel_is_not_used(kernel: Kernel, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert few_rows._is_right(kernel)
    own = getattr(Kernel, method)
    monkeypatch.setattr(Kernel, method, lambda self, x, weight: 1.01 * own(self, x, weight))
    assert not few_rows._is_right(kernel)


def test_the_faster_of_two_is_found() -> None:
    small, large = some(4, 4), some(400, 400)
    assert few_rows.is_faster(lambda: small @ small, lambda: large @ large)
    assert not few_rows.is_faster(lambda: large @ large, lambda: small @ small)
