"""The JSON of the chunks of a stream, and their events."""

from __future__ import annotations

import pytest

from windfall.serve.protocol import ChatChunkChoice, Stamp
from windfall.serve.streaming import MARK, Events
from windfall.serve.texts import End, JoinedSteps


@pytest.mark.parametrize("with_usage", [False, True])
@pytest.mark.parametrize("model", ["tiny", 'a "model" — with "choices":[null]'])
def test_a_chunk_is_the_same_as_one_that_is_built_from_all_its_fields(with_usage: bool, model: str) -> None:
    stamp = Stamp.new("chatcmpl", model)
    choice = ChatChunkChoice(index=2, delta={"content": 'né\n"\u2028'}, finish_reason="stop")
    start, end = stamp.chunk_parts("chat.completion.chunk", with_usage)
    whole = stamp.answer("chat.completion.chunk", [choice])
    exclude = None if with_usage else {"usage"}
    assert start + choice.model_dump_json() + end == whole.model_dump_json(exclude=exclude)


@pytest.mark.parametrize("with_usage", [False, True])
@pytest.mark.parametrize("model", ["tiny", MARK, f'"{MARK}"'])
def test_an_event_of_text_is_the_same_as_that_of_a_choice(with_usage: bool, model: str) -> None:
    def choice(index: int, text: str) -> ChatChunkChoice:
        return ChatChunkChoice(index=index, delta={"content": text})

    events = Events(Stamp.new("chatcmpl", model), "chat.completion.chunk", with_usage, choice)
    texts = ["a", " ", MARK, f'"{MARK}"', "".join(map(chr, range(256))), "\u2028\ufffd日本 😀", "\\u0041", "]}"]
    for number in (1, 0, 1):
        for text in texts:
            assert events.of_text(number, piece(text)) == events.of(choice(number, text))
    assert events.of_text(0, piece("")) == "" and events.of_text(0, End("stop", empty=False)) is None


def test_choices_with_more_than_text_have_no_event_of_text() -> None:
    assert Events(Stamp.new("cmpl", "tiny"), "text_completion", False).of_text(0, piece("a")) is None


def piece(text: str) -> JoinedSteps:
    return JoinedSteps([], text, None, None)
