"""Checks of texts and rows in the exact mode."""

from __future__ import annotations

import hashlib
import itertools
import random
from typing import Any

import torch

from helpers.tiny import VOCABULARY, prompt
from helpers.trees import random_tree
from windfall import registry
from windfall.core.tree import DraftTree
from windfall.core.types import GpuOptions
from windfall.drafters.base import Drafter
from windfall.drafters.lm import LMDrafter
from windfall.engine.engine import Engine
from windfall.engine.gpu.graphs import GraphCache
from windfall.engine.gpu.host_policy import GraphTarget
from windfall.engine.gpu.target import GpuTarget
from windfall.model.target import Target

POLICIES: dict[str, dict[str, Any]] = {
    "beam": {"depth": 4, "k": 4, "nodes": 12},
    "auto": {},
    "opt-tree": {"nodes": 16, "depth": 5},
    "large": {"depth": 5, "k": 8, "nodes": 100},  # more rows than one pass has
}


def engine(target: Any, policy: str, drafter: Drafter | None = None, exact: bool = True) -> Engine:
    name = "beam" if policy == "large" else policy
    chosen = registry.policy(name, **POLICIES.get(policy, {}))
    return Engine(Target(target), drafter or LMDrafter(), chosen, gpu_options=GpuOptions(True, exact=exact))


def graph_target(target: Any) -> GraphTarget:
    device = next(target.parameters()).device
    return GraphTarget(GpuTarget(target, (), GraphCache(device), GpuOptions(True, exact=True)))


@torch.inference_mode()
def check_rows(target: Any, length: int, size: int) -> None:
    """All rows on the way to the deepest node of a tree give the logits of plain decoding, to the bit."""
    tree = random_tree(size, seed=size, width=VOCABULARY)
    text = prompt(length, seed=length)
    tree_target, plain = graph_target(target), graph_target(target)
    for each in (tree_target, plain):
        each.prefill([text])
    (found,) = tree_target.score([tree])
    path = tree.mask()[tree.depth.argmax()].nonzero()[:, 0]
    assert len(path) > 3
    for row in path.tolist():
        (alone,) = plain.score([DraftTree.root(int(tree.tokens[row]))])
        assert torch.equal(alone.logits[0], found.logits[row]), int(tree.depth[row])
        plain.commit([torch.tensor([0])])


def tree_with_path(path: list[int], others: int, seed: int) -> tuple[DraftTree, int]:
    """A random tree that contains these tokens as a path from the root, in random slots; and the slot of the last."""
    chance = random.Random(seed)
    tree, last, waiting = DraftTree.root(path[0]), 0, path[1:]
    for left in range(others + len(waiting), 0, -1):
        on_path = chance.random() < len(waiting) / left
        parent, token = (
            (last, waiting.pop(0)) if on_path else (chance.randrange(len(tree)), chance.randrange(VOCABULARY))
        )
        tree = tree.extend(torch.tensor([parent]), torch.tensor([token]), torch.zeros(1), torch.zeros(1).long())
        last = len(tree) - 1 if on_path else last
    return tree, last


@torch.inference_mode()
def check_one_hash(
    target: Any, length: int, rows: tuple[int, ...], chunks: tuple[int, ...], pairs: bool = False
) -> None:
    """The logits after a text have one hash: in trees of these sizes, with the text's end committed or in random slots
    of the tree, and with the prompt cut into chunks of these sizes. In `pairs`, or in all combinations of both."""
    text, path = prompt(length, seed=length), prompt(5, seed=5)
    made, hashes = graph_target(target), set()
    for seed, (count, chunk) in enumerate(zip(rows, chunks, strict=True) if pairs else itertools.product(rows, chunks)):
        committed = 4 if count == 1 else seed % 4  # of the path
        for _ in made.gpu_target.prefill(
            torch.tensor([*text, *path[:committed]], device=made.gpu_target.device), chunk
        ):
            pass
        staged = path[committed:]
        tree, last = tree_with_path(staged, max(count - len(staged), 0), seed)
        (found,) = made.score([tree])
        hashes.add(hashlib.sha256(found.logits[last].cpu().view(torch.uint8).numpy().tobytes()).hexdigest())
    assert len(hashes) == 1


def check_texts(
    target: Any, policy: str, drafter: Drafter | None, lengths: tuple[int, ...], new: int, **sampling: Any
) -> float:
    """The same texts as plain decoding's; returns how many tokens a cycle gave."""
    asked = {"max_new_tokens": new, "eos": (), **sampling}
    plain, made = engine(target, "none", drafter), engine(target, policy, drafter)
    tau = 0.0
    for length in lengths:
        wanted, found = (each.generate(prompt(length, seed=length), **asked) for each in (plain, made))
        assert found.token_ids == wanted.token_ids
        tau += found.stats.tau / len(lengths)
    return tau
