"""Log-probabilities through the official client: chat and completions, whole and as a stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch

from helpers.serving import MODEL, engine, http
from helpers.tokenizers import byte_level
from windfall.core.logprobs import TokenLogprob
from windfall.core.token_text import TokenTexts
from windfall.core.tree import DraftTree
from windfall.core.types import Split, Step
from windfall.engine.engine import Generation
from windfall.serve.logprobs import Placed, Reports, TextLogprobs
from windfall.serve.texts import End

CHAT: list[Any] = [{"role": "user", "content": "Name a river."}]
HOW: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "seed": 7}
CLOSE = 1e-4


def text_of(token: int) -> str:
    return TokenTexts(engine().target.tokenizer)[token].text


def expected(prompt: Any, **sampling: Any) -> Generation:
    how = {"max_new_tokens": 12, "temperature": 1.0, "seed": 7, "logprobs": 3, **sampling}
    return engine().generate(prompt, raw=prompt is not CHAT, **how)


@torch.no_grad()
def model_logs(text: list[int]) -> torch.Tensor:
    """transformers' own log-probabilities after each token."""
    return engine().target.model(input_ids=torch.tensor([text])).logits[0].log_softmax(-1)


def check_chat(content: Any, wanted: Generation, top: int = 3) -> None:
    assert content is not None and wanted.logprobs is not None
    for found, own in zip(content, wanted.logprobs, strict=True):
        assert (found.token, bytes(found.bytes)) == (text_of(own.token), text_of(own.token).encode())
        assert found.logprob == pytest.approx(own.logprob, abs=CLOSE)
        assert [each.token for each in found.top_logprobs] == [text_of(token) for token, _ in own.top[:top]]
        assert [each.logprob for each in found.top_logprobs] == pytest.approx(
            [value for _, value in own.top[:top]], abs=CLOSE
        )


# ---- chat


@pytest.mark.parametrize("top", [0, 3])
def test_chat(api: openai.OpenAI, top: int) -> None:
    wanted = expected(CHAT)
    how: dict[str, Any] = {"messages": CHAT, "logprobs": True, "top_logprobs": top, **HOW}
    (choice,) = api.chat.completions.create(**how).choices
    assert choice.logprobs is not None and choice.logprobs.refusal is None
    check_chat(choice.logprobs.content, wanted, top)
    prompt = engine().encode(CHAT)
    logs = model_logs(prompt + wanted.token_ids)[len(prompt) - 1 : -1]
    theirs = [row[token].item() for row, token in zip(logs, wanted.token_ids, strict=True)]
    assert [each.logprob for each in choice.logprobs.content or ()] == pytest.approx(theirs, abs=CLOSE)


def test_a_chat_stream_reports_tokens_with_their_text(api: openai.OpenAI) -> None:
    how: dict[str, Any] = {"messages": CHAT, "logprobs": True, "top_logprobs": 3, "stream": True, **HOW}
    how["extra_body"] = {"ignore_eos": True}
    content, choices = [], [chunk.choices[0] for chunk in api.chat.completions.create(**how)]
    for choice in choices:
        own = choice.logprobs.content or [] if choice.logprobs else []
        assert "".join(each.token for each in own if not each.token.startswith("<")) == (choice.delta.content or "")
        content += own
    check_chat(content, expected(CHAT, eos=()))
    assert choices[0].logprobs is None and len(choices) > 5


def test_several_choices_each_have_their_own(api: openai.OpenAI) -> None:
    how: dict[str, Any] = {"messages": CHAT, "logprobs": True, "top_logprobs": 2, "n": 2, **HOW}
    for choice in api.chat.completions.create(**how).choices:
        check_chat(choice.logprobs and choice.logprobs.content, expected(CHAT, seed=7 + choice.index), 2)
    streamed: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in api.chat.completions.create(stream=True, **how):
        (choice,) = chunk.choices
        streamed[choice.index] += (choice.logprobs.content or []) if choice.logprobs else []
    for index, content in streamed.items():
        check_chat(content, expected(CHAT, seed=7 + index), 2)


def test_without_logprobs_there_are_none(api: openai.OpenAI) -> None:
    assert api.chat.completions.create(messages=CHAT, **HOW).choices[0].logprobs is None
    assert api.chat.completions.create(messages=CHAT, logprobs=False, **HOW).choices[0].logprobs is None
    assert api.completions.create(prompt="Name a", **HOW).choices[0].logprobs is None


