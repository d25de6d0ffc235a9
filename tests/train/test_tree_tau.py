"""Tokens per pass from texts alone: the same as the engine's on the same texts."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.random_heads import random_head
from helpers.random_parallel import random_heads
from helpers.texts import write_drawn_texts, write_texts
from helpers.tiny import tiny
from windfall import registry
from windfall.costs.acceptance import Calibrator
from windfall.engine.engine import Engine
from windfall.heads.fitting import fit
from windfall.model.target import Target
from windfall.policies.beam import Beam
from windfall.train.shards import (
    HELD_OUT,
    TRAIN,
    FinishedPrompt,
    Sampling,
    Text,
    TokenData,
    write_metadata,
    write_shard,
)
from windfall.train.tree_tau import BEAM, COUPLED, CYCLES, GREEDY, Excerpt, TreeTau, choose_excerpts


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny())


@pytest.fixture(scope="module")
def data(target: Target, tmp_path_factory: pytest.TempPathFactory) -> TokenData:
    folder = write_drawn_texts(tmp_path_factory.mktemp("texts"), target, count=4, length=90)
    return TokenData.open(folder, TRAIN)


def heads(kind: str, target: Target) -> tuple[str, Any]:
    """The drafter's name and a random head that is right now and then."""
    torch.manual_seed(1)
    if kind in ("medusa", "hydra"):
        return kind, fit(random_heads(kind, target.model), target)
    return "head", fit(random_head(kind), target)


@pytest.mark.parametrize("kind", ["eagle3-pruned", "eagle", "medusa"])
def test_it_is_the_tau_of_the_engine(
    kind: str, target: Target, data: TokenData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding the same texts with the same beam: greedy, and at temperature 1 with the recorded seed."""
    monkeypatch.setattr(Calibrator, "_fit_kappa", lambda *_: None)  # the measurement does not adapt it
    name, head = heads(kind, target)
    excerpts, wanted = [], {GREEDY: [0, 0], COUPLED: [0, 0]}  # tokens, cycles
    engine = Engine(target, registry.drafter(name, model=head), Beam(**BEAM), coupled=True)
    for index in range(len(data)):
        tokens, sampling = data[index][0].tolist(), data.sampling(index)
        excerpts.append(Excerpt(tokens[: 6 + 8 * CYCLES], 6, sampling))
        sampled = {"temperature": sampling.temperature, "seed": sampling.seed}
        stream = engine.stream(tokens[:6], max_new_tokens=90, **sampled)
        count = wanted[excerpts[-1].kind]
        for step in islice(stream, CYCLES):
            count[0], count[1] = count[0] + len(step.tokens), count[1] + 1
        stream.close()
    found = TreeTau(target, name, excerpts).measure(head)
    assert found == {kind: tokens / cycles for kind, (tokens, cycles) in wanted.items()}
    assert max(found.values()) > 1


def test_the_head_is_not_changed(target: Target, data: TokenData) -> None:
    name, head = heads("eagle3", target)
    head = head.double().train()
    before = {key: value.clone() for key, value in head.state_dict().items()}
    TreeTau(target, name, choose_excerpts(data, 4, 100)).measure(head)
    assert head.training and head.vocabulary is not None
    for key, value in head.state_dict().items():
        assert value.dtype == torch.float64 and torch.equal(value, before[key])


def test_the_choice_of_excerpts(target: Target, data: TokenData, tmp_path: Path) -> None:
    found = choose_excerpts(data, 4, 40)
    assert [excerpt.kind for excerpt in found] == [GREEDY] * 2 + [COUPLED] * 2
    for excerpt in choose_excerpts(data, 100, 40):
        assert 6 <= excerpt.start < len(excerpt.tokens) <= 40
        assert any(data[i][0][: len(excerpt.tokens)].tolist() == excerpt.tokens for i in range(len(data)))
    assert len({excerpt.start for excerpt in choose_excerpts(data, 100, 90)}) > 2, "they begin at different places"
    write_metadata(tmp_path, {"target": {"vocab_size": target.vocab_size}})
    answer = [False] * 3 + [True] * 2 + [False] * 2 + [True] * 3
    texts = [Text(list(range(10)), answer, Sampling(0.0, 1)), Text([1, 2], [False, True], Sampling(0.0, 1))]
    write_shard(tmp_path, 0, [FinishedPrompt(1, False, texts)])
    [excerpt] = choose_excerpts(TokenData.open(tmp_path), 8, 100)
    assert (excerpt.start, len(excerpt.tokens)) == (3, 5), "it ends with the answer; the second text is too short"
    unknown = write_texts(tmp_path / "unknown", target.model, count=3, length=8)
    assert choose_excerpts(TokenData.open(unknown, HELD_OUT), 8, 100) == []
