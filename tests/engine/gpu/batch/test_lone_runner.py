"""Drafters that work on the host: a text that runs alone is drafted, and texts that run together share plain rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from helpers.gpu import engine
from helpers.tiny import prompt
from windfall.engine.batch_runner import Use
from windfall.engine.gpu.batch.results import BatchStep
from windfall.engine.lone_runner import LoneRunner

PROMPTS = [prompt(length, seed=length) for length in (9, 70, 2, 14)]
ASKED: dict[str, Any] = {"max_new_tokens": 12, "eos": (), "temperature": 1.0, "seed": 3}


def test_texts_that_run_together_share_plain_rounds() -> None:
    made = engine("llama", "ngram", "auto", graphs=True, exact=True)
    alone = [made.generate(each, **ASKED).token_ids for each in PROMPTS]
    made.prepare((1.0,))
    texts = made.generate_batch(PROMPTS, **ASKED)
    assert [text.token_ids for text in texts] == alone
    assert made.batch_fallback == "" and made.undrafted == "its drafter works on the host"
    steps = [step for text in texts for step in text.steps]
    assert all(isinstance(step, BatchStep) and step.rows == 1 for step in steps)
    made.close()


def test_a_text_that_runs_alone_is_drafted_until_others_join() -> None:
    made = engine("llama", "ngram", "auto", graphs=True, exact=True)
    wanted = [made.generate(each, **ASKED).token_ids for each in PROMPTS[:2]]
    runner: Any = made._batch_runner()
    requests = [made._request(made.encode(each), made.params(**ASKED)) for each in PROMPTS[:2]]
    first, second = (request.sequence for request in requests)
    with made._service.alone():
        runner.join([first])
        step = runner.round()[first]
        assert not isinstance(step, BatchStep)
        runner.join([second])
        while left := [each for each in (first, second) if not each.finish]:
            found = runner.round()
            assert all(isinstance(step, BatchStep) for step in found.values())
            runner.leave([each for each in left if each.finish])
    assert [each.tokens[each.prompt_length :] for each in (first, second)] == wanted
    made.close()


def test_policies_that_must_draft_keep_the_host() -> None:
    made = engine("llama", "ngram", "beam", graphs=True, exact=True)
    made.generate_batch(PROMPTS[:2], **ASKED)
    assert made.batch_fallback == "its drafter works on the host" and not made.undrafted
    made.close()


class Text(str):
    """A text of as many tokens as its name has letters."""

    @property
    def tokens(self) -> list[str]:
        return [*self]


class Fake:
    """A runner that writes down who has joined. It refuses texts named "bad"."""

    max_length, has_room = 9, False

    def __init__(self, name: str):
        self.texts: list[str] = []
        self.name, self.use = name, Use()

    def join(self, texts: list[str]) -> None:
        if "bad" in texts:
            raise ValueError("bad")
        self.texts += texts

    def leave(self, texts: list[str]) -> None:
        self.texts = [text for text in self.texts if text not in texts]

    def round(self) -> dict[str, str]:
        return dict.fromkeys(self.texts, self.name)

    def fits(self, lengths: Mapping[str, int]) -> bool:
        return self.name == "alone" or sum(lengths.values()) < 9


def test_who_runs_where() -> None:
    alone, together = Fake("alone"), Fake("together")
    runner = LoneRunner(alone, together)  # type: ignore[arg-type]
    texts: Any = [*map(Text, ("a", "b", "bad", "c"))]
    assert runner.fits({texts[0]: 20}) and runner.round() == {}
    runner.join(texts[:1])
    assert runner.round() == {"a": "alone"} and not runner.fits({texts[0]: 5, texts[1]: 5})
    with pytest.raises(ValueError, match="bad"):
        runner.join(texts[1:3])
    assert runner.round() == {"a": "alone"} and alone.texts == ["a"] and together.texts == []
    runner.join(texts[1:2])
    assert runner.round() == {"a": "together", "b": "together"} and alone.texts == []
    runner.leave(texts[:1])
    runner.join(texts[3:])
    assert runner.round() == {"b": "together", "c": "together"} and not runner.fits({texts[1]: 20})
    runner.leave(texts)
    runner.join(texts[1:2])
    assert runner.round() == {"b": "alone"}


def test_a_text_stays_alone_if_nothing_joins() -> None:
    """`SplitRunner` also joins an empty list, when all new texts are for its other runner."""
    runner = LoneRunner(Fake("alone"), Fake("together"))  # type: ignore[arg-type]
    runner.join([Text("a")])  # type: ignore[list-item]
    runner.join([])
    assert runner.round() == {"a": "alone"}


def test_a_text_that_is_left_over_moves_back_if_it_no_longer_fits() -> None:
    alone, together = Fake("alone"), Fake("together")
    runner = LoneRunner(alone, together)  # type: ignore[arg-type]
    short, long = Text("ab"), Text("a long text")
    runner.join([short, long])  # type: ignore[list-item]
    assert runner.round() == {short: "together", long: "together"}
    runner.leave([short])  # type: ignore[list-item]
    assert runner.round() == {long: "alone"} and together.texts == []
    runner.join([short])  # type: ignore[list-item]
    assert runner.round() == {long: "together", short: "together"} and alone.texts == []
