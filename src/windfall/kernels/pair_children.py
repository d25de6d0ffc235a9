"""The children of nodes drafted by a block head: the candidates of a level, corrected by pair scores and sorted."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from windfall.kernels.backend import on_triton
from windfall.kernels.grow import grow
from windfall.kernels.levels import MIN_REST, Carries, Levels, PairTables, recur
from windfall.kernels.rules import Rule
from windfall.kernels.trees import Calibration, NextPass, TreeArrays


class PairCandidates(NamedTuple):
    """The children of n nodes, not computed yet. Tokens that are no candidates keep their share of the rest.

    Columns count the tokens of a text; a node's depth is its column less that of its root.
    """

    levels: Levels
    previous: Tensor  # [n] long: the token of each node
    columns: Tensor | None  # [n] long; None: the nodes are the roots
    lengths: Tensor  # [N] long: a root's column is its request's length + `offset`
    offset: int
    tables: PairTables | None  # None: there are no pair scores
    warmth: tuple[Tensor, Tensor] | None = None  # temperature and kappa, [N] fp32 each, if the levels have noise
    owners: Tensor | None = None  # [n] integers: the request of each node; None: there is one
    carries: Carries | None = None  # if the tables have `carried`
    entropy_levels: Levels | None = None  # without noise, and with `rest`; for entropies

    @property
    def rows(self) -> Tensor:
        """[n] the row of each node's children in `levels`; -1: it has none."""
        own = torch.zeros_like(self.previous) if self.owners is None else self.owners.long()
        depth = torch.zeros_like(own) if self.columns is None else self.columns - self.lengths[own] - self.offset
        inside = (depth >= 0) & (depth < self.levels.depth)
        return torch.where(inside, own * self.levels.depth + depth, -1)

    @property
    def depends_on_path(self) -> bool:
        """Whether a node's children depend on more than its token and its level."""
        return self.carries is not None

    def after(self, next_pass: NextPass, owners: Tensor | None) -> PairCandidates:
        """The candidates of the nodes of the next pass, where these are those of the roots."""
        tokens, carries = next_pass.tokens.flatten(), self.carries
        if carries is not None:
            above, here = (
                (slots + carries.here[:, None]).flatten() for slots in (next_pass.parent_slots, next_pass.own_slots)
            )
            carries = carries._replace(above=above, here=here)
        return self._replace(previous=tokens, columns=next_pass.positions.flatten(), owners=owners, carries=carries)

    def children(self, k: int) -> tuple[Tensor, Tensor]:
        """The k likeliest children's log-probabilities and tokens → [n, k]; -inf where there are fewer candidates."""
        count = self.levels.candidates
        values, tokens = pair_children(self, min(k, count))
        if count < k:
            values = torch.nn.functional.pad(values, (0, k - count), value=-torch.inf)
            tokens = torch.nn.functional.pad(tokens, (0, k - count))
        return values, tokens

    def entropy(self) -> Tensor:
        """Of the distribution after each node, without noise, [n] nats."""
        levels, own = self.entropy_levels, self.rows.clamp(min=0)
        assert levels is not None and levels.rest is not None
        logq = pair_children(self._replace(levels=levels, warmth=None), levels.candidates)[0]
        share = (1 - logq.exp().sum(-1)).clamp(min=0)
        before = (1 - levels.logq[own].exp().sum(-1)).clamp(min=MIN_REST)
        lost = before.log() - share.clamp(min=MIN_REST).log()  # what normalising took from the rest
        found: Tensor = torch.special.entr(logq.exp()).sum(-1) + share * (lost - levels.rest[own])
        return found.nan_to_num()


