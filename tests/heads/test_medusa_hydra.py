"""Medusa and Hydra: what is drafted is what the heads say of the target's states, and files come back as written."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.random_heads import random_head
from helpers.random_parallel import KINDS, random_heads
from helpers.tiny import VOCABULARY, prompt, tiny
from windfall import registry
from windfall.core.errors import HeadWarning
from windfall.core.sampling import Dice
from windfall.core.tree import DraftTree
from windfall.core.types import Grow, InputError, SamplingParams
from windfall.costs.acceptance import Calibrator
from windfall.costs.curves import Costs
from windfall.drafters.base import Drafter
from windfall.drafters.hydra import MAX_CHUNK, HydraDrafter
from windfall.drafters.medusa import MedusaDrafter
from windfall.engine import loading, profiling
from windfall.engine.engine import Engine
from windfall.heads import formats
from windfall.heads.files import locate
from windfall.heads.formats.hydra import read_hydra, write_hydra
from windfall.heads.formats.medusa import read_medusa, write_medusa
from windfall.heads.hydra import Hydra, new_hydra
from windfall.heads.layers import Unrolled
from windfall.heads.medusa import Heads, Medusa, new_medusa
from windfall.model.target import Target

MODEL = tiny()


@cache
def target_model() -> Target:
    return Target(MODEL)


def drafter_of(heads: Heads) -> Drafter:
    return MedusaDrafter(model=heads) if isinstance(heads, Medusa) else HydraDrafter(model=heads)


@torch.no_grad()
def features_of(model: Any, tokens: list[int]) -> Tensor:
    """[n, H], what the vocabulary head reads"""
    states: Tensor = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
    return states


@torch.no_grad()
def wanted_logq(heads: Heads, model: Any, committed: list[int], path: list[int]) -> Tensor:
    """What the heads say after the root and these drafted tokens, all computed from the beginning."""
    features, place = features_of(model, committed[:-1]), len(path)
    if isinstance(heads, Medusa):
        return torch.log_softmax(heads.head_logits(place, heads.states(features[-1:])[place, 0]), -1)
    assert isinstance(heads, Hydra)
    memory, size = Unrolled(), len(features)
    memory.mask = torch.ones(1, size, size).tril().bool()
    if heads.prefix is not None:
        memory.mask = memory.mask.triu(1 - heads.config.layer.max_position_embeddings)  # no further back
    context = heads.contexts(features[None], torch.arange(size)[None], memory)[0, -1]
    state = heads.states(place, context, torch.tensor([committed[-1], *path]))
    return torch.log_softmax(heads.head_logits(place, state), -1)


def check_children(heads: Heads, model: Any, committed: list[int], tree: DraftTree) -> None:
    tree.check()
    for node in range(1, len(tree)):
        logq = wanted_logq(heads, model, committed, tree.tokens[tree.path(node)[1:-1]].tolist())
        names = torch.arange(len(logq)) if heads.draft_tokens is None else heads.draft_tokens
        place = int((names == tree.tokens[node]).nonzero())
        assert float(tree.logq[node]) == pytest.approx(float(logq[place]), rel=1e-4, abs=1e-4)
        assert int(tree.rank[node]) == int((logq > logq[place]).sum())


def started(heads: Heads, target: Target, prompts: list[list[int]]) -> Drafter:
    drafter = drafter_of(heads)
    drafter.attach(target)
    drafter.start(prompts, target.prefill(prompts, drafter.taps), [None] * len(prompts))
    return drafter


# ---- what is drafted


@pytest.mark.parametrize("kind", KINDS)
def test_nodes_of_any_depth_in_one_pass(kind: str) -> None:
    heads, committed = random_heads(kind), prompt(6)
    drafter = started(heads, target_model(), [committed])
    [tree] = drafter.begin([committed[-1]])
    for nodes in ([0], [2], [1], [3, 5], [8], [4, 6, 9]):  # siblings late, alone and together, depths mixed
        [tree] = drafter.expand([tree], [Grow(torch.tensor(nodes), 3)])
    assert int(tree.depth.max()) >= 3
    check_children(heads, MODEL, committed, tree)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra++"])
def test_drafts_are_right_after_cycles_with_and_without_drafting(kind: str) -> None:
    heads, prompts = random_heads(kind), [prompt(5), prompt(11, seed=1)]
    target = target_model()
    drafter = started(heads, target, prompts)
    for cycle, expansions in enumerate(([[0], [1, 2]], [], [[0]], [[0], [2], [5]])):
        trees = drafter.begin([committed[-1] for committed in prompts])
        for nodes in expansions:
            grow = Grow(torch.tensor(nodes), 3)
            trees = drafter.expand(trees, [grow, grow if cycle != 2 else None])
        for committed, tree in zip(prompts, trees, strict=True):
            check_children(heads, MODEL, committed, tree)
        paths = [torch.tensor(tree.path(len(tree) - 1)) for tree in trees]
        scores = target.score(trees)
        target.commit(paths)
        states = [s.hidden[path] for s, path in zip(scores, paths, strict=True) if s.hidden is not None]
        drafter.commit(trees, paths, [cycle + 1, cycle + 2], states)
        for committed, tree, path in zip(prompts, trees, paths, strict=True):
            committed += [*tree.tokens[path[1:]].tolist(), cycle + 1 if committed is prompts[0] else cycle + 2]


def test_a_medusa_cycle_runs_its_heads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, prompts = random_heads("medusa"), [prompt(5), prompt(11, seed=1)]
    drafter, calls = started(heads, target_model(), prompts), []
    real = heads.states
    monkeypatch.setattr(heads, "states", lambda features: calls.append(len(features)) or real(features))
    trees = drafter.begin([own[-1] for own in prompts])
    for nodes, k in (([0], 2), ([1, 2], 2), ([3, 6], 5)):  # more children than before need no new pass either
        trees = drafter.expand(trees, [Grow(torch.tensor(nodes), k)] * 2)
    assert calls == [2]
    for committed, tree in zip(prompts, trees, strict=True):
        assert len(tree) == 1 + 2 + 4 + 10
        check_children(heads, MODEL, committed, tree)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra++"])
def test_no_node_lies_deeper_than_there_are_heads(kind: str) -> None:
    heads = random_heads(kind, heads=3)
    engine = Engine(target_model(), drafter_of(heads), registry.policy("chain", depth=9))
    steps = engine.generate(prompt(), max_new_tokens=20).steps
    assert {int(step.drafted.depth.max()) for step in steps[:-3]} == {3}
    drafter = started(heads, engine.target, [prompt(1), prompt(4)])
    root = Grow(torch.tensor([0]), 2)
    assert [len(tree) for tree in drafter.expand(drafter.begin([1, 2]), [root, root])] == [1, 3]  # no state, no draft


def test_the_noise_of_a_depth_is_shown_to_all_its_nodes() -> None:
    heads, committed = random_heads("medusa"), prompt(6)
    target = target_model()
    drafter = started(heads, target, [committed])
    dice = Dice(SamplingParams(temperature=0.9, seed=5), committed)
    drafter.start([committed], target.prefill([committed], drafter.taps), [dice])
    trees = drafter.begin([committed[-1]])
    trees = drafter.expand(trees, [Grow(torch.tensor([0]), 3)])
    [tree] = drafter.expand(trees, [Grow(torch.tensor([1, 3]), 3, entropy=True)])
    for node, first in ((0, 1), (1, 4), (3, 7)):
        path = tree.tokens[tree.path(node)[1:]].tolist()
        logq = wanted_logq(heads, MODEL, committed, path)
        coupled = dice.couple(logq[None], torch.tensor([len(path)]), None)[0]
        assert tree.tokens[first : first + 3].tolist() == coupled.topk(3).indices.tolist()
        assert tree.logq[first : first + 3].tolist() == pytest.approx(coupled.topk(3).values.tolist(), abs=1e-4)
        entropy = float(torch.special.entr(logq.exp()).sum())
        assert float(tree.entropy[node]) == pytest.approx(entropy, abs=1e-3) or node == 0


def test_a_prefix_layer_catches_up_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windfall.drafters.hydra.MAX_CHUNK", 7)
    assert MAX_CHUNK > 7
    heads, prompts = random_heads("hydra++"), [prompt(30), prompt(4, seed=1)]
    drafter = started(heads, target_model(), prompts)
    root = Grow(torch.tensor([0]), 2)
    trees = drafter.expand(drafter.begin([own[-1] for own in prompts]), [root, root])
    for committed, tree in zip(prompts, trees, strict=True):
        check_children(heads, MODEL, committed, tree)


def test_a_prefix_layer_goes_on_past_its_positions() -> None:
    heads, committed = random_heads("hydra++", tiny(max_position_embeddings=12)), prompt(30)
    drafter = started(heads, target_model(), [committed])
    trees = drafter.expand(drafter.begin([committed[-1]]), [Grow(torch.tensor([0]), 3)])
    assert len(trees[0]) == 4
    check_children(heads, MODEL, committed, trees[0])
    engine = Engine(target_model(), HydraDrafter(model=heads), registry.policy("beam", depth=2))
    with pytest.warns(HeadWarning, match="made for 12 positions"):
        steps = engine.generate(prompt(6), max_new_tokens=20).steps
    assert len(steps[0].drafted) > 1 and len(steps[-2].drafted) > 1


@pytest.mark.parametrize("make", [new_medusa, new_hydra])
@pytest.mark.parametrize("shared", [True, False])
def test_a_new_head_repeats_the_targets_guess(make: Any, shared: bool) -> None:
    heads, committed = make(MODEL, shared_vocabulary=shared), prompt(6)
    started(heads, target_model(), [committed])
    with torch.no_grad():
        wanted = torch.log_softmax(MODEL(torch.tensor([committed[:-1]])).logits[0, -1], -1)
    for path in ([], [3], [3, 4, 5]):
        torch.testing.assert_close(wanted_logq(heads, MODEL, committed, path), wanted, rtol=1e-4, atol=1e-4)


def test_a_new_prefix_layer_adds_nothing() -> None:
    heads, features = new_hydra(MODEL, prefix=True), features_of(MODEL, prompt(6))
    memory = Unrolled()
    memory.mask = torch.ones(1, 6, 6).tril().bool()
    with torch.no_grad():
        seen = heads.contexts(features[None], torch.arange(6)[None], memory)[0]
    torch.testing.assert_close(seen, features, rtol=1e-3, atol=1e-3)


# ---- same seed, same text


@pytest.mark.parametrize("family", ["llama", "gpt-neox"])
def test_same_seed_gives_same_text(family: str) -> None:
    """The engine's tests run all policies; here a tree of fixed depth and one whose depth depends on the drafts."""
    target = Target(tiny(family), check=False)
    plain = Engine(target, registry.drafter("ngram"), registry.policy("none"))
    heads = [random_heads(kind, target.model) for kind in ("medusa", "hydra", "hydra++")]
    for temperature in (0.0, 1.0):
        sampling = {"max_new_tokens": 12, "temperature": temperature, "seed": 3}
        wanted = plain.generate(prompt(), **sampling).token_ids
        for own in heads:
            for policy in ("beam", "svip"):
                engine = Engine(target, drafter_of(own), registry.policy(policy))
                assert engine.generate(prompt(), **sampling).token_ids == wanted, (own.config.kind, policy)


