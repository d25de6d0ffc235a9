"""A tree that lives on the device, as the kernels have it: its arrays, the rows ahead, and the terms of its growth."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

NOBODY = -1


class TreeArrays(NamedTuple):
    """A tree of `count` places, C at the most; a place whose key is -inf holds no node. Behind `count`: anything."""

    tokens: Tensor  # [C] long
    parents: Tensor  # [C] long, the root's is NOBODY
    depth: Tensor  # [C] long
    rank: Tensor  # [C] long
    logq: Tensor  # [C] fp32
    score: Tensor  # [C] fp32, the sum of logq from the root
    key: Tensor  # [C] fp32, by which nodes are chosen; never above the parent's
    chance: Tensor  # [C] fp32, of being accepted if the parent is
    taken: Tensor  # [C] bool: expanded, or about to be
    line: Tensor  # [C, D + 1] long: ancestors by depth, itself included, NOBODY elsewhere
    slot: Tensor  # [C] long: an expanded node's place among the drafter's features; the root's is 0
    count: Tensor  # type: ignore[assignment]  # [1] long


class Ahead(NamedTuple):
    """The rows of the next draft pass, W of them, and the S rows that the passes of a cycle have staged so far."""

    nodes: Tensor  # [W] long, NOBODY: an empty row
    tokens: Tensor  # [W] long
    positions: Tensor  # [W] long
    slots: Tensor  # [W] long: places in the drafter's cache
    above: Tensor  # [W] long: the slot of each one's parent
    here: Tensor  # [W] long: its own
    mask: Tensor  # [W, S] bool: which staged rows are a row's ancestors or itself
    expanded: Tensor  # [S] long: the node of each staged row, NOBODY behind them
    staged: Tensor  # [1] long
    length: Tensor  # [1] long: the drafter's committed columns, only read
    summary: Tensor  # [passes + 1, 6] fp32: policies.plan.Summary after each pass; the first number counts the passes


class Terms(NamedTuple):
    """What the calibrated rule believes, and what things cost."""

    weights: Tensor  # [1 + DEPTHS + RANKS] fp32: see Calibrator.accept
    forecast: Tensor  # [DEPTHS, 3, children] fp32: mean chances of the children to come, see Calibrator.forecast
    prices: Tensor  # [2] fp32: of a pass and of a row, in tokens
