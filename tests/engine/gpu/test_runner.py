"""Decoding on fixed buffers gives the same texts as the host loop and, for policies with a plan, the same trees.

Without a GPU the same work runs without CUDA graphs. Everything but the graphs themselves is tested here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.gpu import (
    LEARNING,
    LENGTH,
    ON_DEVICE,
    ON_HOST,
    PRECISE,
    SAMPLINGS,
    SELECTIVE,
    WATCHING,
    Replayed,
    drafter,
    engine,
    paths,
    plain_text,
    plan_of,
    same_trees,
)
from helpers.random_heads import random_head
from helpers.tiny import SHAPE, prompt, tiny
from windfall import registry
from windfall.core.types import GpuOptions, Step
from windfall.costs.acceptance import Calibrator
from windfall.costs.correction import Correction
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.drafters.lm import LMDrafter
from windfall.engine.engine import Engine, Generation
from windfall.engine.gpu.cycle import MAX_DRAFT_PASSES
from windfall.engine.gpu.drafters import drafter_form
from windfall.engine.gpu.events import DeviceEvent
from windfall.engine.gpu.forward import Pass
from windfall.engine.gpu.graphs import GraphCache, Key
from windfall.engine.gpu.pipeline import Pipeline
from windfall.engine.gpu.target import MAX_VERIFY_ROWS, VERIFY_SIZES
from windfall.engine.gpu.timing import costs
from windfall.model.target import Target

PAIRS = [("llama", "eagle3"), ("qwen3", "eagle"), ("gpt-neox", "eagle3-pruned"), ("olmo2", "griffin"), ("llama", "lm")]
LAUNCHES = [(False, False), (True, False), (True, True)]  # with graphs, exact


def both(family: str, kind: str, policy: str, **sampling: Any) -> tuple[Generation, Generation, Engine]:
    """The same text on the host path and on fixed buffers, and the engine of the latter."""
    asked = {"max_new_tokens": LENGTH, "eos": (), **sampling}
    coupled = asked.pop("coupled", True)
    host, device = (engine(family, kind, policy, graphs, coupled) for graphs in (False, True))
    return host.generate(prompt(), **asked), device.generate(prompt(), **asked), device


def plain(family: str, kind: str, policy: str, **sampling: Any) -> tuple[Generation, Engine]:
    """A text on fixed buffers, which is that of plain decoding, and its engine."""
    coupled = sampling.pop("coupled", True)
    device = engine(family, kind, policy, True, coupled)
    found = device.generate(prompt(), max_new_tokens=LENGTH, eos=(), **sampling)
    assert found.token_ids == plain_text(family, **sampling)
    return found, device


@pytest.mark.parametrize(
    ("policy", "family", "kind"),
    [
        *(("beam", *pair) for pair in PAIRS),
        *(("none", *pair) for pair in (PAIRS[0], PAIRS[3])),
        *(("ddd", *pair) for pair in (PAIRS[0], PAIRS[2])),
        *(("gt", *pair) for pair in (PAIRS[1], PAIRS[4])),
        *(("chain", *pair) for pair in (PAIRS[2], PAIRS[3], PAIRS[4])),
    ],
)
def test_the_device_drafts_the_same_trees(family: str, kind: str, policy: str) -> None:
    wanted, found, device = both(family, kind, policy)
    assert device.fallback == "" and device.gpu_runner is not None
    assert found.token_ids == wanted.token_ids
    same_trees(wanted, found, ON_DEVICE[policy].get("cap", ON_DEVICE[policy].get("depth", 0)))


@pytest.mark.parametrize("kind", ["eagle3-final", "eagle3-partial"])
def test_variants_of_heads_draft_the_same_trees(kind: str) -> None:
    wanted, found, device = both("llama", kind, "beam")
    assert device.fallback == "" and found.token_ids == wanted.token_ids
    same_trees(wanted, found, ON_DEVICE["beam"]["depth"])


@pytest.mark.parametrize("policy", LEARNING)
@pytest.mark.parametrize(("family", "kind"), [PAIRS[1], PAIRS[-1]])
def test_policies_that_learn_write_the_same_text(family: str, kind: str, policy: str) -> None:
    found, device = plain(family, kind, policy)
    assert device.fallback == ""
    assert max(step.draft_passes for step in found.steps) > 0


@pytest.mark.parametrize(("kind", "least"), [("eagle3", 1), ("eagle3", 3), ("lm", 2), ("lm", 3)])
def test_auto_follows_the_plain_rule(kind: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # nothing is learnt, so that the device cannot lag
    for name in ("observe", "update_forecast", "update_speedup", "record_draft_passes"):
        monkeypatch.setattr(Calibrator, name, lambda self, *given: None)
    monkeypatch.setattr(Correction, "observe", lambda self, *given: None)
    monkeypatch.setattr(Calibrator, "min_draft_passes", least)
    wanted, found, _ = both("llama", kind, "auto")
    assert found.token_ids == wanted.token_ids
    assert {step.draft_passes for step in wanted.steps[:3]} - {0, 1}
    same_trees(wanted, found, max(step.draft_passes for step in found.steps))


@pytest.mark.parametrize(
    ("family", "kind", "policy"),
    [*(("llama", "eagle3", policy) for policy in ON_HOST), ("gpt-neox", "lm", "salf"), ("olmo2", "griffin", "bandit")],
)
def test_policies_on_the_host_use_the_graph_pair(family: str, kind: str, policy: str) -> None:
    wanted, found, device = both(family, kind, policy)
    assert device.fallback and device.gpu_runner is not None
    assert found.token_ids == wanted.token_ids
    for one, other in zip(wanted.steps, found.steps, strict=True):
        assert paths(one.drafted) == paths(other.drafted) and paths(one.tree) == paths(other.tree)


@pytest.mark.parametrize("coupled", [True, False], ids=["coupled", "uncoupled"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("policy", ["beam", "auto", "salf"])
def test_sampling(policy: str, sampling: str, coupled: bool) -> None:
    family, kind = ("llama", "eagle3-pruned") if policy == "beam" else ("olmo2", "lm")
    if policy != "salf" and (policy, sampling) != ("beam", "penalty"):
        _, device = plain(family, kind, policy, coupled=coupled, **SAMPLINGS[sampling])
    else:
        wanted, found, device = both(family, kind, policy, coupled=coupled, **SAMPLINGS[sampling])
        assert found.token_ids == wanted.token_ids
        assert [paths(step.drafted) for step in found.steps] == [paths(step.drafted) for step in wanted.steps]
    assert (device.fallback == "") == (policy != "salf" and "penalty" not in sampling)


@pytest.mark.parametrize("policy", ["beam", "salf"])
def test_one_engine_after_another_sampling(policy: str) -> None:
    """Earlier requests, also unfinished ones, do not change a text."""
    texts = [prompt(9), prompt(30, seed=1), prompt(2, seed=2), prompt(9)]
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 7},
        {"repetition_penalty": 1.3},
        {"temperature": 0.6, "top_k": 5, "seed": 0},
    ]
    device = engine("llama", "eagle3", policy, graphs=True)
    for text, way in [*zip(texts, ways, strict=True), (texts[0], ways[2])]:
        next(device.stream(texts[1], max_new_tokens=9, temperature=1.0, seed=1))
        found = device.generate(text, max_new_tokens=8, eos=(), **way)
        wanted = engine("llama", "eagle3", "none", graphs=False).generate(text, max_new_tokens=8, eos=(), **way)
        assert found.token_ids == wanted.token_ids


@pytest.mark.parametrize("policy", ["beam", "salf"])
def test_the_buffers_grow(policy: str) -> None:
    changes = {"max_position_embeddings": 8192, "num_hidden_layers": 4}
    host, device = (engine("llama", "eagle3", policy, graphs, **changes) for graphs in (False, True))
    before = device.generate(prompt(), max_new_tokens=8, eos=())
    assert device.gpu_runner is not None
    capacity = device.gpu_runner.gpu_target.capacity
    wanted = host.generate(prompt(), max_new_tokens=LENGTH, eos=())
    last = next(
        place for place, token in enumerate(wanted.token_ids) if place > 9 and token not in wanted.token_ids[:place]
    )
    longer = device.generate(prompt(), max_new_tokens=4000, eos=(wanted.token_ids[last],))
    assert device.gpu_runner.gpu_target.capacity > capacity
    assert longer.token_ids == wanted.token_ids[: last + 1] and longer.finish_reason == "stop"
    assert before.token_ids == wanted.token_ids[:8]


def test_a_text_longer_than_the_first_columns() -> None:
    """Models that run under a mask read their cache up to a bound that moves."""
    changes = {"max_position_embeddings": 512}
    host, device = (engine("gptj", "itself", "chain", graphs, **changes) for graphs in (False, True))
    wanted, found = (each.generate(prompt(240), max_new_tokens=40, eos=()) for each in (host, device))
    assert found.token_ids == wanted.token_ids and found.stats.tau > 3


@pytest.mark.parametrize("policy", ["beam", "salf"])
@pytest.mark.parametrize("length", [128, 129, 130, 200])
def test_a_prompt_is_read_in_pieces(policy: str, length: int) -> None:
    """Trees too are the same: the head has seen every column once."""
    host, device = (engine("llama", "eagle3", policy, graphs) for graphs in (False, True))
    wanted, found = (each.generate(prompt(length), max_new_tokens=5, eos=()) for each in (host, device))
    assert found.token_ids == wanted.token_ids
    assert sorted(wanted.steps[0].drafted.tokens.tolist()) == sorted(found.steps[0].drafted.tokens.tolist())


@pytest.mark.parametrize("policy", ["none", "beam", "auto", "salf"])
def test_exact_passes_follow_paths_and_are_not_padded(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    plain = Engine(
        Target(tiny()), FeatureHeadDrafter(random_head()), registry.policy("none"), gpu_options=GpuOptions(False)
    )
    made = Engine(
        Target(tiny()), FeatureHeadDrafter(random_head()), registry.policy(policy), gpu_options=GpuOptions(True)
    )
    assert made.gpu_runner is not None
    forward = made.gpu_runner.gpu_target.forward
    call = type(forward).__call__

    def watched(self: Any, rows: Pass, *rest: Any) -> Any:
        seen.append((len(rows.tokens), rows.paths is not None))
        return call(self, rows, *rest)

    monkeypatch.setattr(type(forward), "__call__", watched)
    found = made.generate(prompt(60), max_new_tokens=LENGTH, eos=())
    assert found.token_ids == plain.generate(prompt(60), max_new_tokens=LENGTH, eos=()).token_ids
    assert all(follows_paths for _, follows_paths in seen) and forward.exact
    sizes = {size for size, _ in seen}
    assert sizes == {1} if policy == "none" else max(sizes) > 1
    assert sizes <= set(VERIFY_SIZES) | {step.tree.tokens.numel() for step in found.steps}


@pytest.mark.parametrize("policy", ["chain"])
def test_the_end_may_lie_inside_a_cycle(policy: str) -> None:
    wanted = engine("llama", "itself", policy, graphs=False).generate(prompt(), max_new_tokens=LENGTH, eos=())
    ids, device = wanted.token_ids, engine("llama", "itself", policy, graphs=True)
    place = next(p for p in range(5, LENGTH) if ids[p] not in ids[:p] and p % 5 < 4)  # cycles emit five tokens
    ended = device.generate(prompt(), max_new_tokens=LENGTH, eos=(ids[place],))
    assert (ended.token_ids, ended.finish_reason) == (ids[: place + 1], "stop")
    assert ended.steps[-1].accepted == 4 and len(ended.steps[-1].tokens) == place % 5 + 1
    assert device.generate(prompt(), max_new_tokens=LENGTH, eos=()).token_ids == ids
    stop = wanted.text[6:8]
    stopped = device.generate(prompt(), max_new_tokens=LENGTH, eos=(), stop=stop)
    assert stopped.text == wanted.text[: wanted.text.index(stop)] and stopped.finish_reason == "stop"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_end_of_the_context(family: str) -> None:
    """Trees may reach past the last position; what is there is never emitted."""
    host, device = (engine(family, "itself", "beam", graphs) for graphs in (False, True))
    wanted, found = (each.generate(prompt(246), max_new_tokens=LENGTH, eos=()) for each in (host, device))
    assert found.token_ids == wanted.token_ids and len(found.token_ids) == 10 and found.finish_reason == "length"


def test_a_head_with_few_positions() -> None:
    texts = []
    for graphs in (False, True):
        head = FeatureHeadDrafter(random_head(positions=16))
        made = Engine(
            Target(tiny()), head, registry.policy("beam", **ON_DEVICE["beam"]), gpu_options=GpuOptions(graphs)
        )
        texts.append(made.generate(prompt(), max_new_tokens=LENGTH, eos=()).token_ids)
    assert texts[0] == texts[1]


def test_a_batch_goes_over_the_host() -> None:
    device, host = (engine("llama", "eagle3", "beam", graphs) for graphs in (True, False))
    texts = [prompt(9), prompt(5, seed=1)]
    alone = [device.generate(text, max_new_tokens=12, eos=()).token_ids for text in texts]
    together = device.generate_batch(texts, max_new_tokens=12, eos=())
    assert [each.token_ids for each in together] == alone
    assert [host.generate(text, max_new_tokens=12, eos=()).token_ids for text in texts] == alone


@pytest.mark.usefixtures("no_interface", "only_llama_is_fused")
def test_what_does_not_fit_says_why_and_runs_all_the_same() -> None:
    host, device = (engine("starcoder2", "lm", "beam", graphs, sliding_window=12) for graphs in (False, True))
    wanted, found = (each.generate(prompt(), max_new_tokens=LENGTH, eos=()) for each in (host, device))
    assert device.gpu_runner is None
    assert device.fallback == "its attention is its own and its attention has sliding windows"
    assert found.token_ids == wanted.token_ids
    assert engine("llama", "lm", "beam", graphs=False).gpu_runner is None


class Operations(TorchDispatchMode):
    """Lists every operation with its shapes and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((str(func), self._plain(args), self._plain(list((kwargs or {}).values()))))
        return func(*args, **(kwargs or {}))

    def _plain(self, given: Any) -> Any:
        if isinstance(given, list | tuple):
            return tuple(map(self._plain, given))
        return tuple(given.shape) if isinstance(given, torch.Tensor) else given