@pytest.mark.parametrize("kind", ["medusa-pruned", "hydra-shared", "hydra++"])
def test_a_batch_drafts_what_each_sequence_drafts_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Calibrator, "_fit_kappa", lambda self, *given: None)  # what one text teaches changes the next
    target, prompts = target_model(), [prompt(5), prompt(20, seed=1), prompt(2, seed=2), prompt(1, seed=3)]
    engine = Engine(target, drafter_of(random_heads(kind)), registry.policy("beam", depth=3, k=3, nodes=10))
    plain = Engine(target, registry.drafter("ngram"), registry.policy("none"))
    for sampling in ({}, {"temperature": 1.0, "seed": 2}):
        alone = [engine.generate(own, max_new_tokens=8, **sampling) for own in prompts]
        together = engine.generate_batch(prompts, max_new_tokens=8, **sampling)
        for one, many, own in zip(alone, together, prompts, strict=True):
            assert one.token_ids == many.token_ids == plain.generate(own, max_new_tokens=8, **sampling).token_ids
            assert [len(step.tokens) for step in one.steps] == [len(step.tokens) for step in many.steps]


# ---- trees


def test_medusas_own_tree() -> None:
    engine = Engine(target_model(), drafter_of(random_heads("medusa")), registry.preset("medusa"))
    steps = engine.generate(prompt(), max_new_tokens=30).steps
    assert steps[0].tree.depth.bincount().tolist() == [1, 10, 28, 23, 2]
    assert steps[0].draft_passes == 4


