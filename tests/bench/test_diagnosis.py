"""Accuracy, calibration and acceptance by rank, against figures computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import windfall
from helpers.cli import folder
from helpers.random_heads import random_head
from helpers.table import TableDrafter
from helpers.tiny import prompt, tiny
from windfall.bench.inspect.diagnosis import Probe, RankFigures, TreeFigures, by_rank, diagnose, equal_mass_error, probe
from windfall.cli import app
from windfall.core.tree import DraftTree
from windfall.core.types import Scores, Split, Step
from windfall.drafters.base import Drafter

__all__ = ["folder"]  # the fixture
DRAFTED = [  # q(next | last) of four tokens
    [0.1, 0.4, 0.3, 0.2],
    [0.7, 0.1, 0.15, 0.05],
    [0.1, 0.2, 0.1, 0.6],
    [0.25, 0.2, 0.3, 0.25],
]
FAVOURITES = [1, 0, 2, 3]  # the target's next token after each


class Tables(Drafter):
    """The table drafter behind the drafter's own contract."""

    def start(self, *given: Any) -> None:
        self.committed: list[int] = []

    def expand(self, trees: Any, grows: Any) -> list[DraftTree]:
        return [TableDrafter(DRAFTED).expand(tree, grow) for tree, grow in zip(trees, grows, strict=True)]

    def commit(self, trees: Any, paths: Any, bonus: list[int], hidden: Any) -> None:
        assert [path.tolist() for path in paths] == [[0]]
        self.committed += bonus


class FakeTarget:
    """A target whose favourite depends on the last token alone."""

    def __init__(self) -> None:
        self.vocab_size, self.commits = 4, 0

    def prefill(self, prompts: Any, taps: Any) -> None:
        return None

    def score(self, trees: list[DraftTree]) -> list[Scores]:
        return [Scores(torch.eye(4)[torch.tensor(FAVOURITES)][tree.tokens], None) for tree in trees]

    def commit(self, paths: Any) -> None:
        self.commits += 1


def test_probes_by_hand() -> None:
    drafter, target = Tables(), FakeTarget()
    found = probe(target, drafter, [3, 0], [1, 2])  # type: ignore[arg-type]
    assert drafter.committed == [1, 2] and target.commits == 2
    after = {  # after token t: is the drafter's favourite right, its probability of the target's, its highest
        0: (True, 0.4, 0.4),
        1: (True, 0.7, 0.7),
        2: (False, 0.1, 0.6),
        3: (False, 0.25, 0.3),
    }
    first = [(1, 1), (2, 2), (3, 3), (4, 0)]  # ranks and tokens after 0
    second = [(1, 0), (2, 2), (3, 1), (4, 3)]  # after 1
    assert [(p.rank, p.hit) for p in found] == [(rank, after[token][0]) for rank, token in first + second]
    wanted = [after[token][1:] for _, token in first + second]
    np.testing.assert_allclose([(p.chance, p.surest) for p in found], wanted, rtol=1e-5)


def test_a_token_beyond_the_children_counts_as_impossible() -> None:
    found = probe(FakeTarget(), Tables(), [3, 0], [1], children=2)  # type: ignore[arg-type]
    assert [round(p.chance, 3) for p in found] == [0.7, 0.0, 0.25, 0.4]
    assert [round(p.surest, 3) for p in found] == [0.7, 0.6, 0.3, 0.4]


def test_a_drafter_without_guesses_gives_no_probes() -> None:
    class Silent(Tables):
        def expand(self, trees: Any, grows: Any) -> list[DraftTree]:
            return list(trees)

    class Brief(Tables):
        def expand(self, trees: Any, grows: Any) -> list[DraftTree]:
            return super().expand(trees, grows) if len(trees[0]) == 1 else list(trees)

    assert probe(FakeTarget(), Silent(), [3, 0], [1, 2]) == []  # type: ignore[arg-type]
    assert probe(FakeTarget(), Brief(), [3, 0], [1])[0] == Probe(1, False, 0.0, 0.0)  # type: ignore[arg-type]


def test_figures_of_a_rank() -> None:
    probes = [Probe(1, True, 0.9, 0.9), Probe(1, False, 0.2, 0.7), Probe(2, False, 0.0, 0.3)]
    first, second = by_rank(probes)
    assert (first.rank, first.contexts, first.accuracy) == (1, 2, 0.5)
    assert first.confidence == pytest.approx(0.55)
    assert first.ece_paper == pytest.approx((0.1 + 0.2) / 2)  # each in a bin of its own
    assert first.ece_guo == pytest.approx((0.1 + 0.7) / 2)
    assert second == RankFigures(2, 1, 0.0, 0.0, 0.0, pytest.approx(0.3))


def test_bins_of_equal_mass() -> None:
    chances, hits = np.array([0.9, 0.1, 0.5, 0.3]), np.array([1.0, 0.0, 1.0, 0.0])
    assert equal_mass_error(chances, hits, bins=2) == pytest.approx((0.2 + 0.3) / 2)
    assert equal_mass_error(chances, hits, bins=1) == pytest.approx(abs(0.45 - 0.5))
    assert equal_mass_error(chances, hits, bins=10) == pytest.approx((0.1 + 0.1 + 0.5 + 0.3) / 4)


