"""Classifiers: their inputs, the decisions of their policies, and their training."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from helpers.classifiers import answering, entropy, put, some_classifier
from helpers.cli import character_tokenizer
from helpers.random_parallel import some_drafter
from helpers.table import TableDrafter, draft, random_table
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.cli import app
from windfall.core.errors import InputError
from windfall.core.tree import DraftTree
from windfall.core.types import Grow
from windfall.engine.engine import Engine
from windfall.model.target import Target
from windfall.policies.base import TreePolicy
from windfall.policies.papers import classifiers
from windfall.policies.papers.classifiers import KINDS
from windfall.train.classifiers import training
from windfall.train.classifiers.options import Fitting, Recording

HAND = [  # q(next | last); 0 is the root's token
    [0.0, 0.6, 0.3, 0.1],
    [0.0, 0.2, 0.7, 0.1],
    [0.0, 0.5, 0.1, 0.4],
    [0.0, 0.3, 0.3, 0.4],
]


def tree_by_hand() -> DraftTree:
    """Level 1 = {1: .6, 2: .3, 3: .1}; of these 1 and 2 are expanded, with entropies."""
    drafter, tree = TableDrafter(HAND), DraftTree.root(0)
    tree = drafter.expand(tree, Grow(torch.tensor([0]), k=3, entropy=True))
    return drafter.expand(tree, Grow(torch.tensor([1, 2]), k=2, entropy=True))


def test_inputs_by_hand() -> None:
    tree = tree_by_hand()
    shown = classifiers.disco_inputs(classifiers.BeamView(tree), 2)
    assert shown == pytest.approx([0.42, 0.15, 0.12, 0.12, *[0] * 6, entropy(0.2, 0.7, 0.1), 0.2], abs=1e-5)
    shown = classifiers.disco_inputs(classifiers.BeamView(tree), 1)
    assert shown == pytest.approx([0.6, 0.3, 0.1, *[0] * 7, entropy(0.6, 0.3, 0.1), 0.1], abs=1e-5)
    shown = classifiers.specdecpp_inputs(classifiers.BeamView(tree), 2)
    assert shown == pytest.approx([0.7, 0.2, *[0] * 8, entropy(0.2, 0.7, 0.1), 0.6, 0.2], abs=1e-5)
    nodes = torch.tensor([1, 4])
    assert classifiers.c2t_inputs(tree, nodes, False).tolist() == [
        pytest.approx([0.6, 0.1], abs=1e-5),
        pytest.approx([0.42, 0.2], abs=1e-5),
    ]
    assert classifiers.c2t_inputs(tree, nodes, True)[1].tolist() == pytest.approx(
        [0.42, entropy(0.2, 0.7, 0.1), 0.2], abs=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_lean_network_is_the_trained_one(kind: str) -> None:
    """Folding the normalisation into the matrices, and leaving torch, changes nothing."""
    inputs = classifiers.inputs_of(kind)
    torch.manual_seed(0)
    network, shown = training.Network(kind, len(inputs), 8), 3 + 2 * torch.randn(20, len(inputs))
    mean, deviation = shown.mean(0), shown.std(0)
    with torch.no_grad():
        wanted = torch.sigmoid(network((shown - mean) / deviation) + 0.5).numpy()
    found = network.finish(inputs, mean, deviation, 0.5)
    found.check()
    assert found(shown.numpy()) == pytest.approx(wanted, abs=1e-5)


def test_disco_ends_where_its_classifier_says(tmp_path: Path) -> None:
    """P(level) = σ(20 · (best path probability − .3)): levels of .6 and .42 pass, .21 ends it."""
    path = put(answering("disco", 20.0, bias=-6.0), tmp_path)
    tree, _, passes = draft(registry.policy("disco", path=path, k=2), TableDrafter(HAND))
    assert passes == 3 and int(tree.depth[-1]) == 3
    assert draft(registry.policy("disco", path=path, k=2, threshold=0.0), TableDrafter(HAND))[2] == 12
    assert draft(registry.policy("disco", path=path, k=2, depth=2), TableDrafter(HAND))[2] == 2


def test_specdecpp_multiplies_its_chances(tmp_path: Path) -> None:
    """P = .8 at every level, the first taken for sure: .8, .64 after the third, whose risk .36 is too high."""
    path = put(answering("specdecpp", bias=float(np.log(4))), tmp_path)
    made = registry.policy("specdecpp", path=path)
    assert draft(made, TableDrafter(HAND))[2] == 3
    assert draft(made, TableDrafter(HAND))[2] == 3, "a cycle begins anew"
    assert draft(registry.policy("specdecpp", path=path, threshold=0.37), TableDrafter(HAND))[2] == 4
    never = put(answering("specdecpp", bias=-50.0), tmp_path)
    assert draft(registry.policy("specdecpp", path=never), TableDrafter(HAND))[2] == 2
    assert draft(registry.policy("specdecpp", path=never, least=4), TableDrafter(HAND))[2] == 4


def test_c2t_prunes_before_the_rerank(tmp_path: Path) -> None:
    """Nodes of .2 or less go, with all that would have come below; what is left is neither deeper nor wider."""
    path = put(answering("c2t", 20.0, bias=-4.0), tmp_path)
    tree, keep, passes = draft(registry.policy("c2t", path=path, beta=0.5, k=3), TableDrafter(HAND))
    whole, all_kept, _ = draft(registry.policy("beam", k=3, depth=8, nodes=60), TableDrafter(HAND))
    found = {tuple(tree.tokens[tree.path(node)[1:]].tolist()) for node in keep.tolist()}
    likely = (whole.score.exp() > 0.2).nonzero().flatten().tolist()
    assert found == {tuple(whole.tokens[whole.path(node)[1:]].tolist()) for node in likely}
    assert found == {(), (1,), (2,), (1, 2), (1, 2, 1)} and len(all_kept) == 60
    assert passes == 4, "the level after the last one that had anything left"
    nothing = registry.policy("c2t", path=put(answering("c2t", bias=-9.0), tmp_path / "other"))
    assert draft(nothing, TableDrafter(HAND))[1].tolist() == [0]
    tight = registry.policy("c2t", path=path, beta=0.5, k=3, nodes=3)
    assert len(draft(tight, TableDrafter(HAND))[1]) == 3


@cache
def target() -> Target:
    return Target(tiny())


def texts_of(policy: TreePolicy) -> list[list[int]]:
    """A greedy text and a sampled one."""
    engine = Engine(target(), some_drafter("small"), policy)
    return [engine.generate(prompt(), max_new_tokens=24, seed=0, temperature=t).token_ids for t in (0.0, 1.0)]


@cache
def plain_texts() -> list[list[int]]:
    return texts_of(registry.policy("none"))


@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind in KINDS for seed in range(3)])
def test_any_classifier_gives_the_same_text(kind: str, seed: int, tmp_path: Path) -> None:
    """Random matrices: parent-closed selections, and plain decoding's text."""
    path = put(some_classifier(kind, seed, entropy=kind == "c2t" and seed == 1), tmp_path)
    policy = registry.policy(kind, path=path)
    for table in range(5):
        tree, keep, _ = draft(policy.fresh(), TableDrafter(random_table(9, table, 2.0)))
        tree.select(keep).check()
    assert texts_of(policy) == plain_texts()


