"""The engine on the host: the same seed gives the same text, for every policy, drafter and kind of sampling."""

from __future__ import annotations

import itertools
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import windfall
from helpers.cli import character_tokenizer
from helpers.random_parallel import some_drafter
from helpers.sampling import SAMPLING
from helpers.tiny import FAMILIES, VOCABULARY, prompt, tiny
from windfall import registry
from windfall.core.types import GpuOptions, InputError
from windfall.drafters.ngram import NGramDrafter
from windfall.engine.engine import Engine
from windfall.model.target import Target

DRAFTERS = [*registry.drafters(), "small"]


@cache
def target(family: str = "llama") -> Target:
    return Target(tiny(family))


@cache
def engine_of(drafter: str, family: str = "llama") -> Engine:
    return Engine(target(family), some_drafter(drafter), registry.policy("none"))


def engine(policy: str, drafter: str, family: str = "llama") -> Engine:
    """The engine of this drafter, with this policy."""
    made = engine_of(drafter, family)
    made.policy = registry.policy(policy)
    return made


def ids(engine: Engine, seed: int = 0, prompt_seed: int = 0, **sampling: Any) -> list[int]:
    sampling = {"max_new_tokens": 14, "seed": seed} | sampling
    return engine.generate(prompt(seed=prompt_seed), **sampling).token_ids


def hf_greedy(model: Any, tokens: list[int], count: int, **options: Any) -> list[int]:
    inputs = torch.tensor([tokens])
    out = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=count, **options
    )
    return out[0, len(tokens) :].tolist()


@cache
def plain_ids(sampling: str, seed: int) -> list[int]:
    return ids(engine("none", "ngram"), seed, seed, **SAMPLING[sampling])


def crossed() -> list[tuple[str, str, str]]:
    """Every policy with every drafter, and every policy with every sampling."""
    samplings = list(SAMPLING)
    assert len(DRAFTERS) >= len(samplings)
    policies = [name for name in registry.policies() if name != "none"]
    return [
        (policy, drafter, samplings[(i + j) % len(samplings)])
        for i, policy in enumerate(policies)
        for j, drafter in enumerate(DRAFTERS)
    ]