def step(path: list[int], passes: int = 2) -> Step:
    """Root; a, b below it; c, d below a and e below b; by path probability e comes before d."""
    tree = DraftTree.root(0)
    tree = tree.extend(torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([0.5, 0.4]).log(), torch.tensor([0, 1]))
    logq = torch.tensor([0.8, 0.1, 0.9]).log()
    tree = tree.extend(torch.tensor([1, 1, 2]), torch.tensor([3, 4, 3]), logq, torch.tensor([0, 1, 0]))
    tokens = tuple(range(len(path)))
    return Step(tokens, "", tree, torch.tensor(path), tree, torch.arange(6), passes, Split())


def test_trees_by_hand() -> None:
    found = TreeFigures.of([step([0, 1, 3]), step([0, 2, 5]), step([0, 1, 4]), step([0])])
    assert found.lengths == {0: 1, 2: 3}
    assert (found.cycles, found.tokens, found.tau, found.delta) == (4, 10, 2.5, 2.0)
    assert found.rank_share() == pytest.approx([0.6, 0.4, 0, 0, 0])
    assert found.heat_map() == [[0.5, 0.25], [0.5, 0.25]]
    assert found.heat_map(layer=True) == [[0.5, 0.25, 0], [0.25, 0.25, 0.25]]
    assert found.heat_map(layer=True, columns=2) == [[0.5, 0.25], [0.25, 0.5]]
    assert TreeFigures.of([]).heat_map() == []


def test_a_drafter_equal_to_the_target_is_always_right() -> None:
    engine = windfall.load(tiny(), "lm", "chain")
    found = diagnose(engine, [prompt(), prompt(6, seed=1)], engine.params(max_new_tokens=12))
    assert [each.rank for each in found.ranks] == [1, 2, 3, 4, 5]
    assert all(each.accuracy == 1 and each.contexts == 24 for each in found.ranks)
    assert found.children == 61  # the whole vocabulary
    assert all(each.confidence == pytest.approx(1 - each.ece_paper) for each in found.ranks)
    assert found.trees.heat_map()[0] == [1.0]


def test_another_drafter_is_sometimes_right() -> None:
    target = tiny()
    engine = windfall.load(target, (tiny(num_hidden_layers=2), None), "beam")
    found = diagnose(engine, [prompt()], engine.params(max_new_tokens=30))
    assert all(0 <= each.accuracy < 1 for each in found.ranks)
    assert sum(found.trees.lengths.values()) == found.trees.cycles and found.trees.tokens == 30
    again = diagnose(engine, [prompt()], engine.params(max_new_tokens=30))
    assert again.ranks == found.ranks  # nothing is left over from a run


@pytest.mark.parametrize("kind", ["eagle", "eagle3-pruned", "griffin"])
def test_heads_are_probed_with_their_own_features(kind: str) -> None:
    engine = windfall.load(tiny(), random_head(kind), "chain")
    answer = engine.generate(prompt(), max_new_tokens=6).token_ids
    found = probe(engine.target, engine.drafter, prompt(), answer)
    assert len(found) == 30
    fresh = windfall.load(tiny(), random_head(kind), "chain")
    alone = probe(
        fresh.target, fresh.drafter, [*prompt(), *answer[:2]], answer[2:3]
    )  # the same context without the steps before it
    np.testing.assert_allclose([p[2:] for p in alone], [p[2:] for p in found[10:15]], rtol=1e-3, atol=1e-5)
    assert [p[:2] for p in alone] == [p[:2] for p in found[10:15]]


def run(*words: object) -> Any:
    return CliRunner().invoke(app, ["diagnose", "--device", "cpu", "--max-new-tokens", "10", *map(str, words)])


def test_the_command_writes_json_and_a_figure(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text('{"turns": ["abc"]}\n{"text": "hello"}\n')
    words = [
        "--target",
        folder,
        "--drafter",
        folder,
        "--prompts",
        tmp_path / "some.jsonl",
        "--json",
        "--set",
        "depth=3",
    ]
    found = run(*words, "--plot", tmp_path / "figure.svg")
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert told["policy"] == "beam" and told["prompts"] == 2
    assert [each["accuracy"] for each in told["ranks"]] == [1.0] * 5
    assert set(told["ranks"][0]) == {"rank", "contexts", "accuracy", "confidence", "ece_paper", "ece_guo"}
    assert len(told["trees"]["accepted_by_layer_rank"]) == 3 and told["trees"]["tau"] > 2
    assert "<svg" in (tmp_path / "figure.svg").read_text()


def test_the_command_as_tables(folder: Path) -> None:
    found = run("abc", "--target", folder, "--drafter", "self", "--temperature", "1", "--policy", "chain")
    assert found.exit_code == 0, found.output
    for words in ("ECE (paper)", "rank among siblings", "rank within the level", "accepted draft tokens", "tau"):
        assert words in found.stdout


def test_what_cannot_be_diagnosed_is_refused(folder: Path, tmp_path: Path) -> None:
    both = run("abc", "--target", folder, "--prompts", tmp_path / "some.jsonl")
    assert both.exit_code == 2 and "not both" in both.stderr
    nowhere = run("abc", "--target", folder, "--plot", tmp_path / "figure.doc")
    assert nowhere.exit_code == 2 and ".png, .svg, .pdf" in nowhere.stderr
    nothing = run("a", "--raw", "--target", folder, "--max-new-tokens", "1")
    assert nothing.exit_code == 2 and "nothing was drafted" in nothing.stderr
