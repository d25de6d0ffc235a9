"""Texts that follow a schema, a pattern or a grammar: the same with and without drafts, and valid."""

from __future__ import annotations

import json
import math
import random
import re
from functools import cache
from typing import Any

import jsonschema
import pytest

from helpers.grammars import (
    CONSTRAINTS,
    END,
    SCHEMA,
    TOKENS,
    MaskedLogits,
    plain_greedy,
    random_schema,
    target,
    text_of,
)
from helpers.grammars import engine as new_engine
from helpers.random_parallel import some_drafter
from helpers.schema_cases import CASES, taken
from helpers.tiny import prompt
from windfall import registry
from windfall.core.constraint import BACKENDS
from windfall.core.errors import InputError
from windfall.core.types import GpuOptions, SamplingParams
from windfall.engine.engine import Engine
from windfall.engine.host_runner import HostRunner
from windfall.engine.request import Request
from windfall.engine.scheduler import Scheduler
from windfall.grammar import guide as guiding
from windfall.grammar.guide import Guide

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9},
    "filtered": {"temperature": 1.1, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": {5: 2.0}},
}
DRAFTERS = [*registry.drafters(), "small"]
POLICIES = [name for name in registry.policies() if name != "none"]
TOKENS_AT_MOST = 24


@cache
def drafting(drafter: str) -> Engine:
    return Engine(target(), some_drafter(drafter), registry.policy("none"))


def engine(policy: str = "beam", drafter: str = "self") -> Engine:
    made = drafting(drafter)
    made.policy = registry.policy(policy)
    return made


def written(made: Engine, kind: str, sampling: str, **more: Any) -> tuple[list[int], str]:
    how = {"max_new_tokens": TOKENS_AT_MOST, "seed": 3, **CONSTRAINTS[kind], **SAMPLING[sampling], **more}
    generation = made.generate(prompt(), **how)
    return generation.token_ids, generation.finish_reason


@cache
def plain(kind: str, sampling: str) -> tuple[list[int], str]:
    return written(engine("none"), kind, sampling)


def crossed() -> list[tuple[str, str, str, str]]:
    """Every policy and every drafter, with the kinds of constraints and of sampling in turn."""
    kinds, samplings = list(CONSTRAINTS), list(SAMPLING)
    pairs = [(policy, DRAFTERS[i % len(DRAFTERS)]) for i, policy in enumerate(POLICIES)]
    pairs += [(policy, drafter) for policy in ("beam", "auto") for drafter in DRAFTERS]
    return [(policy, drafter, kinds[i % 3], samplings[i % 4]) for i, (policy, drafter) in enumerate(pairs)]


@pytest.mark.parametrize(("policy", "drafter", "kind", "sampling"), crossed())
def test_same_text_with_and_without_drafts(policy: str, drafter: str, kind: str, sampling: str) -> None:
    assert written(engine(policy, drafter), kind, sampling) == plain(kind, sampling)


@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize("name", BACKENDS)
def test_greedy_text_is_that_of_transformers_with_masked_logits(kind: str, name: str) -> None:
    wanted = plain_greedy(prompt(), 30, name, **CONSTRAINTS[kind])
    for policy in ("none", "beam"):
        tokens, finish = written(engine(policy, "small"), kind, "greedy", max_new_tokens=30, grammar_backend=name)
        assert wanted == ([*tokens, END] if wanted[-1] == END and tokens[-1] != END else tokens)
        assert finish == ("stop" if wanted[-1] == END else "length")


