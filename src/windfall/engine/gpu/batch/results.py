"""The results of a round as the host reads them: the Step of each request, and what became of a sample of trees."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
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
    """A copy of the results of one round, which stays valid."""

    def __init__(self, arrays: Published, late_texts: list[LateText], sizes: Sizes, turn: int):
        """`late_texts`: of the requests that took part; `turn`: of the sample, see `Round`."""
        texts = self.texts = len(late_texts)
        self.late_texts, self.sizes, self.drafted = late_texts, sizes, sizes.passes > 0
        self.seconds, self.recorded = Split(), False  # of the round, as Steps report them
        self._known = {name: arrays[name][: texts + (name == "starts")].copy() for name in OF_REQUESTS}
        self.starts: list[int] = self._known["starts"].tolist()
        of_rows = OF_ROWS if self.drafted else OF_ROWS[:1]
        self._known |= {name: arrays[name][: self.starts[-1]].copy() for name in of_rows}
        drawn = self._known["tokens"][:, : self._known["accepted"].max()]
        self.tokens: list[list[int]] = drawn.tolist()  # of each request; those after the accepted ones mean nothing
        self.accepted: list[int] = self._known["accepted"].tolist()
        self.rows: list[int] = (self._known["starts"][1:] - self._known["starts"][:-1]).tolist()  # verified
        self.taken = [0] * texts  # the tokens that each text has taken, which may end before the accepted ones do
        self.ends = [0] * texts  # the number of all tokens of each text since its prompt
        self.sampled = [(turn + place) % texts for place in range(min(SAMPLED, texts))] if self.drafted else []
        if self.drafted:
            count = int(arrays["sample_count"][: len(self.sampled)].max())
            sample = slice(len(self.sampled)), slice(1, count)  # without the roots
            self._count = arrays["sample_count"][: len(self.sampled)].copy()
            self._sample = {name: arrays[f"sample_{name}"][sample].copy() for name in OF_TREES}

    def path(self, seat: int) -> Tensor:
        """The accepted nodes of a request's verified tree."""
        return torch.from_numpy(self._known["path"][seat, : self.accepted[seat]] - self.starts[seat])

    def tree(self, seat: int) -> DraftTree:
        """The verified tree of a request."""
        if not self.drafted:
            return DraftTree.root(int(self._known["row_tokens"][seat]))
        own = slice(self.starts[seat], self.starts[seat + 1])
        tokens, parents, logq, score, depth, rank = (self._known[name][own] for name in OF_ROWS[:6])
        parents = parents - self.starts[seat]
        parents[0] = -1
        return DraftTree.of(Arrays(tokens, parents, logq, score, depth, rank, np.full(len(tokens), np.nan, np.float32)))

    def outcome(self, seconds: float) -> Outcome:
        """What became of the drafted nodes of the sampled requests."""
        tree, shape = self._sample, self._sample["key"].shape
        real = (np.arange(1, shape[1] + 1) < self._count[:, None]) & (tree["key"] > -np.inf)
        verified, accepted = np.zeros((2, shape[0], shape[1] + 1), bool)  # the root has a place here
        place = np.full(self.texts, -1)
        place[self.sampled] = np.arange(len(self.sampled))
        owner = np.repeat(place, np.diff(self._known["starts"]))
        mine = owner >= 0
        verified[owner[mine], self._known["nodes"][mine]] = True
        rows = self._known["path"][self.sampled]
        at, step = np.nonzero(rows >= 0)
        accepted[at, self._known["nodes"][rows[at, step]]] = True
        number = np.full((shape[0], shape[1] + 1), -1)  # of each node in the outcome
        number[:, 1:][real] = np.arange(real.sum())
        of = np.nonzero(real)[0]
        return Outcome(
            sizes=self.sizes,
            requests=len(self.sampled),
            owner=of,
            parents=number[of, tree["parents"][real]],
            depth=tree["depth"][real].astype(np.int64),
            rank=tree["rank"][real].astype(np.int64),
            logq=tree["logq"][real],
            key=tree["key"][real],
            expanded=tree["taken"][real] & (tree["depth"][real] < self.sizes.passes),
            verified=verified[:, 1:][real],
            accepted=accepted[:, 1:][real],
            seconds=seconds,
        )


class BatchStep(Step):
    """A Step that takes everything from the results of its round when it is read: most callers read little of it."""

    whole_tree = False
    _results: Results
    _seat: int

    def __init__(self, results: Results, seat: int, finish: str | None = None, prefill_seconds: float = 0.0):
        known = self.__dict__  # a Step is frozen, and this is made for every request in every round
        known["_results"], known["_seat"] = results, seat
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
        results, seat = self._results, self._seat
        rows = results.rows[seat]
        return results.taken[seat], rows, results.accepted[seat] - 1, rows - 1, results.sizes.passes

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
    def late_text(self) -> LateText:
        """The text of all Steps of the request."""
        return self._results.late_texts[self._seat]

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
