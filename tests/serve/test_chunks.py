"""The JSON of the chunks of a stream."""

from __future__ import annotations

import pytest

from windfall.serve.protocol import ChatChunkChoice, Stamp


@pytest.mark.parametrize("with_usage", [False, True])
@pytest.mark.parametrize("model", ["tiny", 'a "model" — with "choices":[null]'])
def test_a_chunk_is_the_same_as_one_that_is_built_from_all_its_fields(with_usage: bool, model: str) -> None:
    stamp = Stamp.new("chatcmpl", model)
    choice = ChatChunkChoice(index=2, delta={"content": 'né\n"\u2028'}, finish_reason="stop")
    start, end = stamp.chunk_parts("chat.completion.chunk", with_usage)
    whole = stamp.answer("chat.completion.chunk", [choice])
    exclude = None if with_usage else {"usage"}
    assert start + choice.model_dump_json() + end == whole.model_dump_json(exclude=exclude)
