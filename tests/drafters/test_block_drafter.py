"""Block heads as drafters: what is drafted from the cache is what the definition says."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from helpers.blocks import check_children, wanted
from helpers.cpu_kernel import use_compiled
from helpers.random_heads import BLOCKS, random_block, random_head
from helpers.tiny import VOCABULARY, prompt, tiny
from windfall import registry
from windfall.core.errors import HeadWarning
from windfall.core.sampling import Dice
from windfall.core.types import Grow, InputError, SamplingParams
from windfall.costs.curves import Costs, Curve
from windfall.drafters import block as module
from windfall.drafters.block import COUPLED_FACTOR, BlockDrafter
from windfall.engine import profiling
from windfall.engine.engine import Engine
from windfall.heads import packed
from windfall.heads.block import BlockHead
from windfall.kernels.packed import PackedLinear
from windfall.model.target import Target

MODEL = tiny()
ROOT = Grow(torch.tensor([0]), 3)


@cache
def target() -> Target:
    return Target(MODEL)


def started(head: BlockHead, prompts: list[list[int]], dice: Dice | None = None, **options: object) -> BlockDrafter:
    drafter = BlockDrafter(model=head, **options)
    drafter.attach(target())
    drafter.start(prompts, target().prefill(prompts, drafter.taps), [dice] * len(prompts))
    return drafter


# ---- what is drafted


@pytest.mark.parametrize("name", BLOCKS)
def test_nodes_of_any_depth_in_one_pass(name: str) -> None:
    head, committed = random_block(name), prompt(6)
    drafter = started(head, [committed])
    [tree] = drafter.begin([committed[-1]])
    for nodes in ([0], [2], [1], [3, 5], [8], [4, 6, 9]):  # siblings late, alone and together, depths mixed
        [tree] = drafter.expand([tree], [Grow(torch.tensor(nodes), 3)])
    assert int(tree.depth.max()) >= 3
    check_children(head, MODEL, committed, tree)


@pytest.mark.parametrize("name", ["block", "block-dflash", "block-rnn", "block-path", "block-windows"])
def test_drafts_are_right_after_cycles_with_and_without_drafting(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CHUNK", 4)
    head, prompts = random_block(name), [prompt(5), prompt(11, seed=1)]
    drafter = started(head, prompts)
    for cycle, expansions in enumerate(([[0], [1, 2]], [], [[0]], [[0], [2], [5]])):
        trees = drafter.begin([committed[-1] for committed in prompts])
        for nodes in expansions:
            grow = Grow(torch.tensor(nodes), 3)
            trees = drafter.expand(trees, [grow, grow if cycle != 2 else None])
        for committed, tree in zip(prompts, trees, strict=True):
            check_children(head, MODEL, committed, tree)
        paths = [torch.tensor(tree.path(len(tree) - 1)) for tree in trees]
        scores = target().score(trees)
        target().commit(paths)
        states = [s.hidden[path] for s, path in zip(scores, paths, strict=True) if s.hidden is not None]
        drafter.commit(trees, paths, [cycle + 1, cycle + 2], states)
        for committed, tree, path in zip(prompts, trees, paths, strict=True):
            committed += [*tree.tokens[path[1:]].tolist(), cycle + 1 if committed is prompts[0] else cycle + 2]


@pytest.mark.parametrize("name", ["block", "block-pruned", "block-plain", "block-rnn", "block-path"])
def test_coupled_levels_and_entropies(name: str) -> None:
    head, committed = random_block(name), prompt(6)
    dice = Dice(SamplingParams(temperature=0.9, seed=5), committed)
    dice.kappa = 1.3
    drafter = started(head, [committed], dice)
    trees = drafter.begin([committed[-1]])
    trees = drafter.expand(trees, [ROOT])
    [tree] = drafter.expand(trees, [Grow(torch.tensor([1, 3]), 4, entropy=True)])
    check_children(head, MODEL, committed, tree, COUPLED_FACTOR * head.config.candidates, dice)
    for node in (1, 3):
        path = tree.tokens[tree.path(node)[1:]].tolist()
        logq, _ = wanted(head, MODEL, committed, path, COUPLED_FACTOR * head.config.candidates, None)
        assert float(tree.entropy[node]) == pytest.approx(float(torch.special.entr(logq.exp()).sum()), abs=1e-3)
    assert tree.entropy[0].isnan()


def test_a_filter_excludes_tokens_from_coupled_drafts() -> None:
    head, committed = random_block(), prompt(6)
    dice = Dice(SamplingParams(temperature=1.0, seed=5, top_k=2), committed)
    drafter = started(head, [committed], dice)
    [tree] = drafter.expand(drafter.begin([committed[-1]]), [ROOT])
    assert len(tree) == 3


def test_a_cycle_runs_the_network_once(monkeypatch: pytest.MonkeyPatch) -> None:
    head, prompts = random_block(), [prompt(5), prompt(11, seed=1)]
    drafter, calls = started(head, prompts), []
    real = drafter.head.rows
    monkeypatch.setattr(drafter.head, "rows", lambda anchors, size: calls.append(len(anchors)) or real(anchors, size))
    trees = drafter.begin([own[-1] for own in prompts])
    for nodes, k in (([0], 2), ([1, 2], 2), ([3, 6], 5)):
        trees = drafter.expand(trees, [Grow(torch.tensor(nodes), k)] * 2)
    assert calls == [2]
    assert [len(tree) for tree in trees] == [1 + 2 + 4 + 10] * 2


@pytest.mark.parametrize("name", ["block", "block-dflash"])
def test_no_node_lies_deeper_than_the_block_predicts(name: str) -> None:
    head = random_block(name)
    engine = Engine(target(), BlockDrafter(model=head), registry.policy("chain", depth=9))
    steps = engine.generate(prompt(), max_new_tokens=20).steps
    assert {int(step.drafted.depth.max()) for step in steps[:-4]} == {head.config.depth}


def test_a_node_has_as_many_children_as_there_are_candidates() -> None:
    committed, many = prompt(6), Grow(torch.tensor([0]), 1000)
    for options, count in (({}, 6), ({"candidates": 9}, 9), ({"candidates": 1000}, VOCABULARY)):
        drafter = started(random_block(), [committed], **options)
        assert len(drafter.expand(drafter.begin([committed[-1]]), [many])[0]) == 1 + count


def test_a_block_after_a_single_token() -> None:
    committed = prompt(1)
    drafter = started(random_block(), [committed])
    [tree] = drafter.expand(drafter.begin(committed), [ROOT])
    assert len(tree) == 4


# ---- long texts


def test_a_window_limits_what_the_head_sees() -> None:
    committed = prompt(30)
    narrow = random_block(windows=(7, 7))
    drafter = started(random_block(), [committed], window=7)
    [tree] = drafter.expand(drafter.begin([committed[-1]]), [ROOT])
    fitted = started(narrow, [committed]).head
    check_children(fitted, MODEL, committed, tree)


def test_the_head_goes_on_past_its_positions() -> None:
    engine = Engine(target(), BlockDrafter(model=random_block(positions=12)), registry.policy("beam", depth=2))
    with pytest.warns(HeadWarning, match="made for 12 positions"):
        steps = engine.generate(prompt(6), max_new_tokens=20).steps
    assert len(steps[-2].drafted) > 1


def test_nothing_is_drafted_where_angles_would_change() -> None:
    head = random_block(positions=12)
    head.config.layer.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    for length, size in ((9, 4), (10, 1)):  # the root is the last token: a block of 4 fits after 8 positions
        committed = prompt(length)
        drafter = started(head, [committed])
        assert len(drafter.expand(drafter.begin([committed[-1]]), [ROOT])[0]) == size


# ---- vocabularies


def test_a_reduced_head_may_draft_from_the_whole_vocabulary() -> None:
    head, committed = random_block("block-pruned"), prompt(6)
    drafter = started(head, [committed], whole=True)
    [tree] = drafter.expand(drafter.begin([committed[-1]]), [ROOT])
    assert len(drafter.head.vocabulary) == VOCABULARY and len(head.vocabulary) == 30
    check_children(drafter.head, MODEL, committed, tree)
    [tree] = started(head, [committed]).expand(drafter.begin([committed[-1]]), [ROOT])
    check_children(head, MODEL, committed, tree)  # the head that was given stays as it is
    for name in ("block-markov", "block-gated"):
        with pytest.raises(InputError, match="its own vocabulary"):
            BlockDrafter(random_block(name), whole=True).attach(target())


def test_int8_weights_change_little(monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiled()
    monkeypatch.setattr(packed, "MIN_NUMBERS", 0)
    committed, trees = prompt(6), []
    for weights in ("full", "int8"):
        drafter = started(random_block(), [committed], weights=weights)
        assert any(isinstance(module, PackedLinear) for module in drafter.head.modules()) == (weights == "int8")
        trees += drafter.expand(drafter.begin([committed[-1]]), [ROOT])
    assert trees[1].logq.tolist() == pytest.approx(trees[0].logq.tolist(), abs=0.3)


def test_other_heads_are_refused() -> None:
    with pytest.raises(InputError, match="block drafter needs heads"):
        BlockDrafter().attach(target())
    with pytest.raises(InputError, match="a eagle3 head, which the drafter head takes, not block"):
        BlockDrafter(random_head()).attach(target())
    with pytest.raises(InputError, match="the mask token 70; the embedding of LlamaForCausalLM has 61 rows"):
        BlockDrafter(random_block(mask_token=70)).attach(target())
    with pytest.raises(InputError, match="a block head, which the drafter block takes, not head"):
        registry.drafter("head", model=random_block()).attach(target())


# ---- same seed, same text


@cache
def plain_text(temperature: float) -> list[int]:
    engine = Engine(target(), registry.drafter("ngram"), registry.policy("none"))
    return engine.generate(prompt(), max_new_tokens=10, temperature=temperature, seed=3).token_ids


@pytest.mark.parametrize("name", BLOCKS)
def test_same_seed_gives_same_text(name: str) -> None:
    """The engine's tests run all policies with coupled noise; here they run uncoupled with one head."""
    drafter = BlockDrafter(model=random_block(name))
    for temperature, coupled in ((0.0, True), (1.0, True), (1.0, False)):
        for policy in registry.policies() if name == "block" and not coupled else ("beam", "svip"):
            engine = Engine(target(), drafter, registry.policy(policy), coupled)
            found = engine.generate(prompt(), max_new_tokens=10, temperature=temperature, seed=3)
            assert found.token_ids == plain_text(temperature), policy


