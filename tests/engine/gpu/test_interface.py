"""Models that run their own modules with windfall's attention, against transformers and against the host loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.architectures import build
from helpers.fused import logits_of
from helpers.gpu import ON_DEVICE, PRECISE, paths
from helpers.tiny import features_of, prompt, tiny
from windfall import registry
from windfall.core.tree import DraftTree
from windfall.core.types import GpuOptions
from windfall.drafters.lm import LMDrafter
from windfall.engine.engine import Engine
from windfall.engine.gpu import attention_function, interface
from windfall.engine.gpu.attention_function import NAME
from windfall.engine.gpu.forward import Unsupported
from windfall.engine.gpu.graphs import GraphCache
from windfall.engine.gpu.host_policy import GraphTarget
from windfall.engine.gpu.interface import InterfaceForward, rows_after
from windfall.engine.gpu.modules import MaskedForward
from windfall.engine.gpu.target import GpuTarget, in_pages, modules_forward
from windfall.model.target import Target

pytestmark = pytest.mark.usefixtures("only_llama_is_fused")
WINDOWED = [  # and what is special about them besides windows
    "cohere2",
    "gemma3n_text",  # layers that read the keys of others
    "granite_swa",  # another scale
    "llama4_text",  # chunks
    "mimo_v2_flash",  # sinks, and layers of different shapes
    "vaultgemma",  # soft caps
]


@pytest.mark.parametrize("name", [*WINDOWED, "glm4", "qwen3_moe"])
def test_logits_are_those_of_transformers(name: str) -> None:
    """After a text longer than the windows; one path of the tree is longer than a part of it."""
    made = build(name, **({"attn_logit_softcapping": 2.0} if name == "vaultgemma" else {}))
    if name == "vaultgemma":
        made.set_attn_implementation("eager")  # others ignore the soft cap in some versions of transformers
    assert isinstance(modules_forward(made), InterfaceForward)
    found, wanted = logits_of(made, 40, 12)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)


def test_keys_and_values_of_different_widths_run_under_a_mask() -> None:
    """Latent attention computes keys and values of all heads from what it keeps."""
    made = build("deepseek_v3")
    forward = modules_forward(made)
    assert isinstance(forward, MaskedForward)
    assert {layer and layer[1:] for layer in forward.layout.layers} == {(16, 8)}
    found, wanted = logits_of(made, 40, 12)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)
    with pytest.raises(Unsupported, match="does not read a KV cache in pages"):
        in_pages(forward)


def test_states_are_those_of_transformers() -> None:
    made, taps, text = build("olmo3"), (0, 2, 4, -1), prompt(30)
    target = GraphTarget(GpuTarget(made, taps, GraphCache(torch.device("cpu")), GpuOptions(True)))
    (found,) = target.prefill([[*text, 5]], taps) or []
    torch.testing.assert_close(found, features_of(made, text, taps)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_a_batch_in_pages_writes_the_texts_of_single_requests(sampling: dict[str, Any]) -> None:
    """Target and drafter have windows; some prompts share verify passes with trees."""
    target, draft = Target(tiny("starcoder2", dtype=PRECISE, sliding_window=12)), tiny("olmo2", seed=1, dtype=PRECISE)
    policy = registry.policy("beam", **ON_DEVICE["beam"])
    made = Engine(target, LMDrafter(draft), policy, gpu_options=GpuOptions(True))
    plain = Engine(target, LMDrafter(draft), registry.policy("none"), gpu_options=GpuOptions(False))
    texts, asked = [prompt(length, seed=length) for length in (9, 70, 2)], {"max_new_tokens": 6, "eos": ()}
    found = made.generate_batch(texts, **asked, **sampling)
    assert made.batch_fallback == "" and not made.exact_passes
    assert [text.token_ids for text in found] == [plain.generate(text, **asked, **sampling).token_ids for text in texts]


def test_a_drafter_with_windows_drafts_the_same_trees() -> None:
    """Its rows have masks, from which their paths follow."""
    target, draft = tiny(dtype=PRECISE), tiny("starcoder2", 1, PRECISE, sliding_window=12)
    policy, asked = registry.policy("beam", **ON_DEVICE["beam"]), {"max_new_tokens": 12, "eos": ()}
    launches = [GpuOptions(graphs, exact=False) for graphs in (False, True)]
    made = [Engine(Target(target), LMDrafter(draft), policy, gpu_options=own) for own in launches]
    wanted, found = (each.generate(prompt(30), **asked) for each in made)
    assert made[1].fallback == "" and found.token_ids == wanted.token_ids
    for one, other in zip(wanted.steps[:4], found.steps[:4], strict=True):
        assert paths(one.drafted) == paths(other.drafted) and len(one.drafted) > 1


class Synchronized(TorchDispatchMode):
    """Fails where the host would wait for the device, or a shape depends on numbers on it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not any(part in name for part in ("_local_scalar_dense", "nonzero", "masked_select", "unique")), name
        return func(*args, **(kwargs or {}))


