"""Measures a drafter: accuracy and calibration after guesses of each rank, and which nodes of trees are accepted.

Accuracy and calibration by rank are SALF & TALF's Figure 2b and Appendix A, the shares of ranks its Figure 2a, and
acceptance by depth and rank is TALON's Figure 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windfall.bench.recording import node_counts
from windfall.core.tree import DraftTree
from windfall.core.types import Grow, InputError, SamplingParams, Step
from windfall.costs.acceptance import expected_calibration_error
from windfall.drafters.base import Drafter
from windfall.engine.engine import Engine
from windfall.model.target import Target

RANKS = 5  # guesses after which the drafter is probed
CHILDREN = 256  # of a probed node; tokens less likely than these count as probability 0
MASS_BINS, WIDTH_BINS = 10, 15  # of the two calibration errors

Floats = NDArray[np.float64]


# ---- probes: after each of the drafter's guesses, does it predict the target's next token?


class Probe(NamedTuple):
    """The drafter's next guess after its own guess of some rank."""

    rank: int  # of the first guess, from 1
    hit: bool  # whether the next guess is the target's likeliest token
    chance: float  # the drafter's probability of the target's likeliest token
    surest: float  # the drafter's probability of its next guess


@torch.inference_mode()
def probe(
    target: Target, drafter: Drafter, prompt: Sequence[int], answer: Sequence[int], children: int = CHILDREN
) -> list[Probe]:
    """Probe at every token of a known answer, so that the contexts are the target's own.

    Each probe takes a draft pass for the likeliest tokens, one for the tokens after these, and one target pass.
    """
    found: list[Probe] = []
    drafter.start([list(prompt)], target.prefill([list(prompt)], drafter.taps), [None])
    for root, following in zip([prompt[-1], *answer], answer, strict=False):
        drafted = guessed = drafter.expand(drafter.begin([root]), [Grow(torch.tensor([0]), k=RANKS)])
        nodes = torch.arange(1, len(guessed[0]))
        if len(nodes):
            drafted = drafter.expand(guessed, [Grow(nodes, k=children)])
        scores = target.score(guessed)[0]
        found += _probes(drafted[0], nodes, scores.logits.argmax(-1))
        path = torch.tensor([0])
        target.commit([path])
        drafter.commit(drafted, [path], [following], None if scores.hidden is None else [scores.hidden[path]])
    return found


def _probes(tree: DraftTree, nodes: Tensor, favourites: Tensor) -> list[Probe]:
    """`favourites` has the target's likeliest token after every node."""
    found = []
    for node in nodes.tolist():
        children = torch.nonzero(tree.parents == node).flatten()
        chances, tokens = tree.logq[children].exp(), tree.tokens[children]
        wanted = tokens == int(favourites[node])
        first = tree.rank[children] == 0
        surest, chance = float(chances[first].sum()), float(chances[wanted].sum())
        found.append(Probe(int(tree.rank[node]) + 1, bool((first & wanted).any()), chance, surest))
    return found


@dataclass(frozen=True)
class RankFigures:
    """The figures of the probes after guesses of one rank."""

    rank: int  # from 1
    contexts: int
    accuracy: float  # share of probes whose guess is the target's likeliest token
    confidence: float  # mean probability of the target's likeliest token
    ece_paper: float  # of that probability, in bins of equal mass
    ece_guo: float  # of the drafter's highest probability, in bins of equal width

    @classmethod
    def of(cls, rank: int, probes: Sequence[Probe]) -> RankFigures:
        hits, chances, surest = (
            np.array([getattr(each, name) for each in probes], dtype=np.float64) for name in ("hit", "chance", "surest")
        )
        guo = expected_calibration_error(surest, hits, WIDTH_BINS)
        return cls(rank, len(probes), float(hits.mean()), float(chances.mean()), equal_mass_error(chances, hits), guo)


def by_rank(probes: Sequence[Probe]) -> list[RankFigures]:
    ranks = sorted({each.rank for each in probes})
    return [RankFigures.of(rank, [each for each in probes if each.rank == rank]) for rank in ranks]