@pytest.mark.parametrize("sampling", SAMPLING)
def test_sampled_text_is_that_of_masks_before_all_filters(sampling: str) -> None:
    """Here a processor of the user masks every token's logits: it comes before temperature, top-k and top-p."""
    for kind, given in CONSTRAINTS.items():
        constraint = engine().params(**given).constraint
        assert constraint is not None
        masking = {"processors": (MaskedLogits(constraint, len(prompt()), "xgrammar"),), **SAMPLING[sampling]}
        wanted = engine("none").generate(prompt(), max_new_tokens=TOKENS_AT_MOST, seed=3, **masking).token_ids
        tokens, _ = plain(kind, sampling)
        assert wanted == ([*tokens, END] if len(wanted) > len(tokens) else tokens)


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}])
def test_filters_count_legal_tokens_only(filters: dict[str, Any]) -> None:
    """A legal token that wins after the filters of all tokens may lose to one that only the mask lets in."""
    constraint = engine().params(regex="[a-m0-9]{24}").constraint
    assert constraint is not None
    how = {"temperature": 4.0, "max_new_tokens": 20, **filters}
    masking = (MaskedLogits(constraint, len(prompt()), "xgrammar"),)
    for seed in range(3):
        wanted = engine("none").generate(prompt(), seed=seed, processors=masking, **how)
        for policy in ("none", "beam"):
            given = engine(policy).generate(prompt(), seed=seed, constraint=constraint, **how)
            assert given.token_ids == wanted.token_ids


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_schemas_give_valid_json(first: int) -> None:
    for place in range(first, first + 20):
        schema, name = random_schema(random.Random(place)), BACKENDS[place % 3 == 2]
        how = {"json_schema": schema, "grammar_backend": name, "temperature": place % 2, "seed": place}
        plain, drafted = (
            engine(policy, "ngram").generate(prompt(seed=place), **how, max_new_tokens=80)
            for policy in ("none", "beam")
        )
        assert (plain.token_ids, plain.finish_reason) == (drafted.token_ids, "stop"), place
        value = json.loads(plain.text)
        jsonschema.validate(value, schema)
        assert not jsonschema.Draft202012Validator(schema).is_valid({"wrong": value}), "the check can fail"


@pytest.mark.parametrize("keyword", CASES)
def test_texts_are_valid_for_each_keyword(keyword: str) -> None:
    """A bias ends strings, lists and numbers. Schemas that no library takes are refused."""
    bias = {TOKENS.index(text): 8.0 for text in ('"', "}", "]", '"}')} | {END: 8.0, TOKENS.index(","): 4.0}
    for case in CASES[keyword]:
        if "\\" in json.dumps(case.schema):  # which no token spells
            continue
        how = {"json_schema": case.schema, "temperature": 1.0, "seed": 4, "logit_bias": bias, "max_new_tokens": 60}
        if all(isinstance(taken(name, case.schema), str) for name in BACKENDS):
            with pytest.raises(InputError, match=r"^the JSON schema cannot be used: xgrammar.*; llguidance"):
                engine().submit(prompt(), **how)
            continue
        plain, drafted = (engine(policy, "ngram").generate(prompt(), **how) for policy in ("none", "beam"))
        assert (plain.token_ids, plain.finish_reason) == (drafted.token_ids, "stop"), case
        jsonschema.validate(json.loads(plain.text), case.schema)


def test_text_is_valid_for_patterns_grammars_and_objects() -> None:
    made = engine("beam")
    tokens, _ = written(made, "regex", "sampled")
    assert re.fullmatch(r"(ab|c){2,5}-[0-9]+(, (ab|c))*", text_of(tokens))
    anything = made.generate(prompt(), json_object=True, temperature=1.0, seed=5, max_new_tokens=30)
    assert anything.finish_reason == "length" or isinstance(json.loads(anything.text), dict)


# ---- the end of a text


@pytest.mark.parametrize("policy", ["none", "beam"])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_finished_grammar_ends_the_text(policy: str, name: str) -> None:
    """Without an end-of-text token too, and at the last token that is allowed."""
    for more in ({}, {"eos": ()}, {"max_new_tokens": 3}):
        done = engine(policy).generate(
            prompt(), **{"regex": "cad", "grammar_backend": name, "max_new_tokens": 20, **more}
        )
        assert (done.text, done.finish_reason) == ("cad", "stop"), more


def test_the_end_may_be_drawn_only_where_the_grammar_allows_it() -> None:
    """The model always wants to end: it may after two, four, … letters."""
    eager = {"logit_bias": {END: 1e6}, "regex": "(a[bc])+", "max_new_tokens": 20}
    for policy in ("none", "beam"):
        done = engine(policy).generate(prompt(), **eager)
        assert len(done.text) == 2 and done.token_ids[-1] == END and done.finish_reason == "stop"
        without = engine(policy).generate(prompt(), **eager, eos=())
        assert END not in without.token_ids and without.finish_reason == "length"


def test_a_stop_string_ends_the_text_first() -> None:
    whole = engine("none").generate(prompt(), json_schema=SCHEMA, max_new_tokens=80)
    for policy in ("none", "beam"):
        done = engine(policy).generate(prompt(), json_schema=SCHEMA, max_new_tokens=80, stop="age")
        assert done.text == whole.text[: whole.text.index("age")] and done.finish_reason == "stop"


