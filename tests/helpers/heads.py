"""Checks of the trees that heads draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.random_heads import Chain
from helpers.tiny import features_of
from windfall.core.tree import DraftTree
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.heads.base import FeatureHead
from windfall.model.target import Target


@torch.no_grad()
def wanted_logq(head: FeatureHead, features: Tensor, committed: list[int], path: list[int]) -> Tensor:
    """Log-probabilities after a path, computed without a cache: true features up to the root, the head's own later."""
    hidden = head.fuse(features)
    memory, columns = Chain(head), len(committed) - 1
    guess = head(torch.tensor([committed[1:]]), hidden, torch.arange(columns)[None], memory)
    for step, token in enumerate(path):
        guess = head(torch.tensor([[token]]), guess.recycled[:, -1:], torch.tensor([[columns + step]]), memory)
    return torch.log_softmax(head.logits(guess.state[0, -1]), -1)


def check_children(head: FeatureHead, model: Any, committed: list[int], tree: DraftTree) -> None:
    """Every drafted node has the log-probability and the rank that the head gives it after its path."""
    features = features_of(model, committed[:-1], head.config.taps)
    for node in range(1, len(tree)):
        logq = wanted_logq(head, features, committed, tree.tokens[tree.path(node)[1:-1]].tolist())
        names = torch.arange(len(logq)) if head.draft_tokens is None else head.draft_tokens
        place = int((names == tree.tokens[node]).nonzero())
        assert float(tree.logq[node]) == pytest.approx(float(logq[place]), rel=1e-4, abs=1e-4)
        assert int(tree.rank[node]) == int((logq > logq[place]).sum())


def started(head: FeatureHead, target: Target, prompts: list[list[int]]) -> FeatureHeadDrafter:
    drafter = FeatureHeadDrafter(model=head)
    drafter.attach(target)
    drafter.start(prompts, target.prefill(prompts, drafter.taps), [None] * len(prompts))
    return drafter