def test_gt_static_keeps_the_nodes_above_its_threshold() -> None:
    table = [[0.6, 0.2, 0.1], [0.4, 0.2], [0.3]]
    policy = registry.policy("gt-static", acceptance=json.dumps(table), c=0.05)
    engine = Engine(target_model(), drafter_of(random_heads("medusa")), policy)
    tree = engine.generate(prompt(), max_new_tokens=16).steps[0].tree
    paths = {tuple(tree.rank[tree.path(node)[1:]].tolist()) for node in range(1, len(tree))}
    wanted = {(i,): own for i, own in enumerate(table[0])}
    wanted |= {(*path, j): value * own for path, value in wanted.items() for j, own in enumerate(table[1])}
    deep = {(*path, 0): value * 0.3 for path, value in wanted.items() if len(path) == 2}
    assert paths == {path for path, value in (wanted | deep).items() if value > 0.05}


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_gt_goes_on_while_the_best_path_is_worth_a_pass(kind: str) -> None:
    engine = Engine(target_model(), drafter_of(random_heads(kind)), registry.policy("gt", c=0.1, k=4, nodes=9))
    for step in engine.generate(prompt(), max_new_tokens=30).steps[:-6]:
        best = [
            float(step.drafted.score[step.drafted.depth == d].exp().max()) for d in range(5) if d in step.drafted.depth
        ]
        deepest = max(depth for depth, value in enumerate(best) if value > 0.1)
        assert step.draft_passes == min(deepest + 1, 4) + (deepest == 4)  # a look past the last head finds nothing
        assert int(step.tree.depth.max()) <= deepest and len(step.tree) <= 1 + min(4 * deepest, 9)


