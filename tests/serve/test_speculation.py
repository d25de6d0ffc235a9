"""What a stream says about its cycles, and the policy that a request chooses."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.serving import drafting_engine, engine, http, running
from windfall.core.errors import InputError
from windfall.core.tree import DraftTree
from windfall.core.types import Split, Step
from windfall.engine.gpu.batch.results import BatchStep
from windfall.serve import speculation
from windfall.serve.app import make_app
from windfall.serve.settings import Settings
from windfall.serve.speculation import Cycles

MESSAGES = [{"role": "user", "content": "Name a river."}]
BODY: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0, "stream": True}
WANTED = {"include_speculation": True}


@pytest.fixture(scope="module")
def url() -> Any:
    with running(drafting_engine(), Settings(request_policies=("chain",))) as made:
        yield made


def chunks(url: str, path: str = "/v1/chat/completions", **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    with http().stream("POST", url + path, json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def cycles_of(url: str, **body: Any) -> list[dict[str, Any]]:
    found = chunks(url, **{**BODY, "stream_options": WANTED, **body})
    return [chunk["speculation"] for chunk in found if "speculation" in chunk]


def content(chunk: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content", "") for choice in chunk["choices"])


def test_a_stream_has_no_cycles_by_default(url: str) -> None:
    assert all("speculation" not in chunk for chunk in chunks(url, **BODY))


@pytest.mark.parametrize("more", [{}, {"temperature": 1, "seed": 3}, {"stop": ["e", "no such text"]}])
def test_the_tokens_of_each_cycle_are_the_text_of_its_chunk(url: str, more: dict[str, Any]) -> None:
    made = chunks(url, **{**BODY, "stream_options": WANTED, **more})
    for chunk in made:
        if "speculation" in chunk:
            assert "".join(token["text"] for token in chunk["speculation"]["tokens"]) == content(chunk)
        else:
            assert content(chunk) == ""
    usual = chunks(url, **{**BODY, **more})
    assert "".join(map(content, made)) == "".join(map(content, usual)) != ""


def test_a_cycle_says_what_was_drafted_verified_and_accepted(url: str) -> None:
    found = cycles_of(url)
    steps = drafting_engine().generate(MESSAGES, max_new_tokens=24, temperature=0.0).steps
    assert len(found) == len(steps)
    for cycle, step in zip(found, steps, strict=True):
        assert [token["id"] for token in cycle["tokens"]] == list(step.tokens)
        assert [token["drafted"] for token in cycle["tokens"]] == [n < step.accepted for n in range(len(step.tokens))]
        nodes = cycle["nodes"]
        assert [node["id"] for node in nodes] == step.drafted.tokens.tolist()
        assert [node["parent"] for node in nodes] == step.drafted.parents.tolist()
        assert [n for n, node in enumerate(nodes) if node["verified"]] == step.kept.tolist()
        assert [n for n, node in enumerate(nodes) if node["accepted"]] == step.kept[step.path].tolist()
        assert [node["path_probability"] for node in nodes] == pytest.approx(
            step.drafted.score.exp().tolist(), abs=1e-5
        )
        assert [node["probability"] for node in nodes] == pytest.approx(step.drafted.logq.exp().tolist(), abs=1e-5)
        assert cycle["drafted_tokens"] == len(nodes) - 1 and cycle["left_out"] == 0 and cycle["whole_tree"]
        assert cycle["verified_tokens"] == step.rows - 1 and cycle["accepted_tokens"] <= step.accepted
    assert any(cycle["accepted_tokens"] for cycle in found)
    assert any(len({node["verified"] for node in cycle["nodes"]}) == 2 for cycle in found)


def test_times_grow_from_cycle_to_cycle(url: str) -> None:
    found = cycles_of(url)
    times = [cycle["at"] for cycle in found]
    assert times == sorted(times) and times[0] > 0
    assert all(0 < sum(cycle["seconds"].values()) <= times[-1] for cycle in found)


def test_each_choice_has_its_own_cycles(url: str) -> None:
    found = chunks(url, **{**BODY, "stream_options": WANTED, "n": 2, "temperature": 1, "seed": 5})
    texts = ["", ""]
    for chunk in found:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    cycles = [chunk["speculation"] for chunk in found if "speculation" in chunk]
    told = ["".join(t["text"] for c in cycles if c["index"] == index for t in c["tokens"]) for index in range(2)]
    assert told == texts and texts[0] != texts[1]


def test_completions_have_cycles_too(url: str) -> None:
    made = chunks(url, "/v1/completions", prompt="Name a", max_tokens=8, seed=1, stream=True, stream_options=WANTED)
    told = "".join(token["text"] for chunk in made for token in chunk.get("speculation", {}).get("tokens", ()))
    assert told == "".join(choice["text"] for chunk in made for choice in chunk["choices"]) != ""


def test_of_a_large_tree_the_likeliest_and_the_accepted_nodes_are_sent(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = cycles_of(url)
    monkeypatch.setattr(speculation, "MAX_NODES", 4)
    for cycle, all_of_it in zip(cycles_of(url), whole, strict=True):
        nodes = cycle["nodes"]
        assert len(nodes) + cycle["left_out"] == len(all_of_it["nodes"])
        assert [n["id"] for n in nodes if n["accepted"]] == [n["id"] for n in all_of_it["nodes"] if n["accepted"]]
        assert all(node["parent"] < place for place, node in enumerate(nodes)) and nodes[0]["parent"] == -1
        for node in nodes[1:]:
            assert node["path_probability"] <= nodes[node["parent"]]["path_probability"] + 1e-6
    assert any(cycle["left_out"] for cycle in cycles_of(url))


# ---- texts of tokens


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode("utf-8", "replace")


def step(tokens: tuple[int, ...], text: str) -> Step:
    root = DraftTree.root(0)
    return Step(tokens, text, root, torch.tensor([0]), root, torch.tensor([0]), 0, Split())


def described(*steps: Step) -> list[list[str]]:
    cycles = Cycles(SimpleNamespace(seconds=lambda number, cycle: 0.0), Bytes(), ())  # type: ignore[arg-type]
    return [[token.text for token in cycles.describe(0, each).tokens] for each in steps]


def test_a_character_of_two_tokens_belongs_to_the_second() -> None:
    first, second = "é".encode()
    assert described(step((97, first, second), "aé")) == [["a", "", "é"]]
    assert described(step((97, first), "a"), step((second,), "é")) == [["a", ""], ["é"]]


def test_text_that_cannot_be_told_apart_belongs_to_the_last_token() -> None:
    assert described(step((97, 98), "other")) == [["", "other"]]


def test_steps_of_the_paged_runner_say_that_their_tree_is_not_whole() -> None:
    assert Step.whole_tree and not BatchStep.whole_tree


# ---- the policy of a request


def test_plain_decoding_drafts_nothing_and_gives_the_same_text(url: str) -> None:
    drafted, plain = cycles_of(url), cycles_of(url, policy="none")
    assert all(cycle["drafted_tokens"] == 0 and len(cycle["tokens"]) == 1 for cycle in plain)
    ids = [[token["id"] for cycle in cycles for token in cycle["tokens"]] for cycles in (drafted, plain)]
    assert ids[0] == ids[1] and len(drafted) < len(plain)


def test_an_offered_policy_is_used(url: str) -> None:
    chain = cycles_of(url, policy="chain")
    assert any(cycle["drafted_tokens"] > 1 for cycle in chain)
    assert all([node["parent"] for node in cycle["nodes"]] == [*range(-1, len(cycle["nodes"]) - 1)] for cycle in chain)


def test_other_policies_are_refused(url: str) -> None:
    for name in ("beam", "my.py:Policy", ""):
        answer = http().post(f"{url}/v1/chat/completions", json={"messages": MESSAGES, "policy": name})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "policy"
        expected = f"the policy '{name}' is not offered to requests; this server offers none, chain"
        assert error["message"] == expected


def test_the_policies_of_requests_are_checked_at_the_start() -> None:
    with pytest.raises(InputError, match="there is no policy 'nothing'"):
        make_app(engine(), Settings(request_policies=("nothing",)))
