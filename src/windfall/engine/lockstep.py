"""A batch whose sequences take every token at the same time.

Logits processors and stopping criteria may keep state, or look at several rows of a batch. Then they must be called as
in transformers' own loop: once for each step, with all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from windfall.core.tree import DraftTree
from windfall.core.types import Scores, Verdict
from windfall.core.verify import children_of

if TYPE_CHECKING:
    from windfall.engine.sequence import Sequence


class Lockstep:
    """Walks down the trees of all sequences together: a step of the walk is one token of each of them.

    The walk ends as soon as one sequence draws a token that its tree does not contain.
    """

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

    def walk_trees(self, live: Mapping[int, Sequence], trees: list[DraftTree], scores: list[Scores]) -> list[Verdict]:
        """The verdict of every live sequence; `live` has them by their row of the batch."""
        scored = dict(zip(live, scores, strict=True))
        children = {row: children_of(tree) for row, tree in zip(live, trees, strict=True)}
        paths, bonus = {row: [0] for row in live}, dict.fromkeys(live, 0)
        going = list(live)
        while going:
            logits = {row: scored[row].logits[paths[row][-1]] for row in going}
            positions = {row: len(live[row].tokens) + len(paths[row]) - 1 for row in going}
            tokens = self._step(live, logits, positions)
            over, following = all(self._ended), []
            for row in going:
                bonus[row] = tokens[row]
                leaves = over or (self.pad is not None and self._ended[row])
                live[row].note_ending("stop" if leaves else None)
                if not leaves:
                    following.append((row, children[row].get((paths[row][-1], bonus[row]), -1)))
            if any(node < 0 for _, node in following):
                break
            for row, node in following:
                paths[row].append(node)
            going = [row for row, _ in following]
        return [Verdict(torch.tensor(paths[row]), bonus[row]) for row in live]

    def _step(self, live: Mapping[int, Sequence], logits: dict[int, Tensor], positions: dict[int, int]) -> list[int]:
        """Draw the next token of each row that goes on, and ask which rows end with it."""
        first = next(iter(logits.values()))
        scores = torch.zeros(len(self.ids), len(first), device=self.ids.device)
        for row, own in logits.items():
            scores[row] = own
        scores = self.process(self.ids, scores)
        tokens = [0 if self.pad is None else self.pad] * len(self.ids)
        for row, position in positions.items():
            tokens[row] = int(live[row].sampler.pick(scores[row : row + 1], torch.tensor([position])))
        self.ids = torch.cat([self.ids, torch.tensor(tokens, device=self.ids.device)[:, None]], 1)
        stopped = self.stop(self.ids).tolist()
        self._ended = [before or now for before, now in zip(self._ended, stopped, strict=True)]
        return tokens