def test_gt_on_medusa_plus_keeps_the_nodes_above_its_threshold() -> None:
    policy = registry.policy("gt", c=0.03, k=6, nodes=20, each=True)
    engine = Engine(target_model(), drafter_of(random_heads("medusa")), policy)
    for step in engine.generate(prompt(), max_new_tokens=20).steps[:-6]:
        worth = step.drafted.score.exp() > 0.03
        assert bool((step.tree.score.exp() > 0.03).all())
        assert len(step.tree) == min(int(worth.sum()), 21)


# ---- costs


@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra++"])
def test_their_passes_can_be_measured(kind: str) -> None:
    engine = Engine(target_model(), drafter_of(random_heads(kind)), registry.policy("auto"))
    profile = profiling.measure(engine, rows=(1, 2, 4), lengths=(16, 64), widths=(1, 2, 4), seconds=60.0)
    assert profile.costs.drafts.sizes == (1, 2, 4) and all(s > 0 for s in profile.costs.drafts.seconds)
    assert profile.costs.opening >= 0
    assert Costs.of_dict(profile.costs.as_dict()) == profile.costs


def test_the_first_pass_of_medusa_has_its_own_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    real, now = MedusaDrafter._guess, [0.0]

    def tick(seconds: float) -> float:
        now[0] += seconds
        return now[0]

    monkeypatch.setattr(profiling.time, "perf_counter", lambda: tick(0.001))
    monkeypatch.setattr(MedusaDrafter, "_guess", lambda self, places: (places and tick(1.0), real(self, places)))
    engine = Engine(target_model(), drafter_of(random_heads("medusa")), registry.policy("auto"))
    costs = profiling.measure(engine, rows=(1, 2), lengths=(16,), widths=(1, 2, 4), seconds=60.0).costs
    assert costs.opening > 0.9 > costs.drafts.seconds[-1]


@pytest.mark.parametrize(("opening", "least", "most"), [(0.0, 20, 40), (30.0, 0, 3)])
def test_auto_counts_the_cost_of_the_first_pass(opening: float, least: int, most: int) -> None:
    engine = Engine(target_model(), drafter_of(random_heads("medusa")), registry.policy("auto"))
    engine.costs = replace(Costs.simple(0.001, (1, 64), (1.0, 1.5)), opening=opening)
    steps = engine.generate(prompt(), max_new_tokens=40).steps
    assert least <= sum(step.draft_passes > 0 for step in steps) <= most


# ---- files


def parameters(heads: Heads) -> dict[str, Tensor]:
    return dict(heads.state_dict())