@pytest.mark.parametrize("name", ["block", "block-dflash", "block-rnn", "block-path", "block-windows"])
def test_a_batch_drafts_what_each_sequence_drafts_alone(name: str) -> None:
    prompts = [prompt(5), prompt(40, seed=1), prompt(2, seed=2), prompt(1, seed=3)]
    plain = Engine(target(), registry.drafter("ngram"), registry.policy("none"))
    engine = Engine(target(), BlockDrafter(model=random_block(name)), registry.policy("beam", depth=3, k=3, nodes=10))
    alone = [engine.generate(own, max_new_tokens=17) for own in prompts]
    together = engine.generate_batch(prompts, max_new_tokens=17)
    for one, many, own in zip(alone, together, prompts, strict=True):
        assert one.token_ids == many.token_ids == plain.generate(own, max_new_tokens=17).token_ids
        assert [len(step.tokens) for step in one.steps] == [len(step.tokens) for step in many.steps]


# ---- a target whose next token depends on the last one only, and a head whose pair scores know it


def bigram_target() -> Target:
    model = tiny()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return Target(model, check=False)


def knowing_head(target: Target) -> BlockHead:
    """Its logits are all 0, and its pair scores the target's logits."""
    head = random_block("block-plain", pair="markov", rank=32, block=8, candidates=VOCABULARY, qk_norm=False)
    with torch.no_grad():
        head.norm.weight.zero_()
        head.pair.before.copy_(target.model.model.norm(target.model.get_input_embeddings().weight))
        head.pair.after.copy_(target.model.get_output_embeddings().weight)
    return head


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_pair_scores_alone_can_draft_what_the_target_says(temperature: float) -> None:
    target = bigram_target()
    engine = Engine(target, BlockDrafter(knowing_head(target)), registry.policy("chain", depth=8))
    done = engine.generate(prompt(), max_new_tokens=45, temperature=temperature, seed=3)
    assert [len(step.tokens) for step in done.steps] == [9] * 5  # all 8 levels, and the target's own token