@pytest.mark.parametrize("kind", KINDS)
def test_bundled_classifiers_load_and_name_their_source(kind: str) -> None:
    made = classifiers.load(kind, None)
    told = json.loads((classifiers.SHIPPED / f"{kind}.json").read_text("utf-8"))
    assert made.kind == kind == told["kind"] and 0.5 < told["accuracy"] < told["auc"] < 1
    assert told["data"]["count"] >= 20 and told["command"].startswith("windfall train classifier")
    assert classifiers.load(kind, str(classifiers.SHIPPED / f"{kind}.safetensors")) is not None


def test_what_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(kind: str = "disco", path: Path | None = tmp_path) -> str:
        with pytest.raises(InputError) as told:
            registry.policy(kind, path=None if path is None else str(path))
        assert "\n" not in str(told.value)
        return str(told.value)

    assert "`windfall train classifier --kind disco" in refused()
    monkeypatch.setattr(classifiers, "SHIPPED", tmp_path)
    assert refused(path=None).startswith("no disco classifier comes with this package; `windfall train")
    put(some_classifier("disco"), tmp_path)
    weights, card = tmp_path / "disco.safetensors", tmp_path / "disco.json"
    assert "for disco, not c2t" in refused("c2t", weights)
    whole, told = weights.read_bytes(), card.read_text("utf-8")
    weights.write_bytes(whole[:-9])
    assert "damaged" in refused()
    weights.write_bytes(whole)
    for text in ("{", "[]", "{}", told.replace('"entropy"', '"luck"')):
        card.write_text(text, "utf-8")
        assert "damaged" in refused(), text
    card.unlink()
    assert "lacks its card, disco.json" in refused()
    broken = some_classifier("disco")
    broken.weights["output"] = np.zeros(3, np.float32)
    classifiers.save(broken, tmp_path, {})
    assert "damaged" in refused()