def equal_mass_error(chances: Floats, outcomes: Floats, bins: int = MASS_BINS) -> float:
    """The calibration error over bins with equal numbers of probes, sorted by confidence; ties keep their order."""
    order = np.argsort(chances, kind="stable")
    parts = [part for part in np.array_split(order, bins) if len(part)]
    gaps = [abs(float(chances[part].mean() - outcomes[part].mean())) * len(part) for part in parts]
    return sum(gaps) / max(len(chances), 1)


# ---- trees


@dataclass(frozen=True)
class TreeFigures:
    """Counts of verified and accepted nodes over all cycles."""

    cycles: int
    tokens: int
    draft_passes: int
    nodes: list[list[int]]  # depth, rank, layer rank (both from 0), verified, judged, accepted
    lengths: dict[int, int]  # accepted drafted tokens → cycles

    @classmethod
    def of(cls, steps: Sequence[Step]) -> TreeFigures:
        lengths = dict(sorted(Counter(step.accepted for step in steps).items()))
        tokens, passes = sum(len(step.tokens) for step in steps), sum(step.draft_passes for step in steps)
        return cls(len(steps), tokens, passes, node_counts(steps), lengths)

    @property
    def tau(self) -> float:
        """Tokens per target pass, including the target's own."""
        return self.tokens / max(self.cycles, 1)

    @property
    def delta(self) -> float:
        """Draft passes per target pass."""
        return self.draft_passes / max(self.cycles, 1)

    def rank_share(self) -> list[float]:
        """The share of the verified nodes with each sibling rank; the last entry stands for all further ranks."""
        counts = [0] * RANKS
        for _, rank, _, verified, _, _ in self.nodes:
            counts[min(rank, RANKS - 1)] += verified
        return [count / max(sum(counts), 1) for count in counts]

    def heat_map(self, layer: bool = False, columns: int | None = None) -> list[list[float]]:
        """The share of the cycles that accepted the node at [depth - 1][rank - 1].

        With `layer`, the rank is by path probability within its depth, else among its siblings. Trailing ranks that
        were never accepted are left out; the last of `columns` stands for all further ranks.
        """
        used = [(row[0], row[2 if layer else 1], row[5]) for row in self.nodes]
        most = max((rank + 1 for _, rank, accepted in used if accepted), default=1)
        cells = np.zeros((max((depth for depth, _, _ in used), default=0), min(most, columns or most)))
        for depth, rank, accepted in used:
            if accepted:
                cells[depth - 1, min(rank, cells.shape[1] - 1)] += accepted
        found: list[list[float]] = (cells / max(self.cycles, 1)).tolist()
        return found

    def as_dict(self) -> dict[str, Any]:
        return {
            "cycles": self.cycles,
            "tokens": self.tokens,
            "tau": self.tau,
            "delta": self.delta,
            "rank_share": self.rank_share(),
            "accepted_by_sibling_rank": self.heat_map(),
            "accepted_by_layer_rank": self.heat_map(layer=True),
            "accepted_lengths": {str(length): cycles for length, cycles in self.lengths.items()},
            "node_columns": ["depth", "rank", "layer_rank", "verified", "judged", "accepted"],
            "nodes": self.nodes,
        }


# ---- both


@dataclass(frozen=True)
class Diagnosis:
    """The figures of a drafter on some prompts."""

    ranks: list[RankFigures]
    trees: TreeFigures
    children: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "ranks": [each.__dict__ for each in self.ranks],
            "children": self.children,
            "bins": {"ece_paper": MASS_BINS, "ece_guo": WIDTH_BINS},
            "trees": self.trees.as_dict(),
        }


def diagnose(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    children: int = CHILDREN,
    progress: Callable[[float], None] = lambda _: None,
) -> Diagnosis:
    """Answer prompts with the engine's policy, then probe the drafter along the answers."""
    steps: list[Step] = []
    probes: list[Probe] = []
    children = min(children, engine.target.vocab_size)
    for done, prompt in enumerate(prompts):
        own = [cycle[0] for cycle in engine.run([prompt], [params])]
        progress((done + 0.5) / len(prompts))
        answer = [token for step in own for token in step.tokens]
        probes += probe(engine.target, engine.drafter, prompt, answer, children)
        steps += own
        progress((done + 1) / len(prompts))
    if not probes:
        raise InputError("nothing was drafted, so there is nothing to judge; give longer prompts or another drafter")
    return Diagnosis(by_rank(probes), TreeFigures.of(steps), children)
