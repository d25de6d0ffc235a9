"""A batch whose sequences take every token at the same time.

Logits processors and stopping criteria may keep state, or look at several rows of a batch. Then they must be called as
in transformers' own loop: once for each step, with all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from windfall.core.tree import DraftTree
from windfall.core.types import Scores, Verdict
from windfall.core.verify import children_of

if TYPE_CHECKING:
    from windfall.engine.sequence import Sequence


class Lockstep:
    """Judges the trees of all sequences together: a step of the walk is one token for each of them.

    The walk ends as soon as one sequence draws a token that its tree does not contain.
    """

    sequences: list[Sequence]  # all rows, set by the engine; those that have ended leave the walk

    def __init__(
        self,
        ids: Tensor,
        process: Callable[[Tensor, Tensor], Tensor],
        stop: Callable[[Tensor], Tensor],
        pad: int | None,
    ):
        """`ids` are the padded prompts [B, L]. `process(ids, scores [B, V])` returns new scores, `stop(ids)` which rows
        end [B]. A row that has ended goes on with `pad`; its scores are then zeros. Without `pad` it goes on as before,
        until all rows have ended."""
        self.ids, self.process, self.stop, self.pad = ids, process, stop, pad
        self._ended = [False] * len(ids)

    def judge(self, live: list[Sequence], trees: list[DraftTree], scores: list[Scores]) -> list[Verdict]:
        """The verdict of every live sequence; `Sequence.endings` says where each of them ends."""
        rows = [self.sequences.index(sequence) for sequence in live]
        children = [children_of(tree) for tree in trees]
        paths, bonus = [[0] for _ in live], [0] * len(live)
        going = list(range(len(live)))
        while going:
            logits = {rows[i]: scores[i].logits[paths[i][-1]] for i in going}
            depths = {rows[i]: len(paths[i]) - 1 for i in going}
            tokens = self._step(logits, depths)
            over = all(self._ended)
            for i in going:
                bonus[i] = tokens[rows[i]]
                leaves = over or (self.pad is not None and self._ended[rows[i]])
                live[i].endings.append("stop" if leaves else None)
            going = [i for i in going if live[i].endings[-1] is None]
            following = [children[i].get((paths[i][-1], bonus[i]), -1) for i in going]
            if min(following, default=-1) < 0:
                break
            for i, node in zip(going, following, strict=True):
                paths[i].append(node)
        return [Verdict(torch.from_numpy(np.array(path)), token) for path, token in zip(paths, bonus, strict=True)]

    def _step(self, logits: dict[int, Tensor], depths: dict[int, int]) -> list[int]:
        """Draw the next token of each row that goes on, and ask which rows end with it."""
        first = next(iter(logits.values()))
        scores = torch.zeros(len(self.ids), len(first), device=self.ids.device)
        for row, own in logits.items():
            scores[row] = own
        scores = self.process(self.ids, scores)
        tokens = [0 if self.pad is None else self.pad] * len(self.ids)
        for row, depth in depths.items():
            sequence = self.sequences[row]
            position = torch.tensor([len(sequence.tokens) + depth])
            tokens[row] = int(sequence.sampler.pick(scores[row : row + 1], position))
        self.ids = torch.cat([self.ids, torch.tensor(tokens, device=self.ids.device)[:, None]], 1)
        stopped = self.stop(self.ids).tolist()
        self._ended = [before or now for before, now in zip(self._ended, stopped, strict=True)]
        return tokens
