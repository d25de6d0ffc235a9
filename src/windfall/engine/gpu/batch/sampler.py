"""Chooses the children of nodes from a drafter's logits; every request has its own sampling."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from windfall.engine.gpu.batch.target import Kind
from windfall.engine.gpu.drafters import Drafted, as_logits
from windfall.kernels.pair_children import PairCandidates
from windfall.kernels.top import top_children


class SamplingSettings(Protocol):
    """How the request at each seat draws its tokens."""

    def __getitem__(self, name: str) -> Tensor:
        """[seats] seed, temperature or kappa."""

    def cutoffs(self, logits: Tensor, owners: Tensor) -> Tensor:
        """The lowest logit of each row [n, V] that its request's filters keep, [n]."""


class SeatSampler:
    """For the requests of a pass, which are of one kind of sampling."""

    def __init__(self, settings: SamplingSettings, kind: Kind):
        self.settings, self.kind = settings, kind

    def children(
        self,
        logits: Drafted,
        k: int,
        owners: Tensor,
        positions: Tensor,
        tokens: Tensor | None,
        offset: int,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and tokens [n, k]; the target draws after these rows at `positions` [n] + `offset`.

        Those of logits are written to `out`, if it is given.
        """
        if isinstance(logits, PairCandidates):  # which were chosen for this sampling
            return logits.children(k)
        if not self.kind.coupled:
            return top_children(logits, k, tokens=tokens, out=out)
        settings, cutoff = self.settings, None
        if self.kind.filtered:
            logits = as_logits(logits)
            cutoff = settings.cutoffs(logits, owners)
        noise = positions, settings["seed"], settings["temperature"], settings["kappa"]
        return top_children(logits, k, *noise, tokens, offset, owners=owners, cutoff=cutoff, out=out)

    @property
    def warmth(self) -> tuple[Tensor, Tensor] | None:
        """Temperature and kappa of each request, in coupled drafting."""
        return (self.settings["temperature"], self.settings["kappa"]) if self.kind.coupled else None