def same(one: Heads, other: Heads) -> bool:
    ours, theirs = parameters(one), parameters(other)
    tokens = [heads.draft_tokens if heads.draft_tokens is not None else torch.zeros(0) for heads in (one, other)]
    equal = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    shape = [
        (h.config.heads, h.config.blocks, h.config.flags, h.config.vocab_size, h.config.taps) for h in (one, other)
    ]
    return equal and torch.equal(*tokens) and shape[0] == shape[1]


@pytest.mark.parametrize("layout", ["release", "vllm"])
@pytest.mark.parametrize("kind", ["medusa", "medusa-shared", "medusa-pruned"])
def test_medusa_heads_come_back_as_written(kind: str, layout: str, tmp_path: Path) -> None:
    heads = random_heads(kind)
    assert isinstance(heads, Medusa)
    drafter_of(heads).attach(target_model())
    write_medusa(heads, tmp_path, "some/model", layout)
    back = read_medusa(tmp_path)
    if (kind, layout) == ("medusa-shared", "vllm"):  # vLLM needs a vocabulary, and gets the target's
        assert back.vocabularies is not None
        assert torch.equal(back.vocabularies[2], MODEL.get_output_embeddings().weight)
    else:
        assert same(heads, back)


def test_the_releases_names(tmp_path: Path) -> None:
    heads = random_heads("medusa", blocks=2)
    assert isinstance(heads, Medusa)
    write_medusa(heads, tmp_path)
    names = load_file(tmp_path / "medusa_lm_head.safetensors")
    assert {"0.0.linear.weight", "0.0.linear.bias", "3.1.linear.bias", "3.2.weight"} < names.keys()
    assert names["1.2.weight"].shape == (VOCABULARY, 32)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (4, 2)
    write_medusa(heads, tmp_path / "vllm", layout="vllm")
    assert {"blocks.3.layers.1.bias", "lm_heads.2.weight"} < load_file(tmp_path / "vllm" / "model.safetensors").keys()


def test_a_release_with_a_minimal_configuration_is_read(tmp_path: Path) -> None:
    """A pickled file, and a configuration that names fewer heads than there are and nothing else."""
    heads = random_heads("medusa")
    assert isinstance(heads, Medusa)
    write_medusa(heads, tmp_path)
    torch.save(load_file(tmp_path / "medusa_lm_head.safetensors"), tmp_path / "medusa_lm_head.pt")
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2, "medusa_num_layers": 1}')
    assert same(heads, read_medusa(tmp_path))


@pytest.mark.parametrize("kind", ["hydra", "hydra-shared", "hydra++"])
def test_hydra_heads_come_back_as_written(kind: str, tmp_path: Path) -> None:
    heads = random_heads(kind)
    assert isinstance(heads, Hydra)
    write_hydra(heads, tmp_path)
    back = read_hydra(tmp_path)
    assert same(heads, back)
    engines = [Engine(target_model(), drafter_of(own), registry.policy("beam", depth=4)) for own in (heads, back)]
    one, other = (engine.generate(prompt(), max_new_tokens=10).steps for engine in engines)
    assert [len(step.tokens) for step in one] == [len(step.tokens) for step in other]


def test_hydras_release(tmp_path: Path) -> None:
    """Its embedding comes along, its prefix layer is described nowhere, and dropout has places of its own."""
    heads = random_heads("hydra++")
    assert isinstance(heads, Hydra)
    write_hydra(heads, tmp_path)
    tensors = load_file(tmp_path / "hydra_lm_head.safetensors")
    assert {
        "hydra_mlp.0.1.linear.weight",
        "hydra_mlp.3.7.linear.bias",
        "hydra_mlp.2.1.res_connection.bias",
    } < tensors.keys()
    assert {"hydra_lm_head.0.1.weight", "prefix_embeding_layer.layers.0.self_attn.q_proj.weight"} < tensors.keys()
    assert tensors["hydra_mlp.2.1.linear.weight"].shape == (32, 4 * 32)
    tensors |= {"input_embed_fn.weight": torch.zeros(1), "prefix_embeding_layer.embed_tokens.weight": torch.zeros(1)}
    (tmp_path / "hydra_lm_head.safetensors").unlink()
    torch.save(tensors, tmp_path / "hydra_lm_head.pt")
    config = json.loads((tmp_path / "config.json").read_text())
    few = ("hydra_num_heads", "hydra_num_layers", "hydra_head_arch", "grounded_heads", "hidden_state_offset")
    (tmp_path / "config.json").write_text(json.dumps({name: config[name] for name in few}))
    assert same(heads, read_hydra(tmp_path, MODEL.config))
    with pytest.raises(InputError, match="prefix layer like its target's"):
        read_hydra(tmp_path)