# training


def recorded(prompts: int = 3, folder: Path | None = None, **how: Any) -> training.Cycles:
    engine, cycles = Engine(Target(tiny()), some_drafter("small"), registry.policy("none")), training.Cycles({})
    recording = Recording(**{"depth": 4, "k": 4, "nodes": 16, "max_new_tokens": 20, **how})
    asked = [prompt(seed=seed) for seed in range(prompts)]
    training.record(engine, asked, recording, 0, cycles, (folder or Path()) / training.CYCLES_FILE, lambda share: None)
    return cycles


def test_recorded_cycles_come_back(tmp_path: Path) -> None:
    made = recorded(folder=tmp_path)
    again = training.Cycles.open(tmp_path / training.CYCLES_FILE, {}, resume=True)
    assert again.prompts == 3 and len(again.cycles) == len(made.cycles) > 3
    for kind in KINDS:
        one, other = (training.samples_of(kind, each.cycles) for each in (made, again))
        assert np.array_equal(one.inputs, other.inputs) and np.array_equal(one.labels, other.labels)
        assert one.counts["accepted"] and one.counts["rejected"]
    for cycle in made.cycles:
        assert cycle.accepted_depth <= int(cycle.tree.depth[-1]) and not bool((cycle.accepted & ~cycle.verified).any())
    disco, specdecpp = (training.samples_of(kind, made.cycles) for kind in ("disco", "specdecpp"))
    assert disco.counts["accepted"] == specdecpp.counts["accepted"] == sum(c.accepted_depth for c in made.cycles)
    assert specdecpp.counts["rejected"] <= len(made.cycles), "one miss a cycle"
    with pytest.raises(InputError, match="--resume"):
        training.Cycles.open(tmp_path / training.CYCLES_FILE, {}, resume=False)
    with pytest.raises(InputError, match="another target"):
        training.Cycles.open(tmp_path / training.CYCLES_FILE, {"target": "x"}, resume=True)
    (tmp_path / training.CYCLES_FILE).write_bytes(b"PK")
    with pytest.raises(InputError, match="damaged"):
        training.Cycles.open(tmp_path / training.CYCLES_FILE, {}, resume=True)


