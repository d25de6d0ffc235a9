"""Chooses the children of nodes from a drafter's logits; every request has its own sampling."""

from __future__ import annotations

from torch import Tensor

from windfall.engine.gpu.batch.state import BatchState
from windfall.engine.gpu.batch.target import Kind
from windfall.engine.gpu.drafters import Drafted, as_logits
from windfall.kernels.pair_children import PairCandidates
from windfall.kernels.top import top_children


class SeatSampler:
    """For the requests of a round, which are of one kind of sampling."""

    def __init__(self, state: BatchState, kind: Kind):
        self.state, self.kind = state, kind

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
        state, cutoff = self.state, None
        if self.kind.filtered:
            logits = as_logits(logits)
            cutoff = state.cutoffs(logits, owners)
        noise = positions, state["seed"], state["temperature"], state["kappa"]
        return top_children(logits, k, *noise, tokens, offset, owners=owners, cutoff=cutoff, out=out)

    @property
    def warmth(self) -> tuple[Tensor, Tensor] | None:
        """Temperature and kappa of each request, in coupled drafting."""
        return (self.state["temperature"], self.state["kappa"]) if self.kind.coupled else None
