"""The drafter of the host loop on pages: its trees, against those of the same drafter on a padded cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.gpu import engine
from helpers.tiny import prompt
from windfall.core.tree import DraftTree
from windfall.core.types import Grow, SamplingParams
from windfall.engine.engine import Engine
from windfall.engine.gpu.batch import paged_drafter
from windfall.engine.gpu.batch.paged_drafter import MAX_PENDING, PagedDrafter
from windfall.engine.gpu.batch.paged_target import PagedTarget
from windfall.engine.host_runner import TREE_ROWS

LENGTHS = (70, 9, 2, 40)
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "seed": 1, "top_k": 9}, {}]


class Pair:
    """The same sequences in pages and on padded caches."""

    def __init__(self, family: str, kind: str, samplings: list[dict[str, Any]]):
        self.engine = engine(family, kind, "svip", graphs=True)
        paged = self.engine._paged()
        assert paged is not None and paged.target is not None and paged.drafter is not None
        self.mine: tuple[PagedTarget, PagedDrafter] = paged.target, paged.drafter
        paged.target.tree_rows = TREE_ROWS
        self.samplings, self.live = samplings, list[list[int]]()
        self.dice: list[Any] = []

    def join(self, texts: list[list[int]], samplings: list[dict[str, Any]]) -> None:
        sequences = [self.made(text, how) for text, how in zip(texts, samplings, strict=True)]
        dice = [sequence.dice for sequence in sequences]
        for target, drafter in self.both:
            hidden = target.join(texts) if self.live else target.prefill(texts, drafter.taps)
            (drafter.join if self.live else drafter.start)(texts, hidden, dice)
        self.live += [sequence.tokens for sequence in sequences]

    def made(self, text: list[int], sampling: dict[str, Any]) -> Any:
        return self.engine._request(list(text), SamplingParams(**sampling)).sequence

    @property
    def both(self) -> list[tuple[Any, Any]]:
        return [self.mine, (self.engine.target, self.engine.drafter)]

    def retain(self, keep: list[int]) -> None:
        for target, drafter in self.both:
            target.retain(keep)
            drafter.retain(keep)
        self.live = [self.live[place] for place in keep]

    def cycle(self, turns: list[list[int]], k: int, seed: int = 0, entropy: bool = False) -> int:
        """Draft trees: in each turn, the sequences in the list expand their newest nodes. All drafts must be the same.
        Returns the number of nodes of the trees."""
        grown: list[list[DraftTree]] = []
        for _, drafter in self.both:
            trees = drafter.begin([text[-1] for text in self.live])
            sizes = [0] * len(trees)
            for turn in turns:
                grows: list[Grow | None] = [None] * len(trees)
                for seat in turn:
                    nodes = torch.arange(sizes[seat], len(trees[seat]))[:5]
                    sizes[seat] = len(trees[seat])
                    grows[seat] = Grow(nodes, k, entropy)
                trees = drafter.expand(trees, grows)
            grown.append(trees)
        for one, other in zip(*grown, strict=True):
            for name in ("tokens", "parents", "rank", "depth"):
                assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
            for name in ("logq", "entropy"):
                assert torch.allclose(getattr(one, name), getattr(other, name), atol=1e-3, equal_nan=True), name
        self.commit(grown, seed)
        return sum(map(len, grown[0]))

    def commit(self, grown: list[list[DraftTree]], seed: int) -> None:
        """Accept a path of each tree."""
        chance = torch.Generator().manual_seed(seed)
        nodes = [int(torch.randint(len(tree), (1,), generator=chance)) for tree in grown[0]]
        paths = [torch.tensor(tree.path(node)) for tree, node in zip(grown[0], nodes, strict=True)]
        bonus = [int(torch.randint(1, 60, (1,), generator=chance)) for _ in paths]
        for trees, (target, drafter) in zip(grown, self.both, strict=True):
            if isinstance(target, PagedTarget):
                target.params = [SamplingParams()] * len(trees)
            scores = target.score(trees)
            target.commit(paths)
            drafter.commit(trees, paths, bonus, target.states(scores, paths))
        for text, tree, path, token in zip(self.live, grown[0], paths, bonus, strict=True):
            text += [*tree.tokens[path][1:].tolist(), token]


@pytest.mark.parametrize("samplings", [[{}] * 4, SAMPLINGS], ids=["greedy", "mixed"])
@pytest.mark.parametrize("kind", ["eagle3", "eagle3-windows", "eagle-pruned", "griffin", "lm"])
@pytest.mark.parametrize("rows", [1024, 40], ids=["one pass", "several passes"])
def test_trees_are_those_of_a_padded_cache(
    kind: str, samplings: list[dict[str, Any]], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In cycles with joins and leaves, with sequences that draft later than others or not at all."""
    monkeypatch.setattr(paged_drafter, "MAX_ROUND_ROWS", rows)
    pair = Pair("llama", kind, samplings)
    texts = [prompt(length, seed=length) for length in LENGTHS]
    pair.join(texts[:3], samplings[:3])
    assert pair.cycle([[0, 1, 2], [0, 1, 2], [0, 2]], 3) > 30
    pair.cycle([[0, 2], [0, 1], [1, 2]], 2, 1)
    pair.join(texts[3:], samplings[3:])
    pair.cycle([[1], [0, 1, 3], [0, 3]], 4, 2, entropy=True)
    pair.retain([0, 2, 3])
    for seed in range(20):  # tokens wait for the drafter
        pair.cycle([[2]] if seed % 3 else [], 2, seed)
    pair.cycle([[0, 1, 2]] * 4, 3, 3)