def test_a_pass_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The references of the kernels do, on a CPU."""
    calls = []

    def attend(queries: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        calls.append(options)
        return queries.clone()

    forward = InterfaceForward(build("llama4_text"))
    monkeypatch.setattr(interface, "path_attention", attend)
    kv = torch.zeros(2, *forward.shape[:2], 32, forward.shape[2])
    depth, mask = torch.tensor([0, 1, 1]), torch.eye(3) > 0
    rows = rows_after(4, depth + 1, depth, mask, False, torch.device("cpu"))
    with Synchronized(), torch.inference_mode():
        forward(rows, kv, (0, -1), 0)
        forward.prefill(rows._replace(paths=None), kv, (), 0)
    assert [option["chunked"] for option in calls[:4]].count(True) == 3 and len(calls) == 8


@torch.inference_mode()
def test_the_model_keeps_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """After passes, also those that fail."""
    made = build("cohere2")
    forward = InterfaceForward(made)
    kv = torch.zeros(2, *forward.shape[:2], 32, forward.shape[2])
    rows = rows_after(0, torch.arange(3), torch.arange(3), torch.ones(3, 3).tril() > 0, True, torch.device("cpu"))
    used = []
    own = interface.path_attention
    monkeypatch.setattr(
        interface, "path_attention", lambda *x, **y: used.append(made.config._attn_implementation) or own(*x, **y)
    )
    forward(rows, kv, (), 0)
    assert set(used) == {NAME} and made.config._attn_implementation == "sdpa"
    monkeypatch.setattr(interface, "path_attention", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forward(rows, kv, (), 0)
    assert made.config._attn_implementation == "sdpa" and attention_function._running.attention is None


@pytest.mark.parametrize("kind", [InterfaceForward, MaskedForward, Target])
def test_passes_of_a_model_wait_for_each_other(kind: Any) -> None:
    """Those of two engines in two threads: a pass sets the attention of the model for both."""
    made, tokens = build("olmo2"), torch.arange(5)
    forward, other = InterfaceForward(made), kind(made)
    chain = rows_after(0, tokens, tokens, torch.ones(5, 5).tril() > 0, True, torch.device("cpu"))

    def logits(own: Any) -> torch.Tensor:
        with torch.inference_mode():
            if isinstance(own, Target):
                own.prefill([[0]])
                return own.score([DraftTree.root(0)])[0].logits
            kv = torch.zeros(2, *own.shape[:2], 32, own.shape[2])
            found: torch.Tensor = own(chain, kv, (), 32)[0]
            return found.clone()

    wanted = [logits(own) for own in (forward, other)]
    began, entered, ended = (threading.Event() for _ in range(3))

    def between_layers(*_: Any) -> None:
        """Lets the second pass begin during the first one, and end after it, unless it waits."""
        if not began.is_set():
            began.set()
            entered.wait(0.2)
        else:
            entered.set()
            ended.wait(10)

    made.model.layers[1].register_forward_pre_hook(between_layers)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(logits, forward)
        first.add_done_callback(lambda _: ended.set())
        assert began.wait(10)
        second = pool.submit(logits, other)
        assert torch.equal(first.result(), wanted[0]) and torch.equal(second.result(), wanted[1])
    assert made.config._attn_implementation == "sdpa"


# ---- models that do not fit


def wrapped(**changes: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Changes what the attention of a layer is given."""

    def change(model: Any) -> None:
        attention = model.model.layers[1].self_attn
        own = attention.forward
        attention.forward = lambda *given, **named: own(
            *given, **{**named, **{name: made(named.get(name)) for name, made in changes.items()}}
        )

    return change


