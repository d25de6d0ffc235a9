from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from windfall.core.detokenizer import Detokenizer, LateText


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


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.lists(st.integers(1, 5), min_size=40, max_size=99),
)
@settings(max_examples=60, deadline=None)
def test_several_tokens_at_once_show_as_much_as_one_by_one(text: str, sizes: list[int]) -> None:
    ids, one, other = TOKENIZER.inner.encode(text).ids, Detokenizer(TOKENIZER), Detokenizer(TOKENIZER)
    shown = taken = ""
    for size in sizes:
        chunk, ids = ids[:size], ids[size:]
        for token in chunk:
            one.push(token)
            other.push(token)
            shown += one.take(final=False)
        taken += other.take()
        assert taken == shown
    assert taken + other.take(final=True) == shown + one.take(final=True)


def test_undecodable_bytes_are_not_decoded_again_with_every_token() -> None:
    class Counting(ByteTokenizer):
        decoded = 0

        def decode(self, ids: list[int], **_: bool) -> str:
            self.decoded += 1
            return super().decode(ids)

    tokenizer = Counting()
    stream, lead = Detokenizer(tokenizer), tokenizer.inner.encode("€").ids[0]
    for _ in range(50):
        for _ in range(4):
            stream.push(lead)
        assert stream.take() == ""
    assert tokenizer.decoded <= 2 * 200 + 10


def late(text: str, size: int, stop: tuple[str, ...], final: bool) -> LateText:
    """A text in steps of this number of tokens."""
    stream = Detokenizer(TOKENIZER, stop)
    made, ids = LateText(stream), TOKENIZER.inner.encode(text).ids
    for start in range(0, len(ids), size):
        for token in ids[start : start + size]:
            stream.push(token)
        made.ends.append(min(start + size, len(ids)))
    made.final = final
    return made


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.integers(1, 5), st.booleans(), st.booleans())
@settings(max_examples=80, deadline=None)
def test_a_whole_text_is_that_of_its_steps(text: str, size: int, final: bool, read_one: bool) -> None:
    one, other = late(text, size, (), final), late(text, size, (), final)
    if read_one and len(other):
        _ = other[0]
    pieces = [one[number] for number in range(len(one))]
    assert other.whole(len(other)) == "".join(pieces)
    assert [other[number] for number in range(len(other))] == pieces  # also after the whole was read


def test_a_whole_text_is_decoded_once() -> None:
    made, calls = late("one two three", 1, (), True), []
    plain = TOKENIZER.decode
    made._detokenizer.tokenizer = type(
        "Counting", (), {"decode": lambda _, ids, **how: calls.append(ids) or plain(ids)}
    )()
    assert made.whole(len(made)) == "one two three" and len(calls) <= 2


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.integers(1, 5), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_tokens_may_come_from_a_list_that_grows(text: str, size: int, known: int) -> None:
    """The same pieces as by `push`, in steps; the tokens that the list had before are not part of the text."""
    ids, source = TOKENIZER.inner.encode(text).ids, [7] * known
    pushed, listed = Detokenizer(TOKENIZER), Detokenizer(TOKENIZER, source=source)
    for start in range(0, len(ids), size):
        for token in ids[start : start + size]:
            pushed.push(token)
        source += ids[start : start + size]
        end = min(start + size, len(ids))
        assert listed.take(end=end) == pushed.take()
    assert listed.take(final=True) == pushed.take(final=True)


def test_the_first_steps_of_a_text() -> None:
    made = late("one two three", 1, (), True)
    assert made.whole(0) == "" and made.whole(len(made)) == "one two three"
    first = made.whole(2)
    assert first == made[0] + made[1] == made.whole(2) and made.number(made.ends[1]) == 1
