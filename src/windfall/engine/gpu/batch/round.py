"""The device work of one round: draft passes for all requests, one verify pass, and the end of each accepted path."""

from __future__ import annotations

from bisect import bisect_left
from functools import partial

import torch
from torch import Tensor

from windfall.engine.gpu.batch.drafters import BatchDrafter
from windfall.engine.gpu.batch.sampler import SeatSampler
from windfall.engine.gpu.batch.state import BatchState
from windfall.engine.gpu.batch.target import BatchTarget, Kind
from windfall.engine.gpu.drafters import Drafted
from windfall.engine.gpu.mailbox import Mailbox
from windfall.engine.gpu.transfer import PackedBuffer
from windfall.kernels.batch import accept_rows, choose_rows, describe_rows, root_rows, sample_trees
from windfall.kernels.batch_rows import BatchRows, Described, Outcome, Sampled
from windfall.kernels.grow import grow
from windfall.kernels.pages import max_tiles
from windfall.kernels.pair_children import PairCandidates, grow_levels
from windfall.kernels.rules import Rule
from windfall.kernels.trees import NO_NODE, Calibration, NextPass, TreeArrays, first_rows
from windfall.policies.budget import Sizes

ROUND_ROWS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # of verify passes: a graph for each
MAX_ROUND_ROWS = ROUND_ROWS[-1]
RESULT_BLOCKS = 3  # rounds whose results stay readable on the host
SAMPLED = 16  # requests of a round whose whole trees the host gets


