"""The results of a round as the host reads them: the Step of each request, and what became of a sample of trees."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windfall.core.detokenizer import LateText
from windfall.core.tree import Arrays, DraftTree
from windfall.core.types import Counts, Split, Step
from windfall.engine.gpu.batch.round import SAMPLED
from windfall.policies.budget import Outcome, Sizes

Published = Mapping[str, Any]  # numpy arrays by name, see `Round.published`
OF_ROWS = ("row_tokens", "parents", "logq", "score", "depth", "rank", "nodes")
OF_REQUESTS = ("accepted", "tokens", "path", "starts")
OF_TREES = ("parents", "depth", "rank", "logq", "key", "taken")


class Results:
    """A copy of the results of one round, which stays valid. Any Step of the round keeps it in memory."""

    def __init__(self, arrays: Published, texts: int, sizes: Sizes):
        """`texts`: the number of requests that took part."""
        self.texts, self.sizes, self.drafted = texts, sizes, sizes.passes > 0
        self.seconds, self.recorded = Split(), False  # of the round, as Steps report them
        self.arrays = {name: arrays[name][: texts + (name == "starts")].copy() for name in OF_REQUESTS}
        self.starts: list[int] = self.arrays["starts"].tolist()
        of_rows = OF_ROWS if self.drafted else OF_ROWS[:1]
        self.arrays |= {name: arrays[name][: self.starts[-1]].copy() for name in of_rows}
        drawn = self.arrays["tokens"][:, : self.arrays["accepted"].max()]
        self.tokens: list[list[int]] = drawn.tolist()  # of each request; those after the accepted ones mean nothing
        self.accepted: list[int] = self.arrays["accepted"].tolist()
        self.rows: list[int] = (self.arrays["starts"][1:] - self.arrays["starts"][:-1]).tolist()  # verified
        self.taken = [0] * texts  # the tokens that each text has taken, which may end before the accepted ones do
        self.ends = [0] * texts  # the number of all tokens of each text since its prompt

    @cached_property
    def counts(self) -> list[Counts]:
        """Those of each Step; read them when the texts have taken their tokens."""
        accepted, drafted = (self.arrays["accepted"] - 1).tolist(), [rows - 1 for rows in self.rows]
        return [*zip(self.taken, self.rows, accepted, drafted, repeat(self.sizes.passes), strict=False)]

    def path(self, seat: int) -> Tensor:
        """The accepted nodes of a request's verified tree."""
        return torch.from_numpy(self.arrays["path"][seat, : self.accepted[seat]] - self.starts[seat])

    def tree(self, seat: int) -> DraftTree:
        """The verified tree of a request."""
        if not self.drafted:
            return DraftTree.root(int(self.arrays["row_tokens"][seat]))
        own = slice(self.starts[seat], self.starts[seat + 1])
        tokens, parents, logq, score, depth, rank = (self.arrays[name][own].copy() for name in OF_ROWS[:6])
        parents -= self.starts[seat]
        parents[0] = -1
        return DraftTree.of(Arrays(tokens, parents, logq, score, depth, rank, np.full(len(tokens), np.nan, np.float32)))


class Sample:
    """The whole trees of some requests of a round, from which acceptance is learned."""

    def __init__(self, arrays: Published, results: Results, turn: int):
        """`turn`: of the sample, see `Round`."""
        texts = results.texts
        self.sampled = [(turn + place) % texts for place in range(min(SAMPLED, texts))]
        self._results, self._count = results, arrays["sample_count"][: len(self.sampled)].copy()
        own = slice(len(self.sampled)), slice(1, int(self._count.max()))  # without the roots
        self._trees = {name: arrays[f"sample_{name}"][own].copy() for name in OF_TREES}

    def outcome(self, seconds: float) -> Outcome:
        """What became of the drafted nodes of the sampled requests."""
        results, tree, shape = self._results, self._trees, self._trees["key"].shape
        real = (np.arange(1, shape[1] + 1) < self._count[:, None]) & (tree["key"] > -np.inf)
        verified, accepted = np.zeros((2, shape[0], shape[1] + 1), bool)  # the root has a place here
        place, nodes = np.full(results.texts, -1), results.arrays["nodes"]
        place[self.sampled] = np.arange(len(self.sampled))
        owner = np.repeat(place, results.rows)
        mine = owner >= 0
        verified[owner[mine], nodes[mine]] = True
        rows = results.arrays["path"][self.sampled]
        at, step = np.nonzero(rows >= 0)
        accepted[at, nodes[rows[at, step]]] = True
        number = np.full((shape[0], shape[1] + 1), -1)  # of each node in the outcome
        number[:, 1:][real] = np.arange(real.sum())
        of = np.nonzero(real)[0]
        return Outcome(
            sizes=results.sizes,
            requests=len(self.sampled),
            owner=of,
            parents=number[of, tree["parents"][real]],
            depth=tree["depth"][real].astype(np.int64),
            rank=tree["rank"][real].astype(np.int64),
            logq=tree["logq"][real],
            key=tree["key"][real],
            expanded=tree["taken"][real] & (tree["depth"][real] < results.sizes.passes),
            verified=verified[:, 1:][real],
            accepted=accepted[:, 1:][real],
            seconds=seconds,
        )


class BatchStep(Step):
    """A Step that takes everything from the results of its round when it is read: most callers read little of it."""

    whole_tree = False
    late_text: LateText  # of all Steps of the request
    _results: Results
    _seat: int

    def __init__(
        self, results: Results, seat: int, late: LateText, finish: str | None = None, prefill_seconds: float = 0.0
    ):
        known = self.__dict__  # a Step is frozen, and this is made for every request in every round
        known["_results"], known["_seat"], known["late_text"] = results, seat, late
        if finish or prefill_seconds:
            known["finish"], known["prefill_seconds"] = finish, prefill_seconds

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self._results.tokens[self._seat][: self._results.taken[self._seat]])

    @property
    def rows(self) -> int:
        return self._results.rows[self._seat]

    @property
    def accepted(self) -> int:
        return self._results.accepted[self._seat] - 1

    @property
    def counts(self) -> Counts:
        return self._results.counts[self._seat]

    @property
    def draft_passes(self) -> int:
        return self._results.sizes.passes

    @property
    def seconds(self) -> Split:
        return self._results.seconds

    @property
    def recorded(self) -> bool:
        return self._results.recorded

    @property
    def number(self) -> int:
        """The number of this Step there."""
        return self.late_text.number(self._results.ends[self._seat])

    @cached_property
    def text(self) -> str:
        return self.late_text[self.number]

    @cached_property
    def tree(self) -> DraftTree:
        return self._results.tree(self._seat)

    @cached_property
    def path(self) -> Tensor:
        return self._results.path(self._seat)

    @property
    def drafted(self) -> DraftTree:
        """The verified tree: the whole tree stays on the device."""
        return self.tree

    @cached_property
    def kept(self) -> Tensor:
        return torch.arange(len(self.tree))

    @property
    def drafted_tokens(self) -> int:
        return self.rows - 1
