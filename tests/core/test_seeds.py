"""Without a seed each text gets a fresh one, which is reported; with a seed the text is always the same."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

import windfall as library
from helpers.cli import SHORT, folder, windfall  # noqa: F401 (folder is a fixture)
from helpers.tiny import prompt, tiny
from windfall.core.types import SamplingParams
from windfall.engine.engine import Engine, Generation

SEED_0 = [3, 11, 36, 11, 51, 23, 30, 29]
HOT = {"max_new_tokens": 24, "temperature": 1.2}


@cache
def engine() -> Engine:
    return library.load(tiny(num_hidden_layers=4), "lm", "chain")


def test_texts_without_a_seed_differ_and_can_be_repeated() -> None:
    made = [engine().generate(prompt(), **HOT) for _ in range(2)]
    assert len({tuple(each.token_ids) for each in made}) > 1
    assert len({each.seed for each in made}) == 2
    for each in made:
        assert each.seed is not None and each.stats.seed == each.seed == each.stats.as_dict()["seed"]
        assert engine().generate(prompt(), seed=each.seed, **HOT).token_ids == each.token_ids


def test_a_seed_gives_the_text_of_version_0_1_0() -> None:
    """The tokens of version 0.1.0 on this model, whose default seed was 0."""
    assert engine().generate(prompt(), seed=0, **HOT).token_ids[:8] == SEED_0


def test_prompts_of_a_batch_have_seeds_of_their_own() -> None:
    made = engine().generate_batch([prompt()] * 3, **HOT)
    assert len({each.seed for each in made}) == 3
    for each in made:
        assert engine().generate(prompt(), seed=each.seed, **HOT).token_ids == each.token_ids
    shared = engine().generate_batch([prompt()] * 2, seed=5, **HOT)
    assert [each.seed for each in shared] == [5, 5] and shared[0].token_ids == shared[1].token_ids


def test_a_stream_knows_its_seed() -> None:
    stream = engine().stream(prompt(), **HOT)
    tokens = [token for step in stream for token in step.tokens]
    assert stream.prompt_tokens == 9
    assert engine().generate(prompt(), seed=stream.seed, **HOT).token_ids == tokens


def test_greedy_texts_need_no_seed() -> None:
    made = engine().generate(prompt(), max_new_tokens=4)
    assert made.seed is None and made.stats.as_dict()["seed"] is None
    assert engine().generate(prompt(), max_new_tokens=4, seed=3).seed == 3
    with pytest.raises(ValueError, match="no seed yet"):
        _ = SamplingParams(temperature=1.0).noise_seed


def test_the_prompt_is_counted_and_timed() -> None:
    stats = engine().generate(prompt(), max_new_tokens=4).stats
    assert stats.prompt_tokens == 9
    assert stats.prompt_tokens_per_second == pytest.approx(9 / stats.prefill)
    assert stats.as_dict()["prompt_tokens"] == 9
    assert stats.as_dict()["prompt_tokens_per_second"] == stats.prompt_tokens_per_second


# ---- commands


def test_generate_reports_a_seed_that_repeats_the_text(folder: Path) -> None:  # noqa: F811
    options = ("--target", folder, "--policy", "chain", "--temperature", "1.2", *SHORT)
    first = windfall("generate", "abc", *options)
    [seed] = re.findall(r"; seed (\d+)\n", first.stderr)
    assert windfall("generate", "abc", *options, "--seed", seed).stdout == first.stdout
    told = [json.loads(windfall("generate", "abc", "--json", *options).stdout) for _ in range(2)]
    assert len({each["seed"] for each in told}) == 2
    assert len({each["text"] for each in told}) > 1
    assert "seed" not in windfall("generate", "abc", "--target", folder, "--policy", "chain", *SHORT).stderr


@pytest.mark.parametrize("command", ["generate --compare --policy chain", "compare --policies chain --rounds 1"])
def test_what_is_compared_shares_one_fresh_seed(folder: Path, command: str) -> None:  # noqa: F811
    name, *flags = command.split()
    options = ("--target", folder, "--drafter", "lm", "--temperature", "1.2", *SHORT)
    told = [json.loads(windfall(name, "abc", *flags, "--json", *options).stdout) for _ in range(2)]
    assert all(each["equal"] for each in told)
    assert told[0]["seed"] != told[1]["seed"]
    again = json.loads(windfall(name, "abc", *flags, "--json", "--seed", told[0]["seed"], *options).stdout)
    assert again["token_ids"] == told[0]["token_ids"]


def test_a_drawn_tree_can_be_drawn_again(folder: Path) -> None:  # noqa: F811
    options = ("--target", folder, "--drafter", "lm", "--policy", "chain", "--temperature", "1.2", *SHORT)
    first = windfall("tree", "abc", *options)
    [seed] = re.findall(r"^seed (\d+)$", first.stderr, re.MULTILINE)
    assert windfall("tree", "abc", *options, "--seed", seed).stdout == first.stdout


def test_one_token_is_reported_in_the_singular(folder: Path) -> None:  # noqa: F811
    said = windfall("generate", "a", "--raw", "--target", folder, "--policy", "none", "--max-new-tokens", "1")
    assert re.match(r"1 token, .*; prompt: 1 token, ", said.stderr)
    compared = windfall("generate", "a", "--compare", "--target", folder, "--policy", "chain", "--max-new-tokens", "1")
    assert "Same 1 token\n" in compared.stdout


def test_a_generation_is_shown_without_its_trees() -> None:
    made = engine().generate(prompt(), max_new_tokens=4)
    assert isinstance(made, Generation) and "steps" not in repr(made)
