"""Rules by which a tree grows; values only, for the wrappers and the Triton kernels."""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    """How the nodes of the next draft pass are chosen. A rule is compiled into the kernel."""

    whole: bool = False  # choose among all nodes that are not yet expanded, instead of the newest
    calibrated: bool = False  # a node's key is the calibrated log-probability of its path
    shaped: bool = False  # the tree has a fixed shape
    bounded: bool = False  # expand only nodes within `bounds`, see kernels.gate.Bounds
    floored: bool = False  # drop nodes whose key is at most `floor`
    decay: float = 0.0  # added to a node's key for each level: a logarithm
    top: int = 0  # keep only the best `top` nodes of the tree, and expand those that are better than the last of them
    include_last: bool = False  # expand the last of these too, while fewer than `top` nodes have been chosen
    budget: int = 0  # maximum nodes of the tree; if above 0, only nodes chosen for expansion are kept
    share: float = 0.0  # with a budget: logarithm of the least share of the best candidate's probability
    first: int = 0  # with a budget: maximum nodes in each of the first levels, where the share does not apply
    levels: int = 0  # with a budget: number of these first levels

    @property
    def selective(self) -> bool:
        """Whether only some of the children are kept."""
        return bool(self.top or self.budget)


RULES = {
    "beam": Rule(),
    "best": Rule(whole=True),
    "calibrated": Rule(whole=True, calibrated=True),
    "shape": Rule(shaped=True),
}