def pair_children(given: PairCandidates, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest candidates' log-probabilities after each node, highest first, and their tokens → [n, k].

    A node without a row has -inf.
    """
    if on_triton(given.levels.logq):
        from windfall.kernels.triton.pair_children import pair_children as run

        return run(*given[:-1], k=k)
    return reference(given, k)


def reference(given: PairCandidates, k: int) -> tuple[Tensor, Tensor]:
    """`pair_children` with torch."""
    levels, tables, rows = given.levels, given.tables, given.rows
    own = rows.clamp(min=0)
    logq, tokens = levels.logq[own], levels.tokens[own]
    rest = (1 - logq.exp().sum(-1, keepdim=True)).clamp(min=MIN_REST).log()
    if tables is not None:
        query = _queries(given, tables, rows, own)
        scores = (query[:, None] * tables.after[tokens].float()).sum(-1)
        if given.warmth is not None:
            temperature, kappa = given.warmth
            scale = (temperature * kappa).reciprocal().where(temperature != 0, 1.0)
            scores = scores * (scale if given.owners is None else scale[given.owners.long()][:, None])
        logq = logq + scores
    logq = torch.cat([logq, rest], -1).log_softmax(-1)[:, :-1]
    logq = logq.masked_fill((rows < 0)[:, None], -torch.inf)
    values, order = logq.sort(dim=-1, descending=True, stable=True)
    return values[:, :k].contiguous(), tokens.gather(1, order)[:, :k].contiguous()


def _queries(given: PairCandidates, tables: PairTables, rows: Tensor, own: Tensor) -> Tensor:
    """The query of each node [n, R], see `PairTables`; what it carries is written."""
    before = tables.before[given.previous].float()
    state = None if given.levels.hidden is None else given.levels.hidden[own].float()
    if tables.parts == 1:
        return before if state is None else before * state
    assert state is not None
    if tables.parts == 2:
        gate, value = before.chunk(2, -1)
        return torch.sigmoid(gate + state) * value
    carries = given.carries
    assert carries is not None and tables.carried is not None
    carry = None if carries.above is None else carries.states[carries.above]
    joint = before + state if carry is None else before + state + carry @ tables.carried.float().T
    query, made = recur(joint, carry)
    known = rows >= 0
    carries.states[carries.here[known]] = made[known]
    return query


def grow_levels(
    tree: TreeArrays,
    roots: Tensor,
    next_pass: NextPass,
    passes: int,
    k: int,
    rule: Rule,
    candidates: PairCandidates,
    calibration: Calibration | None = None,
) -> None:
    """All passes of trees that are only roots: each adds children as `grow` does, and chooses the nodes of the next.

    `candidates` are those of the roots, one of each request. In a batch, all arrays have one more dimension, the first.
    The mask and the lineage of the next pass are not written, since no pass has to run its rows.
    """
    levels, requests = candidates.levels, len(candidates.previous)
    next_pass = next_pass._replace(mask=None, lineage=None)
    assert k <= levels.candidates and candidates.columns is None
    first, later = (*roots.shape, k), (*next_pass.nodes.shape, k)
    if on_triton(levels.logq) and not candidates.depends_on_path:
        from windfall.kernels.triton.pair_children import grow_levels as run
        from windfall.kernels.triton.pair_children import pair_children as score

        further = requests * (levels.depth - 1) * levels.candidates if passes > 1 else 0
        values, names = score(*candidates[:-1], k=k, further=further)
        grow(tree, roots, names[:requests].view(first), values[:requests].view(first), next_pass, rule, calibration)
        if passes > 1:
            given = (levels, candidates.lengths, candidates.offset, values, names)
            run(tree, next_pass, passes - 1, rule, calibration if rule.calibrated else None, *given)
        return
    values, names = candidates.children(k)
    grow(tree, roots, names.view(first), values.view(first), next_pass, rule, calibration)
    owners = None
    if next_pass.nodes.dim() == 2:
        owners = torch.arange(requests, device=roots.device).repeat_interleave(next_pass.nodes.shape[1])
    for _ in range(1, passes):
        values, names = candidates.after(next_pass, owners).children(k)
        grow(tree, next_pass.nodes.clone(), names.view(later), values.view(later), next_pass, rule, calibration)