@pytest.mark.parametrize(
    ("family", "kind", "policy", "length"),
    [
        ("gptj", "itself", "chain", 375),
        ("starcoder2", "itself", "chain", 60),
        ("llama", "eagle3", "auto", 9),
        ("llama", "eagle3", "svip", 60),
        ("llama", "eagle3", "dynatree", 60),
    ],
)
def test_a_key_means_the_same_work(
    family: str, kind: str, policy: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph repeats the captured run, with the Python numbers of that time."""
    known: dict[Key, list[list[Any]]] = {}

    def run(self: GraphCache, key: Key, work: Callable[[], None]) -> None:
        with Operations() as operations:
            work()
        runs = known.setdefault(key, [])
        runs.append(operations.seen)
        assert len(runs) < 3 or runs.pop() == runs[1], key

    monkeypatch.setattr(GraphCache, "run", run)
    device = engine(family, kind, policy, graphs=True, max_position_embeddings=1024)
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.5}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9}]
    for way in [*ways, {"temperature": 0.5, "top_p": 0.8, "top_k": 7}, {"temperature": 0.6, "min_p": 0.1}]:
        for device.coupled in (True, False) if length < 50 else (True,):
            device.generate(prompt(length), max_new_tokens=7, eos=(), **way)
    device.generate(prompt(length + 30), max_new_tokens=7, eos=())
    assert sum(len(runs) > 1 for runs in known.values()) >= 8


def hooked(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda module, given, made: made * 2)


def adapted(model: Any) -> None:
    class Adapter(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model.model.layers[1].mlp.down_proj.__class__ = Adapter


@pytest.mark.parametrize("change", [hooked, adapted])
def test_a_model_that_somebody_changed_runs_as_it_is(change: Callable[[Any], None]) -> None:
    model, beam = tiny(), registry.policy("beam", **ON_DEVICE["beam"])
    wanted = Engine(Target(model), LMDrafter(), registry.policy("none"), gpu_options=GpuOptions(False))
    before = wanted.generate(prompt(), max_new_tokens=LENGTH, eos=()).token_ids
    change(model)
    found = Engine(Target(model), LMDrafter(), beam, gpu_options=GpuOptions(True))
    after = wanted.generate(prompt(), max_new_tokens=LENGTH, eos=()).token_ids
    assert found.generate(prompt(), max_new_tokens=LENGTH, eos=()).token_ids == after != before
    assert found.fallback == "" and found.gpu_runner is not None


def test_a_cache_that_the_configuration_does_not_tell_of() -> None:
    """Falcon's heads may share one pair of key and value."""
    torch.manual_seed(0)
    config = transformers.FalconConfig(**SHAPE, alibi=False, multi_query=True, new_decoder_architecture=False)
    target = Target(transformers.AutoModelForCausalLM.from_config(config).eval())
    texts = []
    for graphs in (False, True):
        own = registry.policy("beam", **ON_DEVICE["beam"])
        made = Engine(target, LMDrafter(), own, gpu_options=GpuOptions(graphs))
        texts.append(made.generate(prompt(), max_new_tokens=LENGTH, eos=()).token_ids)
        assert (made.fallback == "") == graphs
    assert texts[0] == texts[1]


def test_angles_that_follow_the_length_do_not_fit() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    device = engine("llama", "lm", "beam", graphs=True, rope_parameters=rope)
    assert device.gpu_runner is None and "rotary" in device.gpu_unavailable


@pytest.mark.usefixtures("no_interface", "only_llama_is_fused")
@pytest.mark.parametrize("policy", ["beam", "bandit"])
def test_a_drafter_that_does_not_fit_drafts_on_the_host(policy: str) -> None:
    texts = []
    for graphs in (False, True):
        made = Engine(
            Target(tiny()),
            LMDrafter(tiny("starcoder2", seed=1, sliding_window=12)),
            registry.policy(policy, **{**ON_DEVICE, **ON_HOST}[policy]),
            gpu_options=GpuOptions(graphs),
        )
        texts.append(made.generate(prompt(30), max_new_tokens=LENGTH, eos=(), temperature=1.0, seed=6).token_ids)
    reason = "its attention is its own and its attention has sliding windows"
    reasons = {"beam": f"its drafter works on the host: {reason}"}
    assert made.fallback == reasons.get(policy, "its policy decides on the host")
    assert texts[0] == texts[1] and made.gpu_runner is not None


def test_merged_weights_are_kept_once_and_can_be_trained() -> None:
    target, head = Target(tiny()), random_head("eagle3")
    made = [
        Engine(target, FeatureHeadDrafter(head), registry.policy("beam"), gpu_options=GpuOptions(True))
        for _ in range(2)
    ]
    for each in made:
        each.generate(prompt(), max_new_tokens=4, eos=())
    one, other = (each.gpu_runner.gpu_target.forward.layers[0] for each in made)  # type: ignore[union-attr]
    assert one.qkv.data_ptr() == other.qkv.data_ptr()
    assert one.mlp.gate_up.data_ptr() == other.mlp.gate_up.data_ptr()
    attention = target.model.model.layers[0].self_attn
    assert torch.equal(one.qkv, torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]))
    for module in (target.model, head):
        assert not any(parameter.is_inference() for parameter in module.parameters())


