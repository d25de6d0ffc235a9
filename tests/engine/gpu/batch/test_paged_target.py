"""The target of the host loop on pages: scores, draws, commits and pages, against `Target` on a padded cache."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from helpers.gpu import engine
from helpers.tiny import prompt
from helpers.trees import random_tree
from windfall.core.tree import DraftTree
from windfall.core.types import InputError, SamplingParams
from windfall.engine.engine import Engine
from windfall.engine.gpu.batch import paged_target
from windfall.engine.gpu.batch.chunks import Chunk
from windfall.engine.gpu.batch.paged_target import PagedTarget

LENGTHS = (70, 9, 2, 63)
SIZES = (17, 5, 1, 9)


def made(family: str = "llama", kind: str = "itself", **options: Any) -> tuple[PagedTarget, Engine]:
    found = engine(family, kind, "svip", graphs=True, **options)
    paged = found._paged()
    assert paged is not None and paged.target is not None and paged.rounds is None
    return paged.target, found


def trees_after(texts: list[list[int]], sizes: tuple[int, ...], seed: int = 0) -> list[DraftTree]:
    """A random tree after each text, whose root is its last token."""
    trees = [random_tree(size, seed + number, 40) for number, size in enumerate(sizes)]
    for tree, text in zip(trees, texts, strict=True):
        tree.arrays.tokens[0] = text[-1]
    return trees


def random_path(tree: DraftTree, seed: int) -> torch.Tensor:
    """From the root to any node."""
    node = int(torch.randint(len(tree), (1,), generator=torch.Generator().manual_seed(seed)))
    return torch.tensor(tree.path(node))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-neox"])
@pytest.mark.parametrize("rows", [1024, 18], ids=["one pass", "several passes"])
def test_scores_are_those_of_a_padded_cache(family: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In cycles with joins and leaves; rows of trees cross the ends of pages."""
    target, found = made(family)
    monkeypatch.setattr(paged_target, "MAX_ROUND_ROWS", rows)
    texts = [prompt(length, seed=length) for length in LENGTHS]
    target.prefill(texts[:3])
    found.target.prefill(texts[:3])
    live = texts[:3]
    for cycle in range(4):
        if cycle == 1:
            live.append(texts[3])
            target.join(texts[3:])
            found.target.join(texts[3:])
        if cycle == 3:
            live = [live[0], live[2]]
            target.retain([0, 2])
            found.target.retain([0, 2])
        target.params = [SamplingParams()] * len(live)
        trees = trees_after(live, SIZES[: len(live)], seed=10 * cycle)
        mine, wanted = target.score(trees), found.target.score(trees)
        for one, other in zip(mine, wanted, strict=True):
            if rows == 1024:  # of several passes, only the logits that the host needs are kept
                assert torch.allclose(one.logits, other.logits, atol=1e-9)
            assert one.draws == other.logits.argmax(-1).tolist()
        paths = [random_path(tree, cycle) for tree in trees]
        target.commit(paths)
        found.target.commit(paths)
        for text, tree, path in zip(live, trees, paths, strict=True):
            text += [*tree.tokens[path][1:].tolist(), 7]
    target.prefill([])
    pool = target.cache.pool
    assert pool.available == pool.pages


def test_each_sequence_draws_with_its_own_sampling() -> None:
    target, found = made()
    texts = [prompt(9, seed=seed) for seed in range(4)]
    target.prefill(texts)
    target.params = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(),
        SamplingParams(temperature=0.7, seed=2, top_k=3, top_p=0.9),
        SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.2),
    ]
    trees = trees_after(texts, (4, 4, 4, 4))
    for text, tree, scores, params in zip(texts, trees, target.score(trees), target.params, strict=True):
        sequence = found._request(text, params).sequence
        draws = sequence.sampler.draws(tree, scores.logits, sequence.tokens)
        drawn = None if params.reads_prefix else [draws(node) for node in range(len(tree))]
        assert scores.draws == drawn


def test_states_are_those_of_a_padded_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    target, found = made(kind="eagle3")
    texts, taps = [prompt(length, seed=length) for length in (70, 1, 9)], found.drafter.taps
    for mine, wanted in zip(target.prefill(texts, taps) or (), found.target.prefill(texts, taps) or (), strict=True):
        assert mine.shape == wanted.shape and torch.allclose(mine, wanted)
    monkeypatch.setattr(paged_target, "MAX_ROUND_ROWS", 10)  # several passes
    target.params = [SamplingParams()] * 3
    trees = trees_after(texts, (9, 3, 4))
    mine, wanted = target.score(trees), found.target.score(trees)
    paths = [random_path(tree, 1) for tree in trees]
    target.commit(paths)
    found_, wanted_ = target.states(mine, paths), found.target.states(wanted, paths)
    assert found_ is not None and wanted_ is not None
    assert all(map(torch.allclose, found_, wanted_))


