"""Log-probabilities of rows, and the texts of single tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.cli import character_tokenizer
from helpers.tokenizers import byte_level, sentence_pieces
from windfall.core.errors import InputError
from windfall.core.logprobs import Asked, token_logprobs, token_logprobs_of_all
from windfall.core.token_text import TokenTexts
from windfall.core.types import SamplingParams


def test_they_are_those_of_log_softmax_to_the_bit_alone_and_among_other_rows() -> None:
    rows = torch.randn(5, 997, generator=torch.Generator().manual_seed(0)) * 4
    tokens = [3, 996, 0, 500, 7]
    found = token_logprobs(rows, tokens, 4)
    for row, token, each in zip(rows, tokens, found, strict=True):
        logs = row.log_softmax(-1)
        assert (each.token, each.logprob) == (token, logs[token].item())
        assert [value for _, value in each.top] == logs.topk(4).values.tolist()
        assert [id for id, _ in each.top] == logs.topk(4).indices.tolist()
        assert token_logprobs(row[None], [token], 4) == (each,)


def test_half_precision_is_computed_in_float32() -> None:
    rows = (torch.randn(2, 50) * 4).bfloat16()
    (first, _) = token_logprobs(rows, [1, 2], 0)
    assert first.logprob == rows[0].float().log_softmax(-1)[1].item() and first.top == ()


def test_ties_are_ordered_by_id_and_excluded_tokens_are_left_out() -> None:
    row = torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0, 1.0, -torch.inf]).log_softmax(-1)
    for count in range(1, 8):
        (found,) = token_logprobs(row[None], [1], count)
        assert [token for token, _ in found.top] == [1, 3, 2, 4, 5, 0][:count]
    (only,) = token_logprobs(torch.tensor([[0.0, -torch.inf]]), [0], 20)  # more than there are tokens
    assert only == (0, 0.0, ((0, 0.0),))


@pytest.mark.parametrize("tied", [2, 5, 18, 19, 40])
def test_long_ties_are_ordered_by_id(tied: int) -> None:
    """Also those that go on after the tokens that are asked for at once."""
    logits = torch.zeros(1, 60)
    logits[0, 50] = 3.0
    logits[0, 5 : 5 + tied] = 1.0
    (found,) = token_logprobs(logits, [0], 3)
    assert [token for token, _ in found.top] == [50, 5, 6]


@pytest.mark.parametrize("together", [256, 4], ids=["together", "in parts"])
def test_those_of_several_texts_are_those_of_each_alone(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windfall.core.logprobs.MAX_ROWS", together)
    torch.manual_seed(0)
    asked = [
        Asked(torch.randn(count, 30).round(), torch.randint(30, (count,)).tolist(), most)  # with ties
        for count, most in ((2, 3), (1, 0), (5, 40), (3, 1))
    ]
    assert token_logprobs_of_all(asked) == [token_logprobs(*own) for own in asked]
    assert token_logprobs_of_all([]) == []


@pytest.mark.parametrize("wrong", [{"logprobs": -1}, {"logprobs": True}, {"prompt_logprobs": 1.5}])
def test_wrong_numbers_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(wrong))} must be a whole number of at least 0, or None"):
        SamplingParams(**wrong)


def test_a_wrong_mode_is_refused() -> None:
    with pytest.raises(InputError, match="'raw' or 'processed', not 'cooked'"):
        SamplingParams(logprobs=1, logprobs_mode="cooked")


# ---- texts of tokens


def test_the_bytes_of_byte_level_tokens() -> None:
    texts = TokenTexts(byte_level())
    assert [texts[id].text for id in range(6)] == ["a", " b", r"\xf0\x9f", r"\x98\x80", "é", "<end>"]
    assert texts[2].bytes + texts[3].bytes == "😀".encode()
    assert [texts[id].whole for id in range(5)] == [True, True, False, False, True]
    assert texts[4].bytes == "é".encode()


def test_tokens_of_sentencepiece_keep_the_space_before_them() -> None:
    texts = TokenTexts(sentence_pieces())
    assert [texts[id].text for id in range(5)] == [" a", " b", "c", r"\xf0", r"\x9f"]
    assert texts[3].bytes == b"\xf0"


def test_a_tokenizer_of_characters() -> None:
    texts, tokenizer = TokenTexts(character_tokenizer()), character_tokenizer()
    assert texts[tokenizer.convert_tokens_to_ids("z")] == ("z", b"z", True)
    assert texts[tokenizer.eos_token_id].text == "<|end|>"
    assert texts[10_000].text == ""  # the model may have more tokens than the tokenizer