def test_sequences_without_a_feature_or_pages_are_not_drafted() -> None:
    pair = Pair("llama", "eagle3", [{}])
    pair.join([[5]], [{}])
    assert pair.cycle([[0]], 3) == 1  # a head needs the state of an earlier token
    assert pair.cycle([[0]], 3) == 4
    target, drafter = pair.mine
    pool = target.cache.pool
    taken = pool.take(pool.available)
    trees = drafter.begin([pair.live[0][-1]])
    for _ in range(80):
        trees = drafter.expand(trees, [Grow(torch.tensor([len(trees[0]) - 1]), 1)])
    assert 50 < len(trees[0]) < 66  # as many as a page has room for
    pool.release(taken)


def test_a_cycle_expands_a_limited_number_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of one pass are counted together; those without numbers keep their trees."""
    monkeypatch.setattr(paged_drafter, "EXPANDED", 0)
    monkeypatch.setattr(paged_drafter, "LEAST_EXPANDED", 20)
    pair = Pair("llama", "eagle3", [{}] * 4)
    pair.join([prompt(9, seed=seed) for seed in range(4)], [{}] * 4)
    _, drafter = pair.mine
    trees = drafter.begin([text[-1] for text in pair.live])
    trees = drafter.expand(trees, [Grow(torch.tensor([0]), 8)] * 4)
    trees = drafter.expand(trees, [Grow(torch.arange(1, 9), 2)] * 4)
    assert [*map(len, trees)] == [25, 25, 9, 9]  # 4 + 8 + 8 nodes


def test_states_of_sequences_that_do_not_draft_are_taken_in() -> None:
    pair = Pair("llama", "eagle3", [{}] * 2)
    pair.join([prompt(9, seed=seed) for seed in range(2)], [{}] * 2)
    for seed in range(40):
        pair.cycle([[0]], 2, seed)
    columns = pair.mine[1]._columns[1]
    assert len(columns.pending) <= MAX_PENDING + 4 and len(columns.features) <= MAX_PENDING + 1


def test_a_tree_may_need_more_pages_than_a_text_can_have() -> None:
    """Near the end of the context, with a policy that expands many nodes."""
    found = engine("llama", "eagle3", "optimal", graphs=True)
    text = prompt(235)
    asked: dict[str, Any] = {"max_new_tokens": 15, "eos": (), "logprobs": 1}
    alone = found.generate(text, **asked).token_ids
    handles = [found.submit(text, **asked) for _ in range(2)]
    assert [handle.result(60).token_ids for handle in handles] == [alone] * 2
    found.close()


def test_it_uses_the_weights_and_pages_of_rounds() -> None:
    found: Engine = engine("llama", "eagle3", "auto", graphs=True)
    paged = found._paged()
    assert paged is not None and paged.rounds is not None and paged.drafter is not None
    rounds: Any = paged.rounds.drafter
    mine: Any = paged.drafter.passes
    assert mine._network.kv is rounds.kv and mine._network.fused is rounds.network.fused
    assert mine._network.recycled is not rounds.network.recycled
