"""`as_completed`: texts of a queue of requests, in the order in which they end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.engine.as_completed import SUBMITTED_SHARE, as_completed
from windfall.engine.engine import Engine
from windfall.engine.request import Handle
from windfall.model.target import Target

PROMPT = prompt(5)


@pytest.fixture
def engine() -> Iterator[Engine]:
    target = Target(tiny(num_hidden_layers=1))
    with Engine(target, registry.drafter("ngram"), registry.policy("none"), max_requests=2) as made:
        yield made


def run(engine: Engine, queue: deque[int], handles: list[Handle], **sampling: Any) -> Any:
    """The items of the queue are numbers of new tokens."""

    def submit(tokens: int) -> Handle:
        handles.append(engine.submit(PROMPT, max_new_tokens=tokens, **sampling))
        return handles[-1]

    return as_completed(engine, queue, submit)


def test_texts_come_as_they_end(engine: Engine) -> None:
    found = list(run(engine, deque([30, 2, 4]), []))
    assert [item for item, _ in found] == [2, 4, 30]
    assert all(len(text.token_ids) == item for item, text in found)
    assert list(run(engine, deque(), [])) == []


def test_items_may_be_added_meanwhile(engine: Engine) -> None:
    queue, handles, found = deque([3] * 9), list[Handle](), []
    for item, _ in run(engine, queue, handles):
        found.append(item)
        assert len(handles) <= SUBMITTED_SHARE * engine.max_requests + len(found)
        if len(found) == 1:
            queue.appendleft(5)
    assert sorted(found) == [3] * 9 + [5] and found[-1] == 3


def test_a_request_that_fails_raises_its_error_and_ends_the_others(engine: Engine) -> None:
    def fails(ids: Tensor, logits: Tensor) -> Tensor:
        if ids.shape[1] == len(PROMPT) + 3:
            raise ValueError("no more")
        return torch.as_tensor(logits)

    handles: list[Handle] = []
    with pytest.raises(ValueError, match="no more"):
        list(run(engine, deque([1, 200, 200, 1]), handles, processors=(fails,)))
    assert all(handle._request.cancelled for handle in handles if not handle.done)


def test_closing_cancels_what_was_submitted(engine: Engine) -> None:
    handles: list[Handle] = []
    texts = run(engine, deque([1, 400, 400]), handles)
    next(texts)
    texts.close()
    assert {handle.result(60).finish_reason for handle in handles[1:]} == {"cancelled"}