# ---- drafts


def test_forced_text_saves_cycles() -> None:
    """All of the text but one letter is forced. The plain policy decodes it token by token."""
    forced = {"json_schema": {"enum": ["abcdefgha", "abcdefghb"]}, "max_new_tokens": 40}
    slow, fast = (engine(policy, "ngram").generate(prompt(), **forced) for policy in ("none", "chain"))
    assert slow.token_ids == fast.token_ids
    assert slow.stats.cycles == len(slow.token_ids) > 9
    assert fast.stats.cycles <= 3
    assert sum(step.accepted for step in fast.steps) >= 8


@pytest.mark.parametrize("name", BACKENDS)
def test_forced_text_meets_drafted_nodes(name: str) -> None:
    """Several sequences of tokens spell the text, and trees have forced nodes beside the drafter's."""
    regex, crossed, rejected = "[ab]{3}(ab|cab)e{4}[cd]{3}true", 0, 0
    for seed in range(6):
        how = {"regex": regex, "grammar_backend": name, "temperature": 1.2, "seed": seed, "max_new_tokens": 30}
        plain, drafted = (engine(policy, "small").generate(prompt(), **how) for policy in ("none", "beam"))
        assert plain.token_ids == drafted.token_ids and re.fullmatch(regex, drafted.text)
        for step in drafted.steps:
            sure = step.tree.logq[1:] == 0
            crossed += bool(sure.any() and not sure.all())
            rejected += step.accepted < int(step.tree.depth.max())
    assert crossed > 3 and rejected > 3


@pytest.mark.parametrize("name", BACKENDS)
def test_drafting_goes_on_after_a_wrong_guess(name: str) -> None:
    """Other engines are stuck, or draft nothing, after the first rejected token."""
    done = engine("beam", "lm").generate(prompt(), **CONSTRAINTS["schema"], max_new_tokens=60, grammar_backend=name)
    accepted = [step.accepted for step in done.steps]
    wrong = next(i for i, step in enumerate(done.steps) if step.accepted < int(step.tree.depth.max()))
    assert sum(accepted[wrong + 1 :]) > 0 and done.finish_reason == "stop"


def test_verified_nodes_are_legal_and_masks_are_computed_at_visited_nodes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    masks, mask = [0], Guide.mask

    def counted(self: Guide) -> Any:
        masks[0] += 1
        return mask(self)

    monkeypatch.setattr(Guide, "mask", counted)
    monkeypatch.setattr(guiding, "MAX_FORCED_STARTS", 0)  # looking for forced text takes masks, too
    how = {"temperature": 1.0, "top_k": 50, "seed": 1, "max_new_tokens": 30}
    done = engine("beam").generate(prompt(), regex="[ab]{3}[cd]{3}[ef]{20}", **how)
    visited = sum(len(step.path) for step in done.steps)
    assert 0 < masks[0] <= visited + 1  # and one that finds that the text has ended
    assert sum(step.rows for step in done.steps) > visited
    verified = {TOKENS[token] for step in done.steps for token in step.tree.tokens[1:].tolist()}
    assert verified <= {*"abcdef", "ab", "<|end|>"}
    assert sum(len(step.drafted) for step in done.steps) > 2 * sum(step.rows for step in done.steps)
    masks[0] = 0
    done = engine("beam").generate(prompt(), regex="[^\\n]*", seed=1, temperature=1.0, max_new_tokens=20)
    assert masks[0] <= len(done.token_ids) / 2  # where the winner is legal anyway there is no mask


def test_a_constraint_does_not_change_what_is_learned_for_other_texts() -> None:
    made = new_engine("auto", "ngram")
    made.generate(prompt(), **CONSTRAINTS["schema"], max_new_tokens=30)
    assert set(made.calibrators) == {"greedy, constrained"}


# ---- many texts


def test_texts_of_a_batch_follow_their_own_constraints() -> None:
    made = engine("beam", "small")
    samplings = list(zip(("greedy", "filtered"), BACKENDS, strict=True))
    how: list[dict[str, Any]] = [
        {**CONSTRAINTS[kind], **SAMPLING[sampling], "grammar_backend": name}
        for kind in CONSTRAINTS
        for sampling, name in samplings
    ]
    how.append({})
    handles = [made.submit(prompt(seed=i), max_new_tokens=16, seed=i, **each) for i, each in enumerate(how)]
    together = [handle.result(60).token_ids for handle in handles]
    made.close()
    for i, each in enumerate(how):
        alone = engine("none").generate(prompt(seed=i), max_new_tokens=16, seed=i, **each)
        assert together[i] == alone.token_ids, i


