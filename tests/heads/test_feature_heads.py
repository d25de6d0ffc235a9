"""Feature heads as drafters: what is drafted from the cache is what the head says when nothing is cached."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from helpers.heads import check_children, started
from helpers.random_heads import KINDS, WINDOWED, random_head
from helpers.tiny import FAMILIES, VOCABULARY, prompt, tiny
from windfall import registry
from windfall.core.types import Grow, InputError
from windfall.drafters.feature_head import MAX_PENDING, FeatureHeadDrafter
from windfall.engine.engine import Engine
from windfall.model.target import Target


@pytest.mark.parametrize("kind", [*KINDS, *WINDOWED])
def test_nodes_of_any_depth_in_one_pass(kind: str) -> None:
    head, model, committed = random_head(kind), tiny(), prompt(6)
    drafter = started(head, Target(model, check=False), [committed])
    [tree] = drafter.begin([committed[-1]])
    for nodes in ([0], [2], [1], [3, 5], [8], [4, 6, 9]):  # siblings late, alone and together, depths mixed
        [tree] = drafter.expand([tree], [Grow(torch.tensor(nodes), 3)])
    assert int(tree.depth.max()) >= 3
    check_children(head, model, committed, tree)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "eagle3-deep"])
def test_true_features_replace_drafted_ones(kind: str) -> None:
    """Over several cycles, some without any drafting, and after more tokens than ride along."""
    head, model, committed = random_head(kind), tiny(), prompt(MAX_PENDING + 9)
    target = Target(model)
    drafter = started(head, target, [committed])
    for cycle, expansions in enumerate(([[0], [1, 2]], [], [], [[0]], [[0], [2], [5]])):
        trees = drafter.begin([committed[-1]])
        for nodes in expansions:
            trees = drafter.expand(trees, [Grow(torch.tensor(nodes), 3)])
        check_children(head, model, committed, trees[0])
        path = torch.tensor(trees[0].path(len(trees[0]) - 1))
        scores = target.score(trees)[0]
        target.commit([path])
        assert scores.hidden is not None
        drafter.commit(trees, [path], [cycle + 1], [scores.hidden[path]])
        committed = [*committed, *trees[0].tokens[path[1:]].tolist(), cycle + 1]


@pytest.mark.parametrize("kind", ["eagle3", "eagle3-windows"])
def test_a_batch_drafts_what_each_sequence_drafts_alone(kind: str) -> None:
    head, target = random_head(kind), Target(tiny())
    prompts = [prompt(5), prompt(MAX_PENDING + 20, seed=1), prompt(2, seed=2), prompt(1, seed=3)]
    plain = Engine(target, registry.drafter("ngram"), registry.policy("none"))
    engine = Engine(target, FeatureHeadDrafter(model=head), registry.policy("beam", depth=3, k=3, nodes=10))
    alone = [engine.generate(own, max_new_tokens=17) for own in prompts]
    together = engine.generate_batch(prompts, max_new_tokens=17)
    for one, many, own in zip(alone, together, prompts, strict=True):
        assert one.token_ids == many.token_ids == plain.generate(own, max_new_tokens=17).token_ids
        assert [len(step.tokens) for step in one.steps] == [len(step.tokens) for step in many.steps]


@cache
def shared_target() -> Target:
    return Target(tiny())


@cache
def plain_text(temperature: float) -> list[int]:
    engine = Engine(shared_target(), registry.drafter("ngram"), registry.policy("none"))
    return engine.generate(prompt(), max_new_tokens=10, temperature=temperature, seed=3).token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_gives_same_text_uncoupled(kind: str) -> None:
    """The engine's tests run all policies with coupled noise; here they run uncoupled with one kind."""
    drafter = FeatureHeadDrafter(model=random_head(kind))
    for temperature, coupled in ((0.0, True), (1.0, True), (1.0, False)):
        for policy in registry.policies() if kind == "eagle3" and not coupled else ("beam",):
            engine = Engine(shared_target(), drafter, registry.policy(policy), coupled)
            found = engine.generate(prompt(), max_new_tokens=10, temperature=temperature, seed=3)
            assert found.token_ids == plain_text(temperature), policy


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_read_hidden_states_of_every_family(family: str) -> None:
    target = Target(tiny(family), check=False)
    drafter = FeatureHeadDrafter(model=random_head(seed=2))
    engine = Engine(target, drafter, registry.policy("beam", depth=3, k=3, nodes=10))
    plain = Engine(target, registry.drafter("ngram"), registry.policy("none")).generate(prompt(), max_new_tokens=10)
    assert engine.generate(prompt(), max_new_tokens=10).token_ids == plain.token_ids


@pytest.mark.parametrize("name", ["head", "lm"])
def test_no_node_is_fed_beyond_the_last_position(name: str) -> None:
    """The newest nodes need not be the deepest."""
    committed = prompt(6)
    small = tiny("gpt2", max_position_embeddings=9)  # an lm has a position more: it starts with the first token
    head = random_head(positions=8)
    head.config.layer.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    made = {"head": head, "lm": small}[name]  # angles of other types do not change with the length
    drafter, target = registry.drafter(name, model=made), Target(tiny())
    drafter.attach(target)
    drafter.start([committed], target.prefill([committed], drafter.taps), [None])
    trees = drafter.begin([committed[-1]])
    for node in (0, 1, 3, 5, 2):  # depths 0, 1, 2, 3, and back to 1
        trees = drafter.expand(trees, [Grow(torch.tensor([node]), 2)])
    assert trees[0].depth[[7, -1]].tolist() == [4, 2]
    assert len(drafter.expand(trees, [Grow(torch.tensor([7]), 2)])[0]) == len(trees[0])


def test_a_head_of_another_target_is_refused() -> None:
    drafter = FeatureHeadDrafter(model=random_head())
    with pytest.raises(InputError, match="width 32"):
        drafter.attach(Target(tiny(hidden_size=64)))
    with pytest.raises(InputError, match="reads layer 3"):
        drafter.attach(Target(tiny(num_hidden_layers=2)))
    with pytest.raises(InputError, match="drafts 61 tokens"):
        drafter.attach(Target(tiny(vocab_size=50)))


def test_a_reduced_head_may_draft_from_the_whole_vocabulary() -> None:
    target, head = Target(tiny()), random_head("eagle3-pruned")
    texts, sizes = [], []
    for whole in (False, True):
        engine = Engine(target, FeatureHeadDrafter(head, whole=whole), registry.policy("beam"), True)
        texts.append(engine.generate(prompt(), max_new_tokens=30).token_ids)
        sizes.append(len(engine.drafter.head.vocabulary))
    assert texts[0] == texts[1] and sizes == [30, VOCABULARY]
    assert head.draft_tokens is not None, "the head that was given stays as it is"
    with pytest.raises(InputError, match="its own vocabulary"):
        FeatureHeadDrafter(random_head("eagle3-before-fc"), whole=True).attach(target)
