"""What a policy verifies of a tree."""

from __future__ import annotations

import torch

from windfall.core.tree import DraftTree
from windfall.core.types import Split, Step
from windfall.policies.base import TreePolicy


def verified(policy: TreePolicy, accepted: int, drafted: int = 8, finish: str | None = None) -> None:
    """Let the policy observe a cycle in which a chain of `drafted` nodes had its first `accepted` accepted."""
    tree = DraftTree.root(0)
    for node in range(drafted):
        tree = tree.extend(torch.tensor([node]), torch.tensor([1]), torch.zeros(1), torch.zeros(1, dtype=torch.long))
    path, everything = torch.arange(accepted + 1), torch.arange(drafted + 1)
    tokens = tuple(range(accepted + 1))
    policy.observe(Step(tokens, "", tree, path, tree, everything, drafted, Split(), finish))