class Round:
    """Buffers of a batch of requests, and the work on them. Passes only launch kernels."""

    def __init__(self, state: BatchState, target: BatchTarget, drafter: BatchDrafter | None):
        self.state, self.target, self.drafter = state, target, drafter
        device, seats, pending, long = state.device, state.seats, state.pending, torch.long
        capacity, deepest = state.trees.ancestors.shape[1:]
        rows = MAX_ROUND_ROWS
        number = torch.float32
        self.published = PackedBuffer(
            device,
            accepted=(long, (seats,)),
            tokens=(long, (seats, pending)),
            path=(long, (seats, pending)),
            starts=(long, (seats + 1,)),
            row_tokens=(long, (rows,)),
            nodes=(long, (rows,)),
            parents=(long, (rows,)),
            depth=(long, (rows,)),
            rank=(long, (rows,)),
            logq=(number, (rows,)),
            score=(number, (rows,)),
            sample_count=(long, (SAMPLED,)),
            sample_parents=(torch.int16, (SAMPLED, capacity)),
            sample_depth=(torch.int16, (SAMPLED, capacity)),
            sample_rank=(torch.int16, (SAMPLED, capacity)),
            sample_taken=(torch.bool, (SAMPLED, capacity)),
            sample_logq=(number, (SAMPLED, capacity)),
            sample_key=(number, (SAMPLED, capacity)),
        )
        self.results = Mailbox(self.published, RESULT_BLOCKS)
        there = self.published.device
        self.outcome = Outcome(
            accepted=there["accepted"],
            tokens=there["tokens"],
            path=there["path"],
            source=torch.zeros(seats, pending, dtype=long, device=device),
            goal=torch.zeros(seats, pending, dtype=long, device=device),
        )
        self._rows = BatchRows(
            tokens=there["row_tokens"],
            owners=torch.zeros(rows, dtype=torch.int32, device=device),
            nodes=there["nodes"],
            parents=there["parents"],
            depth=there["depth"],
            positions=torch.zeros(rows, dtype=long, device=device),
            slots=torch.zeros(rows, dtype=long, device=device),
            reach=torch.zeros(rows, dtype=long, device=device),
            lineage=torch.zeros(rows, deepest, dtype=torch.int32, device=device),
            starts=there["starts"],
            tiles=torch.zeros(max_tiles(rows, seats + 1, target.tile_rows) + 1, dtype=torch.int32, device=device),
        )
        self._next: dict[int, NextPass] = {}
        self.expanded = torch.full((seats, drafter.staged if drafter else 1), NO_NODE, device=device)
        self.staged = torch.zeros(seats, dtype=long, device=device)
        self._columns = torch.zeros(seats, dtype=long, device=device)  # of the drafter, as `grow` counts them
        self._roots = torch.zeros(seats, 1, dtype=long, device=device)
        self._summary = torch.zeros(seats, pending + 2, 6, device=device)
        self._turn = torch.zeros(1, dtype=long, device=device)  # the first request of the next sample
        self._described = Described(*(there[name] for name in Described._fields))
        self._sampled = Sampled(*(there[f"sample_{name}"] for name in Sampled._fields))

    def next_rows(self, width: int) -> NextPass:
        """Buffers for the rows of a draft pass of this width."""
        if width not in self._next:
            assert self.drafter is not None
            device, seats = self.state.device, self.state.seats
            deepest = self.state.trees.ancestors.shape[2] - 1
            long = partial(torch.zeros, seats, width, dtype=torch.long, device=device)
            self._next[width] = NextPass(
                nodes=long(),
                tokens=long(),
                positions=long(),
                slots=long(),
                parent_slots=long(),
                own_slots=long(),
                mask=None,
                expanded=self.expanded,
                staged=self.staged,
                length=self._columns,
                base=self.drafter.base,
                summary=self._summary,
                lineage=torch.zeros(seats, width, deepest, dtype=torch.int32, device=device),
            )
        return self._next[width]

    def first_draft_pass(self, seats: int, sizes: Sizes, pending: int, rule: Rule, kind: Kind) -> None:
        """Let the drafter take in the pending tokens, at most `pending` of a request, and expand all roots."""
        self._grow_roots(seats, sizes, self._first_logits(seats, pending, kind), rule, kind)

    def _first_logits(self, seats: int, pending: int, kind: Kind) -> Drafted:
        """Let the drafter take in the pending tokens; returns the logits after the roots, or their candidates."""
        drafter, state = self.drafter, self.state
        assert drafter is not None
        logits = drafter.first_pass(seats, pending, SeatSampler(state, kind))
        torch.sub(state.draft_lengths[:seats], drafter.first, out=self._columns[:seats])
        return logits

    def _grow_roots(self, seats: int, sizes: Sizes, logits: Drafted, rule: Rule, kind: Kind) -> None:
        """Add the children of all roots."""
        assert self.drafter is not None
        owners, sampler = self.drafter.rows_of(seats, 1)[0], SeatSampler(self.state, kind)
        self._grow(seats, sizes, logits, self._roots[:seats], owners, self._columns[:seats] - 1, rule, sampler)

    def next_draft_pass(self, seats: int, sizes: Sizes, rule: Rule, kind: Kind) -> None:
        """Expand the nodes that the pass before has chosen."""
        drafter, rows = self.drafter, self.next_rows(sizes.width)
        assert drafter is not None
        sampler = SeatSampler(self.state, kind)
        logits = drafter.next_pass(rows, seats, sampler)
        owners, after = drafter.rows_of(seats, sizes.width)[0], first_rows(rows, seats)
        self._grow(seats, sizes, logits, after.nodes.clone(), owners, after.positions.flatten(), rule, sampler)

    def draft_passes(self, seats: int, sizes: Sizes, pending: int, rule: Rule, kind: Kind) -> None:
        """All draft passes of a round. A block head's levels after the first are grown in one launch."""
        logits = self._first_logits(seats, pending, kind)
        if isinstance(logits, PairCandidates) and sizes.k <= logits.levels.candidates:
            trees, rows = first(self.state.trees, seats), first_rows(self.next_rows(sizes.width), seats)
            given = (sizes.passes, sizes.k, rule, logits, self._terms(seats, rule))
            grow_levels(trees, self._roots[:seats], rows, *given)
            return
        self._grow_roots(seats, sizes, logits, rule, kind)
        for _ in range(1, sizes.passes):
            self.next_draft_pass(seats, sizes, rule, kind)

    def _terms(self, seats: int, rule: Rule) -> Calibration | None:
        """The calibration of each request, if the rule reads it."""
        return Calibration._make(array[:seats] for array in self.state.calibration) if rule.calibrated else None

    def _grow(
        self,
        seats: int,
        sizes: Sizes,
        logits: Drafted,
        nodes: Tensor,
        owners: Tensor,
        positions: Tensor,
        rule: Rule,
        sampler: SeatSampler,
    ) -> None:
        """Add the children of these nodes to the trees, and choose the nodes of the next pass."""
        drafter = self.drafter
        assert drafter is not None
        trees, after = first(self.state.trees, seats), first_rows(self.next_rows(sizes.width), seats)
        terms = self._terms(seats, rule)
        names, offset = drafter.vocabulary, drafter.first + 1
        values, tokens = sampler.children(logits, sizes.k, owners, positions, names, offset)
        shape = (*nodes.shape, sizes.k)
        grow(trees, nodes, tokens.view(shape), values.view(shape), after, rule, terms)

    def rows(self, count: int, seats: int) -> BatchRows:
        """Buffers for a pass of this number of rows."""
        tiles = max_tiles(count, seats + 1, self.target.tile_rows) + 1
        sized = [array[:count] for array in self._rows[:-2]]
        return BatchRows._make([*sized, self._rows.starts[: seats + 1], self._rows.tiles[:tiles]])

    def verify(self, seats: int, sizes: Sizes, kind: Kind, prompts: int = 0) -> None:
        """The verify pass: choose rows, run the target, commit the accepted paths, start new trees, publish results.

        prompts: rows of waiting prompts that share the pass.
        """
        state, target, trees = self.state, self.target, first(self.state.trees, seats)
        lengths, tables, live = state.lengths[:seats], state.tables[:seats], state["live"]
        rows = self.rows(sizes.rows if sizes.passes else seats, seats)
        if sizes.passes:
            limits, floor = state["limits"][:seats], state["floor"]
            choose_rows(trees, live, limits, floor, lengths, target.staging, target.tile_rows, rows)
            described = Described._make(array[: sizes.rows] for array in self._described)
            describe_rows(trees, rows, described)
            sample_trees(trees, live, self._turn, self._sampled)
        else:
            root_rows(trees, live, lengths, tables, rows)
        scored = target.score(rows, seats, bool(sizes.passes), prompts)
        draws = target.draw(scored, rows.owners, kind)
        outcome = Outcome._make(array[:seats] for array in self.outcome)
        staged = (self.expanded[:seats], self.staged[:seats])
        accept_rows(draws, rows, live, lengths, tables, outcome, trees, *staged)
        if sizes.passes:
            state.set_pending(outcome.tokens, target.commit(outcome, scored.states, seats), outcome.accepted)
        elif self.drafter is not None:  # the rows are in their pages already
            state.add_pending(outcome.tokens[:, 0], scored.states, outcome.accepted)
        self.results.publish()


def first(trees: TreeArrays, seats: int) -> TreeArrays:
    """The trees of the first requests."""
    return TreeArrays._make(array[:seats] for array in trees)


def round_rows(count: int) -> int:
    """The next size of a verify pass."""
    return ROUND_ROWS[bisect_left(ROUND_ROWS, min(count, MAX_ROUND_ROWS))]
