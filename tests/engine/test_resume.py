"""A text that was begun elsewhere goes on as it would have there."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from helpers import grammars
from helpers.grammars import CONSTRAINTS
from helpers.sampling import SAMPLING
from helpers.tiny import prompt, tiny
from helpers.tokenizers import byte_level
from windfall import registry
from windfall.core.types import InputError
from windfall.drafters.lm import LMDrafter
from windfall.engine.engine import Engine
from windfall.engine.generation import Generation
from windfall.model.target import Target

NEW = 12


@cache
def engine(tokenizer: bool = True) -> Engine:
    """An engine that accepts several drafted tokens a cycle: the drafter is the target itself."""
    model = tiny(num_hidden_layers=2, **({"vocab_size": 6} if tokenizer else {}))
    target = Target(model, byte_level() if tokenizer else None, "tiny")
    return Engine(target, LMDrafter(model=model), registry.policy("beam", depth=2, k=2, nodes=4), max_requests=4)


def made(used: Engine | None = None, **sampling: Any) -> Generation:
    usual = {"max_new_tokens": NEW, "eos": (), "temperature": 1.0, "seed": 3}
    return (used or engine()).submit([0, 1], **{**usual, **sampling}).result(60)


@pytest.mark.parametrize("name", SAMPLING)
def test_every_place_gives_the_rest_of_the_text(name: str) -> None:
    used, how = engine(tokenizer=False), {"temperature": 0, **SAMPLING[name], "seed": 3}
    whole = made(used, **how)
    for place in range(0, NEW + 1, 3):
        rest = made(used, resume_token_ids=whole.token_ids[:place], policy="none" if place % 2 else None, **how)
        assert whole.token_ids[:place] + rest.token_ids == whole.token_ids
        assert rest.finish_reason == whole.finish_reason == "length" and rest.seed == 3
    assert len(whole.steps) < NEW


def test_texts_join_within_characters() -> None:
    """The bytes of a character may be on both sides of the cut. Each engine writes only what it knows."""
    for seed in range(6):
        whole, cuts = made(seed=seed), 0
        for step, _ in enumerate(whole.steps):
            had = whole.steps[: step + 1]
            tokens = [token for each in had for token in each.tokens]
            rest = made(seed=seed, resume_token_ids=tokens)
            assert "".join(each.text for each in had) + rest.text == whole.text
            cuts += tokens[-1] == 2 and len(tokens) < NEW  # the first half of a character
    assert cuts


def test_stop_texts_may_lie_across_the_cut() -> None:
    plain = made(temperature=0)
    stop = plain.text[3:6]
    whole = made(temperature=0, stop=stop)
    assert whole.finish_reason == "stop" and len(whole.token_ids) >= 3
    for place in range(1, len(whole.token_ids)):
        rest = made(temperature=0, stop=stop, resume_token_ids=whole.token_ids[:place])
        assert whole.token_ids[:place] + rest.token_ids == whole.token_ids and rest.finish_reason == "stop"


def test_a_text_that_has_ended_is_not_generated() -> None:
    whole = made(temperature=0)
    before = engine().counters.rounds
    rest = made(temperature=0, resume_token_ids=whole.token_ids)
    assert (rest.text, rest.token_ids, rest.finish_reason) == ("", [], "length")
    assert made(eos=(5,), resume_token_ids=[0, 5]).finish_reason == "stop" and engine().counters.rounds == before


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"resume_token_ids": [6]}, "resume_token_ids takes token ids between 0 and 5"),
        ({"resume_token_ids": [-1]}, "resume_token_ids takes token ids between 0 and 5"),
        ({"resume_token_ids": ["a"]}, "resume_token_ids takes token ids"),
        (
            {"resume_token_ids": [1], "seed": None},
            "resume_token_ids needs the seed that the text began with, or temperature 0",
        ),
        ({"resume_token_ids": [0, 5, 1], "eos": (5,)}, "the text ends after 2 of the 3 tokens to resume from"),
        ({"resume_token_ids": [0] * (NEW + 1)}, f"the text ends after {NEW} of the {NEW + 1} tokens"),
    ],
)
def test_wrong_tokens_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        made(**given)


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_a_text_goes_on_within_its_grammar(kind: str) -> None:
    used, how = grammars.engine(), {**CONSTRAINTS[kind], "max_new_tokens": 60, "temperature": 0.9, "seed": 3}

    def rest(tokens: list[int]) -> Generation:
        return used.submit(prompt(), resume_token_ids=tokens, **how).result(60)

    whole = rest([])
    for place in (1, len(whole.token_ids) // 2, len(whole.token_ids)):
        made = rest(whole.token_ids[:place])
        assert whole.token_ids[:place] + made.token_ids == whole.token_ids
        assert made.finish_reason == whole.finish_reason
    with pytest.raises(InputError, match="token 2 of those to resume from does not follow the grammar"):
        rest([whole.token_ids[0], grammars.TOKENS.index("_")])
