"""Recordings, and that replay and engine give the same cycles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.ltd import H200, TEXTS, TOKENS, engine, random_pair, recorded
from windfall import registry
from windfall.core.errors import InputError
from windfall.core.types import Split, Step
from windfall.costs.curves import Costs, Curve
from windfall.engine.engine import Engine
from windfall.policies.papers import ltd
from windfall.policies.papers.ltd import Pair, Rules
from windfall.train.rl.live import Live, RemotePolicy
from windfall.train.rl.recording import DTYPES, Recording
from windfall.train.rl.replay import Replay, positions
from windfall.train.rl.rollout import Outcome, rollout


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_both_backends_accept_the_same(temperature: float) -> None:
    prompts = [prompt for _, prompt in TEXTS]
    rules = {"k": 3, "max_depth": 5, "size_step": 2}
    beams = ((4, 9),) if temperature else ((1, 1), (4, 9))
    pairs = [Pair(Rules(**rules, fixed_depth=depth, fixed_size=nodes)) for depth, nodes in beams]
    for pair in (*pairs, random_pair(5, **rules, parts="PDLE")):
        live = Live(
            engine(), prompts, k=3, entropy="E" in pair.rules.parts, max_new_tokens=TOKENS, temperature=temperature
        )
        real = rollout(live, pair, 0.0)
        replayed = rollout(Replay(positions(recorded(temperature)), H200, 5), pair, 0.0)
        assert [each._replace(seconds=0) for each in real] == [each._replace(seconds=0) for each in replayed]
        assert sum(each.tokens for each in real) == TOKENS * len(TEXTS)
        assert all(each.seconds > 0 for each in real)


def test_capturing_graphs_does_not_count_as_cycle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([2.0, 50.0, 3.0, 0.5])
    stream = Engine.stream

    def slow(self: Engine, prompt: object, **settings: Any) -> Iterator[Step]:
        for place, step in enumerate(stream(self, prompt, **settings)):
            seconds = next(taken, 1.0)
            yield replace(step, seconds=Split(verify=seconds), recorded=place in (1, 3))

    monkeypatch.setattr(Engine, "stream", slow)
    pair = Pair(Rules(k=3, max_depth=5, size_step=2, fixed_depth=1, fixed_size=1))
    live = Live(engine(), [TEXTS[0][1]], k=3, max_new_tokens=TOKENS, temperature=0.0)
    monkeypatch.setattr(RemotePolicy, "take_waited", lambda self: 0.0)
    assert [round(each.seconds, 6) for each in rollout(live, pair, 0.0)[:4]] == [2.0, 2.0, 3.0, 0.5]


def test_a_replay_equals_the_engine_with_a_beam() -> None:
    """Against the engine with its own beam policy, without a backend."""
    beam = Engine(engine().target, engine().drafter, registry.policy("beam", depth=4, k=3, nodes=9))
    steps = [step for _, tokens in TEXTS for step in beam.generate(tokens, max_new_tokens=TOKENS).steps]
    pair = Pair(Rules(k=3, max_depth=5, fixed_depth=4, fixed_size=8))
    replayed = rollout(Replay(positions(recorded()), H200, 5), pair, 0.0)
    assert [(len(s.tokens), s.draft_passes, len(s.tree) - 1) for s in steps] == [
        (each.tokens, each.passes, each.nodes) for each in replayed
    ]
    assert max(len(step.tokens) for step in steps) > 1


def test_a_replay_equals_the_engine_with_the_policy(tmp_path: Path) -> None:
    """The engine with the policy `ltd` has the same cycles as the same networks on the recording."""
    for seed, parts in ((0, "PDL"), (2, "PDLE")):
        ltd.save(random_pair(seed, k=3, max_depth=5, size_step=2, parts=parts), tmp_path / str(seed), {})
        pair = ltd.load(tmp_path / str(seed))
        policy = registry.policy("ltd", path=str(tmp_path / str(seed)))
        made = Engine(engine().target, engine().drafter, policy)
        steps = [step for _, tokens in TEXTS for step in made.generate(tokens, max_new_tokens=TOKENS).steps]
        replayed = rollout(Replay(positions(recorded()), H200, 5), pair, 0.0)
        assert [(len(s.tokens), s.draft_passes, len(s.tree) - 1) for s in steps] == [
            (each.tokens, each.passes, each.nodes) for each in replayed
        ]


def test_seconds_of_a_replay_by_hand() -> None:
    costs = Costs(Curve((1, 3), (1.0, 2.0)), ((0, Curve((1, 4), (10.0, 16.0))),), overhead=0.5, opening=4.0)
    replay = Replay(positions(recorded()), costs, 5)
    assert replay.begin() and replay.draft() and replay.draft()
    outcome = replay.verify(3, decision_seconds=0.25)
    assert outcome[1:] == (0.5 + 4.0 + 1.0 + 2.0 + 16.0 + 0.25, 2, 3)
    replay.begin()
    assert replay.verify(3, 0.0) == Outcome(1, 10.5, 0, 0)  # nothing drafted, nothing to verify


def test_recordings_are_stored_completely(tmp_path: Path) -> None:
    file = tmp_path / "trees.npz"
    recorded().save(file)
    again = Recording.load(file)
    assert again.ids == ["0", "1", "2"]
    for one, other in zip(recorded().trees(), again.trees(), strict=True):
        assert (one.text, one.length, one.left) == (other.text, other.length, other.left)
        assert np.array_equal(one.score, other.score) and np.array_equal(one.path, other.path)
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(InputError, match="is no recording"):
        Recording.load(file)
    with pytest.raises(InputError, match="cannot read"):
        Recording.load(tmp_path / "none.npz")
    array = tmp_path / "array.npy"
    np.save(array, np.zeros(3))
    file.write_bytes(b"")
    for other in (file, array):
        with pytest.raises(InputError, match="is no recording"):
            Recording.load(other)
    lacking = replace(recorded(), arrays={**recorded().arrays, "path": recorded().arrays["path"][1:]})
    lacking.save(file)
    with pytest.raises(InputError, match="is no recording"):
        Recording.load(file)


def test_long_recordings_are_read_to_the_end() -> None:
    """The total length of their paths exceeds a 16-bit integer."""
    nodes = {"tokens": [5, 6, 7], "parents": [0, 0, 1], "logq": [0.0, -1.0, -2.0], "entropy": [0.5, 0.5, np.nan]}
    places = {"sizes": [3], "lengths": [9], "rooms": [9], "texts": [0], "path": [1, 2], "steps": [2]}
    arrays = {name: np.tile(np.array(own, DTYPES[name]), 17_000) for name, own in (nodes | places).items()}
    *_, last = Recording(recorded().about, arrays).trees()
    assert last.path.tolist() == [1, 2] and last.score.tolist() == [0, -1, -3]


def test_a_recording_continues_only_with_the_same_settings(tmp_path: Path) -> None:
    from windfall.cli.train_ltd import TextOptions, write_recording

    file = tmp_path / "trees.npz"
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"id": {n}, "text": "{n}"}}\n' for n in range(3)), "utf-8")
    texts = TextOptions([str(tmp_path / "prompts.jsonl")], 3, 4, 0.0)
    recorded().save(file)
    for drafter, depth, k, other in (("head", 5, 3, "drafter, sampling"), ("", 4, 3, "depth, sampling")):
        with pytest.raises(InputError, match=f"with another {other}"):
            write_recording(engine(), drafter, texts, file, depth, k)
