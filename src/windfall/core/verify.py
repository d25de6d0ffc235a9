"""Verification: find the drafted nodes that agree with the target's own draws.

Drafted children are a deterministic function of the context, so following the target's draws through the tree emits
exactly the target's own distribution.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from windfall.core.tree import DraftTree
from windfall.core.types import Verdict


def children_of(tree: DraftTree) -> dict[tuple[int, int], int]:
    """The node that each (parent, token) leads to."""
    known = tree.arrays
    edges = zip(known.parents.tolist(), known.tokens.tolist(), strict=True)
    return {edge: node for node, edge in enumerate(edges)}


def walk(tree: DraftTree, draw: Callable[[int], int], ends: Callable[[int], bool] | None = None) -> Verdict:
    """Follow the target's own draw from the root for as long as the tree contains it.

    `draw(node)` returns the target's next token after that node (in greedy decoding, the argmax). It is called for
    visited nodes only, in order. `ends(token)`, if given, is called after every draw; nothing is drawn after the token
    that ends the text, and that token is the verdict's bonus.
    """
    child = children_of(tree)
    path, node, token = [0], 0, draw(0)
    while not (ends and ends(token)) and (node := child.get((node, token), -1)) > 0:
        path.append(node)
        token = draw(node)
    return Verdict(torch.from_numpy(np.array(path)), token)