def test_processed_ones(api: openai.OpenAI) -> None:
    own: dict[str, Any] = {"temperature": 0.5, "top_k": 4}
    how: dict[str, Any] = {"messages": CHAT, "logprobs": True, "top_logprobs": 20, **HOW}
    answer = api.chat.completions.create(extra_body={**own, "logprobs_mode": "processed"}, **how)
    logprobs = answer.choices[0].logprobs
    check_chat(logprobs and logprobs.content, expected(CHAT, logprobs=20, logprobs_mode="processed", **own), 20)
    assert all(
        len(each.top_logprobs) == 4 for each in (logprobs and logprobs.content) or ()
    )  # excluded ones are not in


# ---- completions


def check_completion(found: Any, wanted: Generation, top: int, text: str) -> None:
    assert wanted.logprobs is not None
    assert found.tokens == [text_of(each.token) for each in wanted.logprobs]
    assert found.token_logprobs == pytest.approx([each.logprob for each in wanted.logprobs], abs=CLOSE)
    for own, best in zip(wanted.logprobs, found.top_logprobs, strict=True):
        names = {text_of(token) for token, _ in own.top[:top]} | {text_of(own.token)}
        assert {*best} == names and best[text_of(own.token)] == pytest.approx(own.logprob, abs=CLOSE)
    check_offsets(found, text)


def check_offsets(found: Any, text: str) -> None:
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert token.startswith("<") or text[offset : offset + len(token)] == token
    assert found.text_offset == sorted(found.text_offset)


@pytest.mark.parametrize("top", [0, 3])
def test_completions(api: openai.OpenAI, top: int) -> None:
    (choice,) = api.completions.create(prompt="Name a", logprobs=top, **HOW).choices
    check_completion(choice.logprobs, expected("Name a"), top, choice.text)