def made_up(count: int, seed: int = 0) -> list[training.Cycle]:
    """Chains whose every token is accepted with the probability that the drafter gives it."""
    chance, cycles = np.random.default_rng(seed), []
    for place in range(count):
        tree, alive, accepted = DraftTree.root(0), True, [True]
        for node in range(4):
            sure = float(chance.uniform(0.05, 0.98))
            tree = tree.measure(torch.tensor([node]), torch.tensor([1 - sure]))
            one, rank = torch.tensor([1]), torch.zeros(1, dtype=torch.long)
            tree = tree.extend(torch.tensor([node]), one, torch.tensor([sure]).log(), rank)
            alive = alive and chance.random() < sure
            accepted.append(alive)
        cycles.append(training.Cycle(place % 5, tree, torch.ones(5, dtype=torch.bool), torch.tensor(accepted)))
    return cycles


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_classifier_ranks_like_the_drafters_confidence(kind: str) -> None:
    """Only the drafter's confidence carries information here; a fitted classifier ranks nearly as well as it."""
    cycles = made_up(400)
    made, figures = training.fit(kind, cycles, Fitting(epochs=12, rate=3e-3, hidden=16), lambda share: None)
    _, held = training.split(cycles, 0.2, 0)
    samples = training.samples_of(kind, held)
    known = samples.inputs[:, 0]  # the path probability; for specdecpp, the token's
    assert figures["auc"] > training.roc_area(known, samples.labels) - 0.02 > 0.6
    assert figures["accuracy"] > 0.6 and figures["samples"]["accepted"] == figures["samples"]["rejected"]
    again, _ = training.fit(kind, cycles, Fitting(epochs=12, rate=3e-3, hidden=16), lambda share: None)
    assert all(np.array_equal(made.weights[name], again.weights[name]) for name in made.weights)
    if kind == "specdecpp":  # its chances are frequencies, though it learnt from balanced classes
        assert float(made(samples.inputs).mean()) == pytest.approx(float(samples.labels.mean()), abs=0.1)


def test_held_out_cycles_are_of_other_prompts() -> None:
    cycles = made_up(50)
    learning, judging = training.split(cycles, 0.2, 0)
    assert len(learning) == 40 and len(judging) == 10
    assert not {cycle.prompt for cycle in learning} & {cycle.prompt for cycle in judging}
    single = [cycle._replace(prompt=0) for cycle in cycles]
    assert [len(part) for part in training.split(single, 0.2, 0)] == [40, 10]


def test_roc_area_by_hand() -> None:
    chances = np.array([0.9, 0.5, 0.5, 0.1], np.float32)
    assert training.roc_area(chances, np.array([True, True, False, False])) == (1 + 1 + 0.5 + 1) / 4


def test_one_class_alone_is_refused() -> None:
    cycles = [cycle._replace(accepted=torch.ones(5, dtype=torch.bool)) for cycle in made_up(20)]
    with pytest.raises(InputError, match="both are needed"):
        training.fit("disco", cycles, Fitting(), lambda share: None)


def test_the_command_trains_what_generate_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    tiny().save_pretrained(model)
    character_tokenizer().save_pretrained(model)
    rows = [{"id": str(row), "turns": [f"count to {row}"]} for row in range(3)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    how = ["--target", str(model), "--drafter", "self"]
    words = ["train", "classifier", *how, "--out", str(out), "--tasks", str(tmp_path / "t.jsonl"), "--epochs", "2"]
    words += ["--max-new-tokens", "20", "--depth", "3", "--k", "4", "--kind"]

    def stops(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training, "fit", stops)
        stopped = CliRunner().invoke(app, [*words, "disco"])
    assert (
        stopped.exit_code == 130 and "--resume continues" in stopped.stderr and (out / training.CYCLES_FILE).is_file()
    )
    assert "holds recorded cycles" in CliRunner().invoke(app, [*words, "disco"]).stderr
    for kind in KINDS:
        result = CliRunner().invoke(app, [*words, kind, "--resume", "--json"])
        assert result.exit_code == 0, result.output
        assert 0 <= json.loads(result.stdout)["auc"] <= 1
        told = json.loads((out / f"{kind}.json").read_text("utf-8"))
        assert told["command"].endswith("--depth 3 --k 4 --max-new-tokens 20 --epochs 2")
        assert told["data"]["count"] == 3 and str(tmp_path) not in json.dumps(told)
        used = ["generate", "sing", *how, "--policy", kind, "--set", f"path={out}", "--max-new-tokens", "6", "--json"]
        assert CliRunner().invoke(app, used).exit_code == 0
    assert "no classifier 'x'" in CliRunner().invoke(app, [*words, "x"]).stderr
    assert "an option of c2t" in CliRunner().invoke(app, [*words, "disco", "--entropy"]).stderr