def negative(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = -1.0


def mistaken(model: Any) -> None:
    """Doubles the output of windfall's attention."""
    attention = model.model.layers[1].self_attn
    own = attention.o_proj.forward
    attention.o_proj.forward = lambda x: own(x * (1 + (attention.config._attn_implementation == NAME)))


REFUSED: list[tuple[Callable[[Any], None], str]] = [
    (wrapped(attention_mask=lambda mask: None if mask is None else mask.clone()), "its attention changes its mask"),
    (wrapped(position_bias=lambda _: torch.zeros(1, 1, 1, 1)), "its attention has position_bias"),
    (wrapped(dropout_of_keys=lambda _: 0.5), "its attention has dropout_of_keys"),
    (wrapped(s_aux=lambda _: torch.zeros(2, 2)), "its attention sinks are not one number for each head"),
    (negative, "its attention scores have no positive scale"),
    (mistaken, "with windfall's attention its logits differ by"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_does_not_fit_says_why(change: Callable[[Any], None], reason: str) -> None:
    changed = tiny("starcoder2", sliding_window=12)
    change(changed)
    with pytest.raises(Unsupported, match=reason):
        InterfaceForward(changed)
    with pytest.raises(Unsupported, match=f"{reason}.* and its attention has sliding windows"):
        modules_forward(changed)
    assert changed.config._attn_implementation == "sdpa"
    without_window = tiny("starcoder2")
    change(without_window)
    assert isinstance(modules_forward(without_window), MaskedForward)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gptj", "is not called through transformers' interface"), ("diffllama", "changes the keys or values")],
)
def test_other_attention_runs_under_a_mask(name: str, reason: str) -> None:
    made = build(name)
    with pytest.raises(Unsupported, match=reason):
        InterfaceForward(made)
    assert isinstance(modules_forward(made), MaskedForward)


def test_windows_that_are_not_those_of_the_masks_are_noticed() -> None:
    made = tiny("starcoder2", sliding_window=12)
    made.config.layer_types = ["full_attention"] * 3
    forward = InterfaceForward(made)
    assert not forward.by_paths
    made.config.layer_types = ["sliding_attention", "full_attention", "full_attention"]
    with pytest.raises(Unsupported, match="its attention changes its mask"):
        InterfaceForward(made)  # Starcoder 2 takes one mask, not one for each kind of layers


def test_errors_during_a_check_are_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDFALL_CACHE", str(tmp_path))
    own = InterfaceForward._small_tree

    def fails(self: InterfaceForward) -> torch.Tensor:
        raise RuntimeError("not enough memory")

    for odd, reason in ((fails, "not enough memory"), (lambda self: own(self) / 0 * 0, "its logits are not finite")):
        monkeypatch.setattr(InterfaceForward, "_small_tree", odd)
        with pytest.raises(Unsupported, match=f"it does not run with windfall's attention: {reason}"):
            InterfaceForward(tiny("olmo2"))
    monkeypatch.setattr(InterfaceForward, "_small_tree", own)
    InterfaceForward(tiny("olmo2"))


def test_a_kind_of_model_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDFALL_CACHE", str(tmp_path))
    checks: list[Any] = []
    own = InterfaceForward._check
    monkeypatch.setattr(InterfaceForward, "_check", lambda self: checks.append(self) or own(self))
    for _ in range(2):
        InterfaceForward(tiny("starcoder2", sliding_window=12))
    assert len(checks) == 1
    InterfaceForward(tiny("starcoder2", sliding_window=13))
    assert len(checks) == 2, "another configuration"
    changed = tiny("starcoder2", sliding_window=12)
    mistaken(changed)
    for count in (3, 4):
        with pytest.raises(Unsupported, match="its logits differ"):
            InterfaceForward(changed)
        assert len(checks) == count, "a model with its own code is always checked"
    monkeypatch.setattr(InterfaceForward, "_check", lambda self: "it is odd")
    for _ in range(2):  # the second time the reason is known
        with pytest.raises(Unsupported, match="it is odd"):
            InterfaceForward(tiny("olmo2"))
        monkeypatch.setattr(InterfaceForward, "_check", own)