def test_a_preempted_text_goes_on_within_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windfall.engine.scheduler.ADMISSION_TOKENS", 2)
    made, how = engine("beam", "ngram"), {**CONSTRAINTS["schema"], "temperature": 0.8, "seed": 9, "max_new_tokens": 40}
    runner = HostRunner(made.target, made.drafter, made.target.device, made.online_costs)
    runner.memory = 3 * (30 + 64) * runner._row_bytes
    requests = [Request(i, made._request(prompt(seed=i), made.params(**how)).sequence, None) for i in range(3)]
    scheduler = Scheduler(runner, 8)
    for each in requests:
        scheduler.submit(each)
    waited = 0
    while not scheduler.idle:
        scheduler.step()
        waited += scheduler.waiting
    assert waited and sum(step.prefill_seconds > 0 for step in requests[2].steps) > 1
    for i, each in enumerate(requests):
        assert each.generation().token_ids == engine("none").generate(prompt(seed=i), **how).token_ids


def test_a_text_without_possible_tokens_fails_alone() -> None:
    made = engine("beam", "ngram")
    impossible = {"regex": "[ab]c", "logit_bias": {TOKENS.index(letter): float("-inf") for letter in ("a", "b")}}
    impossible["logit_bias"][TOKENS.index("ab")] = float("-inf")
    bad, good = made.submit(prompt(), **impossible), made.submit(prompt(), regex="cad")
    with pytest.raises(InputError, match="no token is possible here"):
        bad.result(30)
    assert good.result(30).text == "cad"
    made.close()


# ---- other ways


def test_processors_are_called_once_for_each_token() -> None:
    calls = []

    def watch(ids: Any, scores: Any) -> Any:
        calls.append(ids.shape[1])
        return scores

    tokens, _ = written(engine("beam"), "schema", "greedy", processors=(watch,))
    assert tokens == plain("schema", "greedy")[0]
    assert calls == list(range(9, 9 + len(tokens)))


@pytest.mark.parametrize("policy", ["none", "beam"])
def test_processed_log_probabilities_are_those_of_legal_tokens(policy: str) -> None:
    how = {"regex": "[ab][cd]", "temperature": 1.0, "seed": 2, "logprobs": 5, "eos": ()}
    done = engine(policy).generate(prompt(), **how, logprobs_mode="processed")
    raw = engine(policy).generate(prompt(), **how)
    assert done.logprobs is not None and raw.logprobs is not None and raw.token_ids == done.token_ids
    for place, (processed, unchanged) in enumerate(zip(done.logprobs, raw.logprobs, strict=True)):
        assert {TOKENS[token] for token, _ in processed.top} <= ({"a", "b"}, {"c", "d"})[place]
        assert sum(math.exp(value) for _, value in processed.top) == pytest.approx(1, abs=1e-5)
        assert unchanged.logprob < processed.logprob


@pytest.mark.parametrize("sampling", ["greedy", "filtered"])
def test_the_runner_of_a_gpu_leaves_them_to_the_host_loop(sampling: str) -> None:
    options = GpuOptions(graphs=True)
    made = Engine(target(), some_drafter("lm"), registry.policy("beam"), gpu_options=options)
    assert written(made, "schema", sampling) == plain("schema", sampling)
    assert made.fallback == "its sampling looks at the text so far"


def test_bad_constraints_are_refused_before_anything_runs() -> None:
    made = engine()
    for wrong, message in (
        ({"regex": "["}, "the regular expression cannot be used"),
        ({"json_schema": {"type": "no"}}, "the JSON schema cannot be used"),
        ({"constraint": "a"}, "constraint takes a windfall Constraint"),
    ):
        with pytest.raises(InputError, match=message):
            made.submit(prompt(), **wrong)
    with pytest.raises(InputError, match="needs a tokenizer"):
        Engine(type(target())(target().model), some_drafter("ngram"), registry.policy("none")).params(regex="a")
    assert SamplingParams().constraint is None