def as_transformers(model: Any) -> list[int]:
    given = torch.tensor([prompt()])
    options = {"attention_mask": torch.ones_like(given), "max_new_tokens": LENGTH, "do_sample": False}
    return model.generate(given, **options)[0, len(prompt()) :].tolist()


def other_weights(model: Any) -> None:
    model.load_state_dict(biased(2).state_dict())


def new_tensors(model: Any) -> None:
    model.load_state_dict(biased(2).state_dict(), assign=True)


def a_hook(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, given, logits: -logits)


def another_module(model: Any) -> None:
    """As adapters do."""
    for layer in model.model.layers:
        layer.mlp.down_proj = torch.nn.Sequential(layer.mlp.down_proj, torch.nn.Tanh())


def moved_and_back(model: Any) -> None:
    model.to(torch.float32).to(PRECISE)


def biased(seed: int) -> Any:
    model = tiny("qwen2", seed, PRECISE, num_hidden_layers=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(seed))
    return model


@pytest.mark.parametrize("change", [other_weights, new_tensors, a_hook, another_module, moved_and_back])
def test_a_model_that_changes_between_texts(change: Callable[[Any], None]) -> None:
    model = biased(1)
    parameters = list(model.parameters())
    made = Engine(Target(model), LMDrafter(), registry.policy("chain", depth=2), gpu_options=GpuOptions(True))
    text = {"max_new_tokens": LENGTH, "eos": ()}
    before = made.generate(prompt(), **text).token_ids
    first = made.gpu_runner
    assert before == as_transformers(model) and made.generate(prompt(), **text).token_ids == before
    assert made.gpu_runner is first  # nothing was made anew
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))  # optimisers know them
    change(model)
    after = made.generate(prompt(), **text).token_ids
    assert after == as_transformers(model)
    assert (after == before) is (change is moved_and_back)
    assert (made.gpu_runner is first) is (change is other_weights)  # in their place