def test_auto_opens_more_levels_where_they_are_free() -> None:
    """A pass of the same price for each level, or the same price once and hardly anything later."""
    target, passes = bigram_target(), []
    rows = Costs.simple(0.2, (1, 64), (1.0, 1.5))
    for costs in (rows, replace(rows, drafts=Curve((1,), (0.001,)), opening=0.2)):
        engine = Engine(target, BlockDrafter(knowing_head(target)), registry.policy("auto"))
        engine.costs = costs
        steps = engine.generate(prompt(), max_new_tokens=120, temperature=1.0, seed=3).steps
        passes.append(sum(step.draft_passes for step in steps[5:]) / len(steps[5:]))
    assert passes[1] > passes[0] + 2


def test_the_first_pass_has_its_own_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    real, now = BlockDrafter._run, [0.0]

    def tick(seconds: float) -> float:
        now[0] += seconds
        return now[0]

    monkeypatch.setattr(profiling.time, "perf_counter", lambda: tick(0.001))
    monkeypatch.setattr(BlockDrafter, "_run", lambda self, *given: (given[0] and tick(1.0), real(self, *given)))
    engine = Engine(target(), BlockDrafter(random_block()), registry.policy("auto"))
    costs = profiling.measure(engine, rows=(1, 2), lengths=(16,), widths=(1, 2, 4), seconds=60.0).costs
    assert costs.opening > 0.9 > costs.drafts.seconds[-1]