def test_usual_passes_are_captured_before_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes over rows of no text run like all others, and leave the pages of later texts alone."""
    target, found = made(kind="ngram")
    keys, run = set(), target.gpu_target.graph_cache.run
    monkeypatch.setattr(target.gpu_target.graph_cache, "run", lambda key, work: (keys.add(key), run(key, work)))
    found.prepare()
    captured = set(keys)
    assert len(captured) == 2 * 10  # sizes up to 256, chains and trees
    texts = [prompt(length, seed=length) for length in LENGTHS]
    target.prefill(texts)
    target.params = [SamplingParams(temperature=1.0, seed=1), *[SamplingParams()] * 3]
    trees = trees_after(texts, SIZES)
    keys.clear()
    found.target.prefill(texts)
    for one, other in zip(target.score(trees), found.target.score(trees), strict=True):
        assert torch.allclose(one.logits, other.logits, atol=1e-9)
    assert keys and keys <= captured


def test_prompts_that_begin_alike_share_pages() -> None:
    """Without a drafter that needs the target's states; pages of a sequence that left are found, too."""
    target, _ = made(kind="ngram")
    pool, text = target.cache.pool, prompt(200)
    target.prefill([text])
    held = pool.pages - pool.available
    target.join([[*text[:150], 3, 4], text])
    assert pool.pages - pool.available == held + 1 + 1  # two of the first's pages are shared, then three
    target.params = [SamplingParams()] * 3
    roots = [DraftTree.root(text[-1]), DraftTree.root(4), DraftTree.root(text[-1])]
    one, _, other = target.score(roots)
    assert torch.equal(one.logits, other.logits)
    target.retain([])
    assert pool.available == pool.pages and pool.free < pool.pages
    target.join([text])
    assert torch.equal(target.score(roots[:1])[0].logits, one.logits)


def test_states_of_known_pages_are_not_used() -> None:
    target, found = made(kind="eagle3")
    for _ in range(2):
        (states,) = target.prefill([prompt(200)], found.drafter.taps) or ()
        assert len(states) == 199
    target.retain([])
    assert target.cache.pool.free == target.cache.pool.pages


def test_known_pages_are_forgotten_when_weights_change() -> None:
    target, found = made()
    target.prefill([prompt(100)])
    with torch.no_grad():
        found.target.model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    target.prefill([prompt(100)])
    found.target.prefill([prompt(100)])
    target.params, roots = [SamplingParams()], [DraftTree.root(prompt(100)[-1])]
    assert torch.allclose(target.score(roots)[0].logits, found.target.score(roots)[0].logits, atol=1e-9)


def test_pages_with_keys_of_earlier_weights_are_not_remembered() -> None:
    """Of a sequence that runs while weights change, and leaves after another has joined."""
    target, found = made()
    target.prefill([prompt(100)])
    with torch.no_grad():
        found.target.model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    target.join([prompt(9)])
    target.retain([1])
    target.join([prompt(100)])
    found.target.prefill([prompt(9), prompt(100)])
    target.params, roots = [SamplingParams()] * 2, [DraftTree.root(prompt(n)[-1]) for n in (9, 100)]
    for mine, wanted in zip(target.score(roots), found.target.score(roots), strict=True):
        assert torch.allclose(mine.logits, wanted.logits, atol=1e-9)


def test_the_kv_cache_is_freed_with_its_runner() -> None:
    """At once, because the next one takes a share of the free memory: no cycle of references keeps it."""
    target, found = made()
    target.prefill([prompt(9)])
    target.params = [SamplingParams()]
    target.score([DraftTree.root(1)])
    kept = weakref.ref(target.cache)
    gc.collect()
    gc.disable()
    try:
        del target
        found._dispatcher.forget_runner()
        assert kept() is None
    finally:
        gc.enable()


def test_too_large_trees_and_too_few_pages() -> None:
    target, found = made(max_requests=2)
    target.prefill([prompt(9)])
    target.params = [SamplingParams()]
    with pytest.raises(InputError, match="320 rows at the most on a GPU, not 321"):
        target.score([random_tree(321, 0, 61)])
    small, _ = made(kind="ngram", kv_memory=str(4 * 64 * found.target.decoder.row_bytes))
    with pytest.raises(MemoryError, match="0 free pages, and 1 are needed"):
        small.prefill([prompt(130), prompt(9)])
    small.prefill([prompt(130)])
    assert small.cache.pool.available == 0


def test_pages_of_a_failed_join_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold no keys: the next sequence with the same beginning computes them."""
    target, found = made()
    pool, text, run = target.cache.pool, prompt(130), target._prefill
    target.prefill([prompt(70)])
    held = pool.available

    def fails(chunk: Chunk) -> None:
        raise RuntimeError("no more memory")

    monkeypatch.setattr(target, "_prefill", fails)
    with pytest.raises(RuntimeError, match="no more memory"):
        target.join([prompt(9), text])
    assert pool.available == held
    monkeypatch.setattr(target, "_prefill", run)
    target.prefill([text])
    found.target.prefill([text])
    target.params, roots = [SamplingParams()], [DraftTree.root(text[-1])]
    assert torch.allclose(target.score(roots)[0].logits, found.target.score(roots)[0].logits, atol=1e-9)


def test_passes_share_the_memory_of_their_logits() -> None:
    target, _ = made()
    texts = [prompt(9, seed=seed) for seed in range(2)]
    target.prefill(texts)
    for params in (SamplingParams(), SamplingParams(temperature=1.0, seed=1), SamplingParams(top_k=2, seed=1)):
        for sizes in ((5, 3), (1, 1), (20, 9)):
            target.params = [params] * 2
            target.score(trees_after(texts, sizes))
    assert [*target._logits] == [64]
    target.score(trees_after(texts, (40, 30)))
    assert {rows: len(logits) for rows, logits in target._logits.items()} == {64: 64, 256: 256}
