"""A drafter whose vocabulary is padded to another size than the target's, as in families of models with one tokenizer.

The prompts and texts have padding ids that the smaller of two vocabularies lacks: a random model draws them too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from helpers.cli import CHARACTERS, SPECIAL, word_tokenizer
from helpers.gpu import PRECISE
from helpers.tiny import VOCABULARY, prompt, tiny
from windfall import registry
from windfall.core.types import GpuOptions
from windfall.drafters.lm import LMDrafter
from windfall.engine.engine import Engine
from windfall.model.target import Target

SMALLER, LARGER = VOCABULARY - 9, VOCABULARY + 29
TOKENIZER = word_tokenizer(SPECIAL, [*CHARACTERS[:40]])
PROMPTS = [[*prompt(5, seed=1), VOCABULARY - 1], prompt(12, seed=2)]
POLICIES = {"beam": {"depth": 3, "k": 3, "nodes": 10}, "svip": {"depth": 4, "k": 3, "nodes": 12}}
SAMPLINGS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}]
ASKED: dict[str, Any] = {"max_new_tokens": 10, "eos": ()}


def made(columns: int, policy: str, graphs: bool, max_requests: int | None = None) -> Engine:
    """The drafter is the target with this many tokens."""
    other = tiny(dtype=PRECISE)
    other.resize_token_embeddings(columns, mean_resizing=False)
    target, options = Target(tiny(dtype=PRECISE), TOKENIZER), GpuOptions(graphs, exact=False, pages=True)
    chosen = registry.policy(policy, **POLICIES.get(policy, {}))
    return Engine(target, LMDrafter((other, TOKENIZER)), chosen, gpu_options=options, max_requests=max_requests)


@cache
def plain_texts(temperature: float, **sampling: Any) -> list[list[int]]:
    engine = made(VOCABULARY, "none", graphs=False)
    texts = [engine.generate(each, temperature=temperature, **ASKED, **sampling).token_ids for each in PROMPTS]
    assert max(max(text) for text in texts) >= SMALLER
    return texts


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "warm"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("columns", [SMALLER, LARGER])
@pytest.mark.parametrize("graphs", [False, True], ids=["host", "graphs"])
def test_single_texts_are_those_of_plain_decoding(
    graphs: bool, columns: int, policy: str, sampling: dict[str, Any]
) -> None:
    engine = made(columns, policy, graphs)
    texts = [engine.generate(each, **ASKED, **sampling) for each in PROMPTS]
    assert [text.token_ids for text in texts] == plain_texts(**sampling)
    assert (engine.fallback == "") is graphs
    assert min(len(text.steps) for text in texts) < ASKED["max_new_tokens"] * 0.8


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "warm"])
@pytest.mark.parametrize("columns", [SMALLER, LARGER])
@pytest.mark.parametrize("graphs", [False, True], ids=["host", "pages"])
def test_texts_of_a_batch_are_those_of_plain_decoding(graphs: bool, columns: int, sampling: dict[str, Any]) -> None:
    engine = made(columns, "beam", graphs)
    texts = engine.generate_batch(PROMPTS, **ASKED, **sampling)
    assert [text.token_ids for text in texts] == plain_texts(**sampling)
    assert (engine.batch_fallback == "") is graphs
    assert min(len(text.steps) for text in texts) < ASKED["max_new_tokens"] * 0.8


def test_rehearsals_may_use_any_token_of_the_target() -> None:
    engine = made(SMALLER, "beam", graphs=True, max_requests=1)
    engine.prepare(temperatures=(1.0,))
    assert list(engine.warm_up())[-1] == 1.0