@pytest.mark.parametrize(("policy", "drafter_name", "sampling"), crossed())
def test_same_seed_gives_same_text_for_every_policy_and_drafter(policy: str, drafter_name: str, sampling: str) -> None:
    seed = len(policy) % 3
    assert ids(engine(policy, drafter_name), seed, seed, **SAMPLING[sampling]) == plain_ids(sampling, seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_transformers_generate(family: str) -> None:
    """For every family: plain decoding and trees give what `model.generate` gives, past a sliding window too."""
    model, tokens = target(family).model, prompt(9)
    wanted = hf_greedy(model, tokens, 16)
    for policy, name in (("none", "ngram"), ("beam", "self"), ("chain", "lm")):
        assert engine(policy, name, family).generate(tokens, max_new_tokens=16).token_ids == wanted, policy


@pytest.mark.parametrize("policy", ["chain", "beam", "fixed-tree"])
def test_target_as_its_own_drafter_is_always_right(policy: str) -> None:
    """The walk ends only where the tree does: no level below an accepted node is ever missed."""
    generation = engine(policy, "lm").generate(prompt(), max_new_tokens=40)
    for step in generation.steps[:-1]:
        assert int(step.path[-1]) not in step.tree.parents.tolist()
        assert step.accepted >= 1
        assert step.tree.rank[step.path].max() == 0


def test_eos_inside_a_path_ends_the_text() -> None:
    plain = ids(engine("none", "lm"), max_new_tokens=16)
    for i, policy in enumerate(registry.policies()):
        eos = plain[(3, 7, 12)[i % 3]]
        generation = engine(policy, "lm").generate(prompt(), max_new_tokens=16, eos=(eos, 60))
        assert generation.token_ids == plain[: plain.index(eos) + 1]
        assert generation.finish_reason == "stop"


def test_never_more_tokens_than_asked() -> None:
    plain = ids(engine("none", "lm"), max_new_tokens=12)
    for i, policy in enumerate(registry.policies()):
        count = (1, 2, 7)[i % 3]
        generation = engine(policy, "lm").generate(prompt(), max_new_tokens=count)
        assert generation.token_ids == plain[:count]
        assert generation.finish_reason == "length"
        assert sum(len(step.tokens) for step in generation.steps) == count


def test_the_context_is_never_exceeded() -> None:
    tokens = prompt(250)
    for policy in ("none", "beam"):
        generation = engine(policy, "lm").generate(tokens, max_new_tokens=100)
        assert len(generation.token_ids) == 6
        assert generation.finish_reason == "length"


def test_a_text_is_the_same_alone_and_in_a_batch() -> None:
    prompts = [prompt(5, 1), prompt(30, 2), prompt(1, 3), prompt(12, 4)]
    ended = {"eos": tuple(range(0, 61, 9)), "temperature": 0.9, "seed": 0}
    warm = {"temperature": 1.0, "seed": 3}
    for policy, name, samplings in (
        ("beam", "small", [{}, warm, ended]),
        ("chain", "self", [ended]),
        ("fixed-tree", "ngram", [warm]),
    ):
        made = engine(policy, name)
        for sampling in samplings:
            alone = [made.generate(p, max_new_tokens=12, **sampling) for p in prompts]
            together = made.generate_batch(prompts, max_new_tokens=12, **sampling)
            assert [g.token_ids for g in together] == [g.token_ids for g in alone]
            assert [g.finish_reason for g in together] == [g.finish_reason for g in alone]


def test_custom_processor_is_exact_inside_a_tree() -> None:
    def no_repeat(prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Forbids the last two tokens: wrong prefixes would show at once."""
        return scores.scatter(1, prefix[:, -2:], -torch.inf)

    for temperature in (0.0, 1.0):
        plain = ids(engine("none", "lm"), temperature=temperature, processors=(no_repeat,))
        assert all(a != b for a, b in itertools.pairwise(plain))
        for policy in ("chain", "beam", "fixed-tree"):
            assert ids(engine(policy, "lm"), temperature=temperature, processors=(no_repeat,)) == plain


def test_a_stateful_processor_is_called_as_in_plain_decoding() -> None:
    """It is called once for each visited node, in order, with one row."""

    def run(policy: str) -> tuple[list[int], list[int]]:
        lengths: list[int] = []

        def counting(prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            lengths.append(prefix.shape[1])
            assert len(prefix) == 1
            return scores + (len(lengths) % 3) * torch.arange(VOCABULARY).remainder(7)

        return ids(engine(policy, "lm"), processors=(counting,)), lengths

    (plain, calls), (tree, more) = run("none"), run("beam")
    assert calls == list(range(9, 9 + len(plain)))
    assert more[: len(calls)] == calls  # a path may end past the limit
    assert tree == plain


def test_an_empty_batch_gives_an_empty_list() -> None:
    assert engine("none", "lm").generate_batch([]) == []


class Counting:
    """A processor with state: it forbids a token that depends on how many times it was called."""

    def __init__(self) -> None:
        self.calls = 0
        self.lock: Any = None

    def __call__(self, prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        forbidden = scores.topk(1 + self.calls % 3).indices
        return scores.scatter(1, forbidden, -torch.inf)


def test_each_text_of_a_batch_has_processors_of_its_own() -> None:
    made, prompts = engine("beam", "ngram"), [prompt(seed=1), prompt(seed=2)]
    alone = [made.generate(each, max_new_tokens=12, processors=[Counting()]).token_ids for each in prompts]
    together = made.generate_batch(prompts, max_new_tokens=12, processors=[Counting()])
    assert [done.token_ids for done in together] == alone
    uncopiable = Counting()
    uncopiable.lock = threading.Lock()
    with pytest.raises(InputError, match="Counting cannot be copied for each prompt"):
        made.generate_batch(prompts, max_new_tokens=2, processors=[uncopiable])


@pytest.mark.parametrize("drafter_name", DRAFTERS)
def test_caches_hold_what_was_committed(drafter_name: str) -> None:
    made = engine("beam", drafter_name)
    tokens = prompt(7)
    length = len(tokens)
    for step in made.stream(tokens, max_new_tokens=30):
        length += len(step.tokens)
        cache = made.target.decoder.cache
        cache.check()
        step.tree.check()
        assert cache.staged == 0
        if step.finish is None:
            assert cache.lengths == [length - 1]
            if hasattr(made.drafter, "_pending"):
                held = made.drafter.decoder.cache.lengths[0] + len(made.drafter._pending[0])
                assert held == length


def test_stream_gives_the_text_of_generate() -> None:
    made = engine("beam", "lm")
    steps = list(made.stream(prompt(), max_new_tokens=20, temperature=0.9, seed=4))
    assert [t for step in steps for t in step.tokens] == ids(made, 4, temperature=0.9, max_new_tokens=20)
    assert steps[-1].finish == "length"
    assert all(step.finish is None for step in steps[:-1])


def test_the_first_step_has_the_prefill_seconds() -> None:
    first, *later = engine("chain", "lm").stream(prompt(), max_new_tokens=12)
    assert first.prefill_seconds > 0 and not any(step.prefill_seconds for step in later)


def test_a_second_generation_ends_the_first() -> None:
    made = engine("beam", "lm")
    first = made.stream(prompt(), max_new_tokens=30)
    next(first)
    made.generate(prompt(), max_new_tokens=3)
    with pytest.raises(RuntimeError, match="another generation"):
        next(first)


def test_a_second_engine_on_the_same_target_ends_the_first_generation() -> None:
    target = Target(tiny())
    one, other = (
        Engine(target, some_drafter("ngram"), registry.policy("none"), gpu_options=GpuOptions(False)) for _ in "ab"
    )
    first = one.stream(prompt(), max_new_tokens=30)
    next(first)
    other.generate(prompt(7), max_new_tokens=3)
    with pytest.raises(RuntimeError, match="or on its Target"):
        next(first)
    assert ids(one) == plain_ids("greedy", 0)


def test_an_interrupted_generation_leaves_the_engine_usable() -> None:
    made = engine("beam", "lm")
    steps = made.stream(prompt(), max_new_tokens=30)
    next(steps)
    steps.close()
    assert ids(made) == ids(engine("none", "lm"))


def test_stats_add_up() -> None:
    stats = engine("chain", "lm").generate(prompt(), max_new_tokens=24).stats
    assert stats.tokens == 24
    assert stats.target_passes == stats.cycles == 4  # depth 5 and all accepted: 6 tokens a pass
    assert stats.tau == 6
    assert stats.draft_passes == 5 * 4
    assert 0 < stats.ttft < stats.seconds
    assert stats.split.total + stats.prefill <= stats.seconds * 1.01
    assert stats.as_dict()["time"].keys() >= {"draft", "verify", "policy", "other"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": ["a", "b"]}, "a prompt is text"),
        ({"prompt": {"role": "user"}}, "a prompt is text"),
        ({"prompt": torch.ones(2, 3, dtype=torch.long)}, "of one prompt"),
        ({"prompt": [1], "seed": 1.5}, "seed must be a whole number, or None"),
        ({"prompt": "text"}, "no tokenizer"),
        ({"prompt": [1, VOCABULARY]}, "between 0 and 60"),
        ({"prompt": [1] * 256}, "256 tokens.*255 at most"),
        ({"prompt": [1], "temprature": 1}, "no sampling option 'temprature'"),
        ({"prompt": [1], "stop": "x"}, "need a tokenizer"),
        ({"prompt": [1], "logit_bias": {99: 1.0}}, "between 0 and 60"),
        ({"prompt": [1], "logit_bias": [1]}, "logit_bias takes"),
        ({"prompt": [1], "logit_bias": {"a": 1}}, "logit_bias takes"),
        ({"prompt": [1], "logit_bias": {1: float("inf")}}, r"1e\+30, or -inf"),
        ({"prompt": [1], "temperature": 1e39}, r"temperature must lie between -1e\+30 and 1e\+30"),
        ({"prompt": [1], "logit_bias": {1: "much"}}, "values must be numbers"),
        ({"prompt": [1], "temperature": "1"}, "temperature must be a number, not '1'"),
        ({"prompt": [1], "top_p": None}, "top_p must be a number"),
        ({"prompt": [1], "max_new_tokens": True}, "max_new_tokens must be a whole number"),
        ({"prompt": [1], "eos": ("</s>",)}, "eos takes token ids"),
        ({"prompt": [1], "stop": (1,)}, "stop takes strings"),
        ({"prompt": [1], "stop": 5}, "stop takes strings"),
        ({"prompt": [1.0, 2.0]}, "a prompt is text"),
        ({"prompt": torch.tensor([1j])}, "a prompt is text"),
        ({"prompt": torch.tensor(1)}, "a prompt is text"),
    ],
)
def test_bad_input_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        engine("none", "ngram").generate(**wrong)
    assert "\n" not in str(error.value)


def test_unset_options_have_no_effect() -> None:
    wanted = ids(engine("none", "ngram"))
    assert engine("none", "ngram").params(stop=None, logit_bias=None, eos=5).eos == (5,)
    assert ids(engine("none", "ngram"), temperature=1e-44) == wanted  # dividing logits by this overflows


@pytest.mark.parametrize("graphs", [False, True])
def test_a_tree_of_too_many_nodes_is_refused(graphs: bool) -> None:
    policy = registry.policy("beam", k=3000)
    made = Engine(Target(tiny()), some_drafter("lm"), policy, gpu_options=GpuOptions(graphs))
    with pytest.raises(InputError, match="262144 nodes at most; this pass would make 9003"):
        made.generate(prompt(), max_new_tokens=8)


def test_a_pass_of_too_many_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine("beam", "lm")
    monkeypatch.setattr("windfall.model.target.MAX_VERIFY_ROWS", 8)
    with pytest.raises(InputError, match="8 rows at most, not "):
        made.generate(prompt(), max_new_tokens=8)


def test_generate_batch_refuses_a_single_text() -> None:
    with pytest.raises(InputError, match="a list of prompts"):
        engine("none", "ngram").generate_batch("abc")


def test_messages_without_text_are_refused() -> None:
    made = Engine(Target(tiny(), character_tokenizer()), NGramDrafter(), registry.policy("none"))
    made.target.tokenizer.chat_template = "{% for m in messages %}{{ m.content + '!' }}{% endfor %}"
    with pytest.raises(InputError, match=r"a chat message is .*: unsupported operand"):
        made.generate([{"role": "user", "content": 5}])


def test_a_default_device_is_refused() -> None:
    model = tiny()
    with torch.device("meta"), pytest.raises(InputError, match="set_default_device"):
        Target(model)


def test_warming_up_changes_no_state(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    made = engine("none", "ngram")
    made.policy, calibrators = registry.policy("bandit", arms="chain", state=str(file)), dict(made.calibrators)
    assert list(made.warm_up())[-1] == 1.0
    assert not file.exists() and dict(made.calibrators) == calibrators
    made.generate([1, 2, 3], max_new_tokens=4)
    assert file.exists()


def test_load_takes_names_objects_and_models() -> None:
    model = tiny()
    wanted = ids(engine("none", "lm"))
    for drafter_, policy in (("ngram", "beam"), (tiny(seed=1), None), (None, registry.policy("chain", depth=2))):
        assert ids(windfall.load(model, drafter_, policy)) == wanted
    for dtype in (torch.float64, "fp32", "float64"):
        wanted_dtype = torch.float32 if dtype == "fp32" else torch.float64
        assert windfall.load(model, dtype=dtype).target.decoder.dtype == wanted_dtype
    with pytest.raises(InputError, match="no dtype"):
        windfall.load(model, dtype="float7")
    with pytest.raises(InputError, match="no drafter 'ngrams'; there are ngram, self"):
        windfall.load(model, "ngrams")
