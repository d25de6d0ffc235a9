"""Random draft trees. Nothing here imports transformers, which takes long."""

from __future__ import annotations

import torch

from windfall.core.tree import DraftTree


def random_tree(size: int, seed: int, width: int = 50) -> DraftTree:
    """Random parents; siblings differ."""
    chance = torch.Generator().manual_seed(seed)
    tree = DraftTree.root(0)
    for node in range(1, size):
        parent = torch.randint(node, (1,), generator=chance)
        taken = (tree.parents == parent).sum()
        tree = tree.extend(parent, taken.reshape(1) % width, torch.zeros(1), taken.reshape(1))
    return tree
