"""The fewest tokens of a text, without tokenizing it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from helpers.cli import character_tokenizer
from helpers.tokenizers import fast
from windfall.core.fewest_tokens import FewestTokens, fewest_tokens

CORPUS = [f"word{number} {'-' * number} {' ' * number}\n internal {'é' * number}" for number in range(20)]
LETTERS = ["word", " ", "-", "  ", "\n", "é", "e\u0301", "▁", "日本", "\x04", "😀", "internal", "1", "<end>", "\u212b"]


def trained(normalizer: Any = None, pieces: bool = False, letters: list[str] | None = None, **added: Any) -> Any:
    """A small tokenizer of bytes, or one of characters that falls back on bytes."""
    if pieces:
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    else:
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet() if letters is None else letters
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens([tokenizers.AddedToken("<end>", **added)])
    return fast(backend)


KINDS = {
    "bytes": trained(),
    "without some bytes": trained(letters=["a"]),
    "pieces": trained(pieces=True),
    "a normal form": trained(normalizers.NFC()),
    "replaced spaces": trained(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), True),
}


def tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False).input_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_has_fewer(kind: str) -> None:
    tokenizer, chance = KINDS[kind], random.Random(0)
    fewest = fewest_tokens(tokenizer)
    assert fewest is not None
    for _ in range(300):
        some = chance.sample(LETTERS, chance.randint(1, 3))
        text = "".join(chance.choice(some) * chance.randint(1, 30) for _ in range(chance.randint(1, 8)))
        assert fewest.of(text) <= tokens(tokenizer, text), text


def test_the_number_is_exact_for_the_longest_token() -> None:
    tokenizer = trained()
    fewest = fewest_tokens(tokenizer)
    assert fewest is not None
    longest = max((tokenizer.decode([token]) for token in range(len(tokenizer))), key=lambda text: len(text.encode()))
    assert fewest.of(longest) == 1 and fewest.of(longest + "-") == 2
    assert fewest.of("") == 0


def test_letters_and_digits_are_counted_apart() -> None:
    fewest = FewestTokens([b" " * 100, b"abc--", b"12"])
    assert fewest.of(" " * 1000) == 10
    assert fewest.of("ab-- 12" * 100) == 134  # 400 of them, and at most 3 in a token


def test_a_normal_form_may_shorten_other_texts() -> None:
    fewest = fewest_tokens(KINDS["a normal form"])
    assert fewest is not None and fewest.of("word" * 1000) > 100 and fewest.of("word" * 1000 + "é") == 0


@pytest.mark.parametrize(
    "tokenizer",
    [
        None,
        object(),
        character_tokenizer(),
        trained(normalizers.Lowercase()),
        trained(normalizers.Strip()),
        trained(normalizers.Replace("-", "")),
        trained(lstrip=True),
        trained(rstrip=True),
    ],
)
def test_nothing_is_known_of_other_tokenizers(tokenizer: Any) -> None:
    assert fewest_tokens(tokenizer) is None


def test_nothing_is_known_if_text_is_removed() -> None:
    tokenizer = trained()
    split = pre_tokenizers.Split(" ", "removed")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel()])
    assert fewest_tokens(tokenizer) is None