def spoil(folder: Path, file: str, **tensors: Tensor | None) -> None:
    known = load_file(folder / file) | tensors
    save_file({name: tensor for name, tensor in known.items() if tensor is not None}, folder / file)


def test_wrong_files_are_named(tmp_path: Path) -> None:
    medusa, hydra, file = tmp_path / "medusa", tmp_path / "hydra", "medusa_lm_head.safetensors"

    def fresh() -> None:
        shutil.rmtree(medusa, ignore_errors=True)
        write_medusa(random_heads("medusa"), medusa)  # type: ignore[arg-type]

    for change, words in (
        ({"1.0.linear.bias": None}, r"lacks 1 of its weights: blocks.1.0.bias"),
        ({"extra": torch.zeros(1)}, "no use for: extra"),
        ({"3.1.weight": torch.zeros(3, 32)}, r"another shape: vocabulary.3.weight is \(3, 32\), not \(61, 32\)"),
        ({f"{i}.{part}": None for i in (2, 3) for part in ("0.linear.weight", "0.linear.bias", "1.weight")}, "hold 2"),
        ({"token_map": torch.tensor([1, 1])}, "different tokens below 61"),
    ):
        fresh()
        spoil(medusa, file, **change)
        with pytest.raises(InputError, match=words):
            read_medusa(medusa)
    (medusa / file).write_bytes(b"nothing")
    with pytest.raises(InputError, match="damaged"):
        read_medusa(medusa)
    (medusa / file).unlink()
    with pytest.raises(InputError, match="has no weights"):
        read_medusa(medusa)
    write_hydra(random_heads("hydra"), hydra)  # type: ignore[arg-type]
    config = json.loads((hydra / "config.json").read_text())
    for change, words in (
        ({"hydra_head_arch": "cross-attn"}, "kind 'cross-attn'"),
        ({"grounded_heads": False}, "drafted"),
    ):
        (hydra / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(InputError, match=words):
            read_hydra(hydra)
    with pytest.raises(InputError, match="no layout 'x'"):
        write_medusa(random_heads("medusa"), medusa, layout="x")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"no config\.json"):
        read_hydra(tmp_path)


def test_shared_heads_without_a_vocabulary_size(tmp_path: Path) -> None:
    heads = random_heads("medusa-shared")
    assert isinstance(heads, Medusa)
    write_medusa(heads, tmp_path)
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 4}')
    with pytest.raises(InputError, match="how many tokens"):
        read_medusa(tmp_path)
    assert same(heads, read_medusa(tmp_path, MODEL.config))


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_heads_downloaded_before_are_found(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = random_heads(kind)
    write = write_medusa if isinstance(heads, Medusa) else write_hydra
    write(heads, tmp_path)  # type: ignore[arg-type]
    monkeypatch.setattr("windfall.checkpoints.hub.try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    assert locate("somebody/heads") == tmp_path


def test_a_wrong_config_is_refused_in_one_line(tmp_path: Path) -> None:
    write_medusa(random_heads("medusa"), tmp_path)  # type: ignore[arg-type]
    (tmp_path / "config.json").write_text('{"medusa_num_heads": "x"}')
    with pytest.raises(InputError, match=f"cannot read '{tmp_path}'"):
        formats.read(tmp_path)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_what_a_drafter_refuses(kind: str) -> None:
    target = target_model()
    with pytest.raises(InputError, match=f"{kind} drafter needs heads"):
        registry.drafter(kind).attach(target)
    with pytest.raises(InputError, match="eagle3 head"):
        registry.drafter(kind, model=random_head()).attach(target)
    with pytest.raises(InputError, match="width 32"):
        registry.drafter(kind, model=random_heads(kind)).attach(Target(tiny(hidden_size=64)))


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_loaded_by_folder(kind: str, tmp_path: Path) -> None:
    heads = random_heads(kind)
    write = write_medusa if isinstance(heads, Medusa) else write_hydra
    write(heads, tmp_path)  # type: ignore[arg-type]
    engine = loading.load(MODEL, registry.drafter(kind, model=str(tmp_path)), "beam")
    assert same(heads, engine.drafter._heads)  # type: ignore[attr-defined]
