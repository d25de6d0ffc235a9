from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from windfall.detokenizer import Detokenizer


class ByteTokenizer:
    """One token a byte, so that characters arrive in pieces."""

    def __init__(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.inner = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
        self.inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.inner.decoder = decoders.ByteLevel()

    def decode(self, ids: list[int], **_: bool) -> str:
        return self.inner.decode(ids)


TOKENIZER = ByteTokenizer()


def feed(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    stream, pieces, stopped = Detokenizer(TOKENIZER, stop), [], False
    for token in TOKENIZER.inner.encode(text).ids:
        stopped = stream.push(token)
        pieces.append(stream.take(final=stopped))
        if stopped:
            return pieces, True
    pieces.append(stream.take(final=True))
    return pieces, stopped


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
@settings(max_examples=60, deadline=None)
def test_pieces_make_the_text_and_no_broken_characters(text: str) -> None:
    pieces, _ = feed(text)
    assert "".join(pieces) == TOKENIZER.decode(TOKENIZER.inner.encode(text).ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("text", "stop", "wanted"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", ("xyz", "o t"), "one tw"),
        ("aaab", ("aab",), "a"),
        ("grün ünd", ("ü",), "gr"),
        ("never", ("zzz",), "never"),
        ("half a sto", ("stop",), "half a sto"),
    ],
)
def test_text_ends_before_the_first_stop_string(text: str, stop: tuple[str, ...], wanted: str) -> None:
    pieces, stopped = feed(text, stop)
    assert "".join(pieces) == wanted
    assert stopped == (wanted != text)


def test_nothing_is_shown_that_a_stop_string_takes_back() -> None:
    stream = Detokenizer(TOKENIZER, ("STOP",))
    shown = ""
    for token in TOKENIZER.inner.encode("a STO STOP").ids:
        ended = stream.push(token)
        shown += stream.take(final=ended)
        assert "a STO ".startswith(shown)
    assert shown == "a STO "