def joined(parts: list[Any]) -> Any:
    """The lists of several chunks one after another."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    lists = {name: [each for part in parts if part for each in getattr(part, name)] for name in names}
    return SimpleNamespace(**lists)


def test_a_completion_stream(api: openai.OpenAI) -> None:
    chunks = list(api.completions.create(prompt="Name a", logprobs=2, stream=True, **HOW))
    text = "".join(chunk.choices[0].text for chunk in chunks)
    check_completion(joined([chunk.choices[0].logprobs for chunk in chunks]), expected("Name a"), 2, text)


@pytest.mark.parametrize("form", [str, list])
def test_echo_reports_the_prompt_first(api: openai.OpenAI, form: type) -> None:
    ids = engine().encode("Name a", raw=True)
    prompt: Any = "Name a" if form is str else ids
    how: dict[str, Any] = {"prompt": prompt, "echo": True, "logprobs": 2, **HOW}
    whole = api.completions.create(**how).choices[0]
    chunks = [chunk.choices[0] for chunk in api.completions.create(stream=True, **how)]
    streamed = joined([chunk.logprobs for chunk in chunks])
    assert "".join(chunk.text for chunk in chunks) == whole.text == "Name a" + expected("Name a").text
    for found in (whole.logprobs, streamed):
        assert found is not None
        check_offsets(found, whole.text)
        assert found.tokens[: len(ids)] == [*"Name a"]
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        everything = ids + expected("Name a").token_ids
        logs = model_logs(everything)[:-1]
        theirs = [row[token].item() for row, token in zip(logs, everything[1:], strict=True)]
        assert found.token_logprobs[1:] == pytest.approx(theirs, abs=CLOSE)
        for row, best in zip(logs, found.top_logprobs[1:], strict=True):
            assert max(best.values()) == pytest.approx(row.max().item(), abs=CLOSE) and 2 <= len(best) <= 3


# ---- ends of texts


def test_tokens_after_a_stop_string_are_not_reported(api: openai.OpenAI) -> None:
    whole = expected("Name a")
    stop = whole.text[5:8]
    cut = whole.text.index(stop)
    how: dict[str, Any] = {"prompt": "Name a", "logprobs": 1, "stop": stop, **HOW}
    (choice,) = api.completions.create(**how).choices
    assert choice.text == whole.text[:cut] and choice.logprobs is not None
    chunks = [chunk.choices[0] for chunk in api.completions.create(stream=True, **how)]
    for tokens in (choice.logprobs.tokens, joined([chunk.logprobs for chunk in chunks]).tokens):
        assert "".join(tokens or ()) == choice.text


def test_the_token_that_ends_the_text_is_reported(api: openai.OpenAI) -> None:
    bias = {str(engine().target.eos[0]): 100}
    how: dict[str, Any] = {"messages": CHAT, "logprobs": True, "logit_bias": bias, **HOW}
    choice = api.chat.completions.create(**how).choices[0]
    assert choice.message.content == "" and choice.finish_reason == "stop" and choice.logprobs is not None
    assert [each.token for each in choice.logprobs.content or ()] == ["<|end|>"]
    *_, last = (chunk.choices[0] for chunk in api.chat.completions.create(stream=True, **how))
    assert last.logprobs is not None and [each.token for each in last.logprobs.content or ()] == ["<|end|>"]


def step(tokens: list[int], text: str) -> Step:
    tree, own = DraftTree.root(0), tuple(TokenLogprob(token, -0.5) for token in tokens)
    return Step(tuple(tokens), text, tree, torch.zeros(1), tree, torch.zeros(1), 0, Split(), logprobs=own)


@pytest.mark.parametrize(
    ("pieces", "reported"),
    [
        ([([0], "a"), ([2], ""), ([3, 4], "😀é")], [[0], [], [2, 3, 4], []]),  # a character of two tokens
        ([([0, 2], "a"), ([3, 0], "😀a")], [[0], [2, 3, 0], []]),
        ([([0, 2], "a"), ([3, 5], "😀")], [[0], [2, 3], [5]]),  # a special token
        ([([0, 5], "a"), ([0, 1], "a b")], [[0], [5, 0, 1], []]),
        ([([0, 1], ""), ([4], "a")], [[], [0], []]),  # a stop string that begins with the second token
        ([([0, 1], ""), ([4, 0], "a bé")], [[], [0, 1, 4], []]),  # and one that might have begun with the first
        ([([0, 2], "a"), ([3], "")], [[0], [], []]),  # the deadline came before the end of the character
    ],
)
def test_tokens_are_reported_when_their_text_is_certain(
    pieces: list[tuple[list[int], str]], reported: list[list[int]]
) -> None:
    steps, text = [step(*piece) for piece in pieces], TextLogprobs(byte_level(), 0)
    found = [text.of(each) for each in (*steps, End("stop", empty=False))]
    assert [[placed.token for placed in own] for own in found] == reported


def test_bytes_of_a_part_of_a_character() -> None:
    reports = Reports(TokenTexts(byte_level()), [0])
    placed = [Placed(0, 2, TokenLogprob(2, -0.5, ((2, -0.5), (3, -torch.inf))))]
    chat, completion = reports.as_chat(placed).model_dump(), reports.as_completion(placed).model_dump()
    top = [{"token": r"\xf0\x9f", "logprob": -0.5, "bytes": [240, 159]}]
    top.append({"token": r"\x98\x80", "logprob": -9999.0, "bytes": [152, 128]})
    assert chat == {"content": [{**top[0], "top_logprobs": top}], "refusal": None}
    assert completion == {
        "text_offset": [0],
        "tokens": [r"bytes:\xf0\x9f"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{r"bytes:\xf0\x9f": -0.5, r"bytes:\x98\x80": -9999.0}],
    }


# ---- what is refused


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("chat/completions", {"messages": CHAT, "top_logprobs": 2}, "top_logprobs needs logprobs to be true"),
        ("chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 21}, "less than or equal to 20"),
        ("chat/completions", {"messages": CHAT, "logprobs": 3}, "boolean"),
        ("completions", {"prompt": "Hi", "logprobs": 21}, "less than or equal to 20"),
        ("completions", {"prompt": "Hi", "logprobs": True}, "integer"),
        ("completions", {"prompt": "Hi", "logprobs": 1, "logprobs_mode": "cooked"}, "'raw' or 'processed'"),
    ],
)
def test_wrong_values(address: str, path: str, body: dict[str, Any], words: str) -> None:
    answer = http().post(f"{address}/v1/{path}", json=body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
