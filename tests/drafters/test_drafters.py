"""Language models as drafters: what they draft is what the model says, whatever order the nodes are asked in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.architectures import build
from helpers.tiny import VOCABULARY, prompt, tiny
from windfall import registry
from windfall.core.tree import DraftTree
from windfall.core.types import Grow, InputError
from windfall.drafters.base import add_children
from windfall.drafters.lm import MAX_PENDING, LMDrafter
from windfall.drafters.self_skip import SelfDrafter, parse_layers, without_layers
from windfall.engine.engine import Engine
from windfall.model.target import Target


def attached(drafter: LMDrafter, target: Target, prompts: list[list[int]]) -> LMDrafter:
    drafter.attach(target)
    drafter.start(prompts, None, [None] * len(prompts))
    return drafter


def wanted_logq(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1].float(), -1)


def check_children(model: Any, committed: list[int], tree: DraftTree) -> None:
    """Every drafted node carries the log-probability that the model gives it after its path."""
    for node in range(1, len(tree)):
        path = tree.tokens[tree.path(node)[1:-1]].tolist()
        logq = wanted_logq(model, committed + path)
        assert float(tree.logq[node]) == pytest.approx(float(logq[tree.tokens[node]]), abs=1e-4)
        better = int((logq > logq[tree.tokens[node]]).sum())
        assert int(tree.rank[node]) == better


def test_nodes_of_any_depth_in_one_pass() -> None:
    model, committed = tiny(seed=1), prompt(6)
    drafter = attached(LMDrafter(model=model), Target(tiny()), [committed])
    [tree] = drafter.begin([committed[-1]])
    for nodes in ([0], [2], [1], [3, 5], [8], [4, 6, 9]):  # siblings late, alone and together, depths mixed
        [tree] = drafter.expand([tree], [Grow(torch.tensor(nodes), 3)])
    tree.check()
    assert int(tree.depth.max()) >= 3
    check_children(model, committed, tree)


def test_committing_keeps_the_cache_right() -> None:
    """Accept nodes that were expanded and nodes that were not, over several cycles, some without any drafting."""
    model, committed = tiny(seed=1), prompt(6)
    drafter = attached(LMDrafter(model=model), Target(tiny()), [committed])
    for cycle, expansions in enumerate(([[0], [1, 2]], [], [[0]], [[0], [2], [5]])):
        trees = drafter.begin([committed[-1]])
        for nodes in expansions:
            trees = drafter.expand(trees, [Grow(torch.tensor(nodes), 3)])
        check_children(model, committed, trees[0])
        path = torch.tensor(trees[0].path(len(trees[0]) - 1))
        drafter.commit(trees, [path], [10 + cycle], None)
        committed = [*committed, *trees[0].tokens[path[1:]].tolist(), 10 + cycle]
        assert drafter.decoder.lengths[0] + len(drafter._pending[0]) == len(committed)


def test_many_pending_tokens_are_processed_in_several_passes() -> None:
    model, committed = tiny(seed=1), prompt(3 * MAX_PENDING)
    other = prompt(4, seed=2)
    drafter = attached(LMDrafter(model=model), Target(tiny()), [committed, other])
    trees = drafter.begin([committed[-1], other[-1]])
    grow = Grow(torch.tensor([0]), 2)
    trees = drafter.expand(trees, [grow, grow])
    check_children(model, committed, trees[0])
    check_children(model, other, trees[1])


def test_one_of_two_sequences_stops_growing() -> None:
    model, prompts = tiny(seed=1), [prompt(5, 1), prompt(9, 2)]
    drafter = attached(LMDrafter(model=model), Target(tiny()), prompts)
    trees = drafter.begin([p[-1] for p in prompts])
    root = Grow(torch.tensor([0]), 2)
    trees = drafter.expand(trees, [root, root])
    trees = drafter.expand(trees, [None, Grow(torch.tensor([1, 2]), 2)])
    trees = drafter.expand(trees, [None, Grow(torch.tensor([5]), 2)])
    assert [len(tree) for tree in trees] == [3, 9]
    for committed, tree in zip(prompts, trees, strict=True):
        check_children(model, committed, tree)


def test_nothing_is_drafted_past_the_drafters_own_context() -> None:
    short, committed = tiny("gpt2", seed=1, max_position_embeddings=24), prompt(20)
    target = Target(tiny())
    drafter = attached(LMDrafter(model=short), target, [committed])
    [tree] = drafter.begin([committed[-1]])
    for _ in range(8):
        [tree] = drafter.expand([tree], [Grow(torch.tensor([len(tree) - 1]), 1)])
    assert int(tree.depth.max()) == 5  # the last row stands at the last position, 23
    engine = Engine(target, LMDrafter(model=short), registry.policy("beam"))
    plain = Engine(target, LMDrafter(model=short), registry.policy("none"))
    got, wanted = (e.generate(committed, max_new_tokens=30).token_ids for e in (engine, plain))
    assert got == wanted


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(InputError, match=f"vocabulary of 40 tokens, the target one of {VOCABULARY}"):
        LMDrafter(model=tiny(vocab_size=40)).attach(Target(tiny()))


def test_padding_of_the_drafters_logits_is_never_drafted() -> None:
    """Equal tokenizers, but the drafter's logits are padded: the extra ids do not exist for the target."""

    class Tokenizer:
        eos_token_id = None

        def get_vocab(self) -> dict[str, int]:
            return {str(i): i for i in range(VOCABULARY)}

    target = Target(tiny(), Tokenizer())
    wide = tiny(seed=1, vocab_size=VOCABULARY + 40)
    drafter = attached(LMDrafter(model=(wide, Tokenizer())), target, [prompt()])
    trees = drafter.expand(drafter.begin([prompt()[-1]]), [Grow(torch.tensor([0]), 1000)])
    assert len(trees[0]) == 1 + VOCABULARY


def test_self_drafter_shares_the_weights() -> None:
    model = tiny("gemma3", num_hidden_layers=4)
    view = without_layers(model, [1, 2])
    ours = {parameter.data_ptr() for parameter in view.parameters()}
    assert ours < {parameter.data_ptr() for parameter in model.parameters()}
    assert len(model.model.layers) == 4
    assert len(view.model.layers) == 2
    assert model.config.layer_types is not view.model.config.layer_types


def test_self_drafter_refuses_layers_that_are_known_by_number() -> None:
    with pytest.raises(InputError, match="finds its cross-attention layers by number"):
        SelfDrafter().attach(Target(build("mllama")))


def test_self_drafter_without_skipping_is_the_target() -> None:
    target, committed = Target(tiny()), prompt(5)
    drafter = attached(SelfDrafter(skip=""), target, [committed])
    trees = drafter.expand(drafter.begin([committed[-1]]), [Grow(torch.tensor([0]), 3)])
    check_children(target.model, committed, trees[0])


def test_layers_are_parsed() -> None:
    assert parse_layers("middle", 30) == [15, 16, 17, 18, 19]
    assert parse_layers("3,5,10-12", 30) == [3, 5, 10, 11, 12]
    for wrong in ("x", "30", "0-29", "5-"):
        with pytest.raises(InputError, match="skip"):
            parse_layers(wrong, 30)


@pytest.mark.parametrize("name", registry.drafters())
def test_every_drafter_explains_itself(name: str) -> None:
    assert registry.drafter_class(name).__doc__


def test_a_probability_that_rounding_raised_above_1_counts_as_1() -> None:
    tree = add_children(DraftTree.root(3), Grow(torch.tensor([0]), k=2), torch.tensor([[1e-7, -2.0]]), None)
    assert tree.logq.tolist() == [0.0, 0.0, -2.0]