@pytest.mark.parametrize("family", ["llama", "gpt-neox"])
def test_what_transformers_does_to_a_model_is_no_change(family: str) -> None:
    """Its own hooks, by which it hands out hidden states, come when somebody asks for these."""
    made = engine(family, "eagle3", "beam", graphs=True)
    text = {"max_new_tokens": 4, "eos": ()}
    made.generate(prompt(), **text)
    first = made.gpu_runner
    made.target.model(torch.tensor([prompt()]), output_hidden_states=True)
    made.generate_batch([prompt(), prompt(5)], **text)
    made.generate(prompt(), **text)
    assert made.gpu_runner is first is not None


def test_a_drafter_on_another_device_stays_on_the_host() -> None:
    drafter = LMDrafter()
    drafter.attach(Target(tiny()))
    assert drafter_form(drafter, torch.device("cpu")) == drafter.gpu_form()
    assert drafter_form(drafter, torch.device("meta")) == "its drafter is on cpu, the target on meta"


def test_a_single_token_is_a_prompt() -> None:
    host, device = (engine("llama", "eagle3", "beam", graphs) for graphs in (False, True))
    wanted, found = (each.generate([5], max_new_tokens=12, eos=()) for each in (host, device))
    assert found.token_ids == wanted.token_ids


@pytest.mark.parametrize("policy", ["beam", "salf"])
def test_measuring_leaves_no_trace(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the size of the buffers nor in texts before and after it."""
    monkeypatch.setattr("windfall.engine.gpu.timing.ROUNDS", 1)
    device = engine("llama", "lm", policy, graphs=True, max_position_embeddings=4096)
    before = device.generate(prompt(), max_new_tokens=LENGTH, eos=())
    assert device.gpu_runner is not None
    capacity = device.gpu_runner.gpu_target.capacity
    found = costs(device.gpu_runner, lengths=(2048,))
    assert device.gpu_runner.gpu_target.capacity == capacity and found.verify(1, 2048) > 0
    after = device.generate(prompt(), max_new_tokens=LENGTH, eos=())
    assert after.token_ids == before.token_ids
    assert [paths(step.drafted) for step in after.steps] == [paths(step.drafted) for step in before.steps]


def test_steps_account_for_their_time() -> None:
    _, found, _ = both("llama", "eagle3", "beam")
    assert all(step.seconds.draft > 0 and step.seconds.verify > 0 for step in found.steps)
    assert sum(step.seconds.total for step in found.steps) <= 1.5 * found.stats.seconds


@pytest.mark.parametrize(
    ("policy", "kind", "temperature"),
    [
        *((policy, "lm", 0.0) for policy in (*ON_DEVICE, *WATCHING, *LEARNING, *SELECTIVE)),
        *((policy, "eagle3", 0.7) for policy in ("beam", "gt", "svip", "auto", "talon")),
    ],
)
def test_no_cycle_waits_for_a_capture(
    policy: str, kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All graphs that a request may need are captured before it starts."""
    monkeypatch.setattr(GraphCache, "_capture", lambda self, key, work: self.graphs.update({key: Replayed(work)}))
    device = engine("llama", kind, policy, graphs=True)
    assert device.gpu_runner is not None
    device.gpu_runner.gpu_target.graph_cache.enabled = True
    sampling = {"temperature": temperature, "seed": 0}
    for _ in range(2):
        found = device.generate(prompt(), max_new_tokens=LENGTH, eos=(), **sampling)
        assert device.fallback == "" and found.token_ids == plain_text("llama", **sampling)
        assert not any(step.recorded for step in found.steps)


@pytest.mark.parametrize("plans", [True, False])
def test_costs_are_not_learnt_from_cycles_with_a_capture(plans: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture of a pass of a new size makes its cycle slow once."""
    paced: list[float] = []

    def capture(self: GraphCache, key: Key, work: Callable[[], None]) -> None:
        time.sleep(0.05)
        self.graphs[key] = Replayed(work)  # type: ignore[assignment]

    monkeypatch.setattr(GraphCache, "_capture", capture)
    monkeypatch.setattr(Pipeline, "capture_graphs", lambda self, ctx: None)
    monkeypatch.setattr(Calibrator, "update_speedup", lambda self, tokens, seconds, plain: paced.append(seconds))
    device = engine("llama", "lm", "auto", graphs=True, plans=plans)
    assert device.gpu_runner is not None
    device.gpu_runner.gpu_target.graph_cache.enabled = True
    wanted = plain_text("llama")
    paced.clear()
    found = device.generate(prompt(), max_new_tokens=LENGTH, eos=())
    assert (device.fallback == "") == plans
    assert found.token_ids == wanted
    assert {step.recorded for step in found.steps} == {True, False} and found.steps[0].recorded
    assert all(step.seconds.total > 0.05 for step in found.steps if step.recorded)
    measured = sum(step.seconds.total for step in found.steps if not step.recorded)
    assert paced and sum(paced) == pytest.approx(measured, rel=0.2)  # the last lap is behind the lesson


@pytest.mark.parametrize("settings", [{"confidence": 0.1}, {"schedule": "heuristic"}, {"depth": MAX_DRAFT_PASSES}])
def test_all_chains_run_on_the_device_up_to_its_limit(settings: dict[str, Any]) -> None:
    assert plan_of(registry.policy("chain", **settings)) is not None
    assert plan_of(registry.policy("chain", depth=MAX_DRAFT_PASSES + 1)) is None


def test_the_speed_up_is_learnt_on_the_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    own = registry.policy("gt", **{**ON_DEVICE["gt"], "threshold": "c*S"})
    monkeypatch.setattr(type(own), "fresh", lambda self: self)
    made = Engine(Target(tiny()), LMDrafter(), own, gpu_options=GpuOptions(True))
    made.generate(prompt(), max_new_tokens=LENGTH, eos=())
    assert made.fallback == "" and own._speedup > 1


@pytest.mark.parametrize(("c", "places"), [(None, 11), (0.0, 2311)])
def test_gt_as_it_comes_is_followed_on_the_device(c: float | None, places: int) -> None:
    """As deep as it may go, too."""
    own, target = registry.policy("gt", c=c), Target(tiny(dtype=PRECISE))
    made = [Engine(target, drafter("lm"), own, gpu_options=GpuOptions(graphs)) for graphs in (False, True)]
    wanted, found = (list(islice(each.stream(prompt(), max_new_tokens=99, eos=()), 3)) for each in made)
    assert made[1].fallback == "" and min(len(step.drafted) for step in found) >= places
    for one, other in zip(wanted, found, strict=True):
        assert one.tokens == other.tokens and one.draft_passes == other.draft_passes
        assert paths(one.drafted) == paths(other.drafted) and paths(one.tree) == paths(other.tree)


def test_a_tree_too_large_for_the_device_is_left_to_the_host() -> None:
    assert plan_of(registry.policy("gt", cap=32)) is not None
    assert plan_of(registry.policy("gt", cap=32, k=12)) is None


@pytest.mark.parametrize(
    ("name", "settings"),
    [("gt-static", {"c": 1e-4}), ("fixed-tree", {"tau": 0.0}), ("optimal", {"nodes": MAX_VERIFY_ROWS - 1})],
)
def test_the_largest_trees_run_in_the_graph_pair(name: str, settings: dict[str, Any]) -> None:
    """256 drafted nodes and the root are more than 256 rows."""
    own, target = registry.policy(name, **settings), Target(tiny(dtype=PRECISE))
    made = [
        Engine(target, drafter("itself"), own, gpu_options=GpuOptions(graphs, exact=exact))
        for graphs, exact in LAUNCHES
    ]
    texts = [each.generate(prompt(), max_new_tokens=16, eos=()) for each in made]
    assert texts[0].token_ids == texts[1].token_ids == texts[2].token_ids
    assert {max(len(step.tree) for step in text.steps) for text in texts} == {
        MAX_VERIFY_ROWS if name == "optimal" else 257
    }


@pytest.mark.parametrize("kind", ["eagle3", "lm"])
def test_plans_and_the_graph_pair_share_the_drafter_s_cache(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One buffer serves all, as there is one request at a time; growth drops everything that uses the old one."""
    monkeypatch.setattr("windfall.engine.gpu.target.INITIAL_CAPACITY_ROWS", 2048 - MAX_VERIFY_ROWS)
    device = engine("llama", kind, "beam", graphs=True, max_position_embeddings=8192)
    for name in ("beam", "chain", "bandit"):
        device.policy = registry.policy(name)
        device.generate(prompt(), max_new_tokens=4, eos=())
    runner = device.gpu_runner
    assert runner is not None and len(runner.cycles) == 2
    caches = {cycle.draft.kv.data_ptr() for cycle in runner.cycles.values() if cycle.draft is not None}
    assert caches == {runner._host_policy_pair[1].draft.kv.data_ptr()}  # type: ignore[index,attr-defined]
    next(device.stream(prompt(), max_new_tokens=4000))
    assert not runner.cycles and runner._host_policy_pair is not None


def test_measuring_may_be_interrupted() -> None:
    device = engine("llama", "lm", "beam", graphs=True, max_position_embeddings=4096)
    assert device.gpu_runner is not None
    capacity = device.gpu_runner.gpu_target.capacity

    def interrupt(share: float) -> None:
        if share > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        costs(device.gpu_runner, lengths=(2048,), progress=interrupt)
    assert device.gpu_runner.gpu_target.capacity == capacity


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("policy", ["auto", "beam"])
def test_time_between_steps_is_not_counted_as_drafting(
    policy: str, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the device is still busy when the caller asks for the next step: it may be the caller's work."""
    if busy:
        monkeypatch.setattr(DeviceEvent, "done", lambda self: False)
    clock = FakeClock()
    for module in ("events", "pipeline", "runner"):
        monkeypatch.setattr(f"windfall.engine.gpu.{module}.time", clock)
    made, split = engine("llama", "eagle3", policy, graphs=True), []
    for step in made.stream(prompt(), max_new_tokens=LENGTH, eos=()):
        split.append(step.seconds)
        clock.now += 0.1
    assert made.fallback == "" and len(split) > 4
    assert all(each.draft < 0.01 < each.other for each in split[2:])


class FakeClock:
    """A clock that only moves when it is read, or by hand."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now


@pytest.mark.parametrize("all_of_it", [True, False], ids=["to the end", "to the last step"])
def test_a_step_is_handed_out_before_anything_is_learnt_from_it(all_of_it: bool) -> None:
    made = engine("llama", "eagle3", "beam", graphs=True)
    observed: list[int] = []

    class Watching(Calibrator):
        def observe(self, step: Step) -> None:
            observed.append(len(step.tokens))

    made.calibrators.default_factory = Watching
    taken: list[int] = []
    for step in made.stream(prompt(), max_new_tokens=24, eos=()):
        assert observed == taken
        taken.append(len(step.tokens))
        if step.finish and not all_of_it:
            break
    assert observed == taken and len(taken) > 3
