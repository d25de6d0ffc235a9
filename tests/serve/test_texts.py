"""Chat and completions through the official client: texts, streams, choices and usage."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import openai
import pytest

from helpers.gpu import engine as on_device
from helpers.serving import MODEL, engine
from windfall.serve.texts import JoinedSteps

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a river."}]
HOW: dict[str, Any] = {"model": MODEL, "max_tokens": 12}


def expected(prompt: Any = MESSAGES, **sampling: Any) -> str:
    """The text that the engine generates on its own."""
    how = {"max_new_tokens": 12, "temperature": 1.0, **sampling}
    return engine().generate(prompt, raw=prompt is not MESSAGES, **how).text


def test_models(api: openai.OpenAI) -> None:
    (listed,) = api.models.list().data
    assert (listed.id, listed.owned_by) == (MODEL, "windfall")
    assert api.models.retrieve(MODEL).id == MODEL


# ---- chat


def test_a_chat_answer_is_the_engines_text(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(messages=MESSAGES, seed=7, **HOW)
    (choice,) = answer.choices
    assert choice.message.content == expected(seed=7)
    assert (choice.message.role, choice.finish_reason, choice.index) == ("assistant", "length", 0)
    assert answer.object == "chat.completion" and answer.model == MODEL and answer.id.startswith("chatcmpl-")


def test_parts_of_a_message_are_lines(api: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Name"}, {"type": "text", "text": "a river."}]
    messages: list[Any] = [{"role": "user", "content": parts, "name": None}]
    answer = api.chat.completions.create(messages=messages, temperature=0, **HOW)
    whole = [{"role": "user", "content": "Name\na river."}]
    assert answer.choices[0].message.content == engine().generate(whole, max_new_tokens=12).text


def test_without_a_limit_a_chat_goes_on_to_the_end_of_the_context(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.total_tokens == engine().target.context


def test_a_chat_stream(api: openai.OpenAI) -> None:
    chunks = list(api.chat.completions.create(messages=MESSAGES, seed=7, stream=True, **HOW))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected(seed=7)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert len({chunk.id for chunk in chunks}) == 1 and {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_of_several_choices(api: openai.OpenAI) -> None:
    texts = ["", ""]
    for chunk in api.chat.completions.create(messages=MESSAGES, seed=3, n=2, stream=True, **HOW):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [expected(seed=3), expected(seed=4)]


# ---- completions


def test_a_completion_and_its_stream(api: openai.OpenAI) -> None:
    answer = api.completions.create(prompt="Name a", seed=7, **HOW)
    chunks = api.completions.create(prompt="Name a", seed=7, stream=True, **HOW)
    assert answer.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks) == expected("Name a", seed=7)
    assert answer.object == "text_completion" and answer.choices[0].finish_reason == "length"


def test_all_forms_of_a_prompt(api: openai.OpenAI) -> None:
    prompts = ["Name a", "A long river"]
    ids = [engine().encode(prompt, raw=True) for prompt in prompts]
    whole = [expected(prompt, seed=5) for prompt in prompts]
    assert [each.text for each in api.completions.create(prompt=prompts, seed=5, **HOW).choices] == whole
    assert [each.text for each in api.completions.create(prompt=ids, seed=5, **HOW).choices] == whole
    assert [each.text for each in api.completions.create(prompt=ids[0], seed=5, **HOW).choices] == whole[:1]


def test_echo_puts_the_prompt_first(api: openai.OpenAI) -> None:
    ids = engine().encode("Name a", raw=True)
    for prompt in ("Name a", ids):
        answer = api.completions.create(prompt=prompt, echo=True, seed=7, **HOW)
        chunks = api.completions.create(prompt=prompt, echo=True, seed=7, stream=True, **HOW)
        streamed = "".join(chunk.choices[0].text for chunk in chunks)
        assert answer.choices[0].text == streamed == "Name a" + expected("Name a", seed=7)


def test_choices_have_seeds_one_after_another(api: openai.OpenAI) -> None:
    answer = api.completions.create(prompt=["Name a", "A long"], seed=5, n=2, **HOW)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [
        expected(prompt, seed=seed) for prompt in ("Name a", "A long") for seed in (5, 6)
    ]


def test_the_default_limit_of_completions(api: openai.OpenAI) -> None:
    answer = api.completions.create(model=MODEL, prompt="Name a", extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.completion_tokens == 16


# ---- sampling


def test_a_stop_string_ends_the_text_before_it(api: openai.OpenAI) -> None:
    whole = expected("Name a", seed=7)
    stop = whole[5:7]
    for form in (stop, [stop, "never so"]):
        answer = api.completions.create(prompt="Name a", seed=7, stop=form, **HOW)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (whole[: whole.index(stop)], "stop")
    chunks = list(api.completions.create(prompt="Name a", seed=7, stop=stop, stream=True, **HOW))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_stop_token_ids_end_the_text(api: openai.OpenAI) -> None:
    ids = engine().generate("Name a", raw=True, max_new_tokens=12, seed=7, temperature=1.0).token_ids
    answer = api.completions.create(prompt="Name a", seed=7, extra_body={"stop_token_ids": [ids[4]]}, **HOW)
    assert answer.choices[0].finish_reason == "stop" and answer.usage is not None
    assert answer.usage.completion_tokens == ids.index(ids[4]) + 1


@pytest.mark.parametrize(
    ("body", "sampling"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.7, "top_p": 0.8}),
        ({"top_k": 3, "min_p": 0.1}, {"top_k": 3, "min_p": 0.1}),
        ({"top_k": -1}, {}),
        (
            {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
            {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        ),
        ({"logit_bias": {"20": 100}}, {"logit_bias": {20: 100}}),
        ({"ignore_eos": True}, {"eos": ()}),
        ({"logprobs": None, "suffix": None, "best_of": 1, "user": "someone", "metadata": {"a": "b"}}, {}),
    ],
)
def test_sampling_fields(api: openai.OpenAI, body: dict[str, Any], sampling: dict[str, Any]) -> None:
    answer = api.completions.create(prompt="Name a", seed=11, extra_body=body, **HOW)
    assert answer.choices[0].text == expected("Name a", seed=11, **sampling)


def test_many_requests_at_once_each_have_their_own_text(api: openai.OpenAI) -> None:
    def text(seed: int) -> str | None:
        return api.chat.completions.create(messages=MESSAGES, seed=seed, **HOW).choices[0].message.content

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(text, range(6))) == [expected(seed=seed) for seed in range(6)]


# ---- usage


def test_usage_counts_tokens_and_drafts(api: openai.OpenAI) -> None:
    answer = api.completions.create(
        prompt=["Name a", "A long river"], temperature=0, n=2, extra_body={"ignore_eos": True}, **HOW
    )
    alone = [engine().generate(each, raw=True, max_new_tokens=12, eos=()) for each in ("Name a", "A long river")]
    assert answer.usage is not None
    used = answer.usage.model_dump()
    assert used["prompt_tokens"] == sum(each.prompt_tokens for each in alone)
    assert used["completion_tokens"] == 48
    assert used["total_tokens"] == used["prompt_tokens"] + 48
    speculation = used["speculation"]
    assert speculation["target_passes"] == 2 * sum(each.stats.cycles for each in alone)
    assert speculation["verified_tokens"] == 2 * sum(each.stats.rows - each.stats.cycles for each in alone)
    assert 0 <= speculation["accepted_tokens"] <= speculation["verified_tokens"] <= speculation["drafted_tokens"]
    assert speculation["tokens_per_pass"] == pytest.approx(48 / speculation["target_passes"], abs=1e-4)


def test_include_usage_adds_a_last_chunk(api: openai.OpenAI) -> None:
    whole = api.chat.completions.create(messages=MESSAGES, seed=7, **HOW)
    options: Any = {"include_usage": True}
    *chunks, last = api.chat.completions.create(messages=MESSAGES, seed=7, stream=True, stream_options=options, **HOW)
    assert last.choices == [] and last.usage is not None and whole.usage is not None
    assert last.usage.model_dump() == whole.usage.model_dump()
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks)


# ---- streams under load


def test_joined_steps_have_everything_of_their_steps() -> None:
    done = engine().generate(MESSAGES, max_new_tokens=12, temperature=1.0, seed=7, logprobs=0, prompt_logprobs=0)
    joined = JoinedSteps.of(done.steps)
    assert (joined.text, [*joined.tokens]) == (done.text, done.token_ids)
    assert [*(joined.logprobs or ())] == done.logprobs and [*(joined.prompt_logprobs or ())] == done.prompt_logprobs
    plain = JoinedSteps.of(engine().generate(MESSAGES, max_new_tokens=4).steps)
    assert plain.logprobs is None and plain.prompt_logprobs is None


def test_joined_steps_of_a_batch_are_decoded_at_once() -> None:
    """Steps that decode their text when it is read: joined in any way, they have the text of the whole."""
    made = on_device("llama", "itself", "none", graphs=True)
    handle = made.submit(list(range(5, 14)), max_new_tokens=24, eos=())
    done = handle.result(60)
    steps, cuts = list(done.steps), (0, 1, 3, 4, len(done.steps))
    assert all(hasattr(step, "late_text") for step in steps) and len(steps) > 4
    again = made.submit(list(range(5, 14)), max_new_tokens=24, eos=()).result(60)
    pieces = [JoinedSteps.of(again.steps[start:end]).text for start, end in pairwise(cuts)]
    assert "".join(pieces) == done.text and pieces[2] == steps[3].text
    assert "".join(step.text for step in again.steps) == done.text
    made.close()
