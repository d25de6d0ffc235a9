"""One text being generated: its tokens, its policy, and when it ends."""

from __future__ import annotations

from collections.abc import Callable

import torch

from windfall.core.detokenizer import Detokenizer
from windfall.core.sampling import Dice, Sampler
from windfall.core.tree import DraftTree
from windfall.core.types import SamplingParams, Scores, Verdict
from windfall.core.verify import walk
from windfall.costs.acceptance import Calibrator
from windfall.costs.curves import Costs
from windfall.costs.online import OnlineCosts
from windfall.model.target import Target
from windfall.policies.base import TreePolicy
from windfall.policies.context import Context


class Sequence:
    """Tokens are accepted one by one, so that a text ends at the same token however many came at once."""

    def __init__(self, prompt: list[int], params: SamplingParams, policy: TreePolicy, target: Target, coupled: bool):
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.params = params
        self.policy = policy
        self.sampler = Sampler(params, len(prompt))
        self.dice = Dice(params, self.tokens) if coupled and not params.greedy else None
        self.text = Detokenizer(target.tokenizer, params.stop)
        self.finish: str | None = None
        self.endings: list[str | None] = []  # of tokens that were drawn but not accepted yet: how each ends the text
        self.drafted = 0  # tokens that the drafter has taken in
        self._eos = frozenset(target.eos if params.eos is None else params.eos)
        limit = params.max_new_tokens
        self.end = len(prompt) + (limit if target.context is None else min(limit, target.context - len(prompt)))

    @property
    def regime(self) -> str:
        """What draft confidence means depends on how tokens are drawn."""
        return "greedy" if self.params.greedy else "coupled" if self.dice else "sampled"

    def context(self, costs: Costs, calibrator: Calibrator, online_costs: OnlineCosts | None = None) -> Context:
        if self.dice:
            self.dice.kappa = calibrator.kappa
        room = self.end - len(self.tokens)
        return Context(len(self.tokens), room, self.params.temperature, costs, calibrator, online_costs)

    def draws(self, tree: DraftTree, scores: Scores) -> Callable[[int], int]:
        """A function: node → the target's own token after it."""
        if scores.draws is not None:
            return scores.draws.__getitem__
        return self.sampler.draws(tree, scores.logits, self.tokens)

    def judge(self, tree: DraftTree, scores: Scores) -> Verdict:
        """The path of a scored tree that the target keeps, and its next token.

        If the caller gave processors or criteria, they are called as in plain decoding: once for each token, in turn,
        and not after the end of the text.
        """
        draw = self.draws(tree, scores)
        if not (self.params.processors or self.params.criteria):
            return walk(tree, draw)
        ahead = list(self.tokens)

        def ends(token: int) -> bool:
            ahead.append(token)
            self.endings.append(self._ending(ahead))
            return self.endings[-1] is not None

        return walk(tree, draw, ends)

    def accept(self, tree: DraftTree, verdict: Verdict) -> tuple[tuple[int, ...], str]:
        """Append the target's tokens up to the first that ends the text; returns those taken, and their text."""
        before = len(self.tokens)
        for token in [*tree.arrays.tokens[verdict.path.numpy()[1:]].tolist(), verdict.bonus]:
            self.tokens.append(token)
            self.finish = self.endings.pop(0) if self.endings else self._ending(self.tokens)
            if self.finish:
                break
        return tuple(self.tokens[before:]), self.text.take(final=self.finish is not None)

    def _ending(self, tokens: list[int]) -> str | None:
        """How the last of these tokens ends the text, or None. All criteria are asked, as transformers does."""
        stopped = self.text.push(tokens[-1]) or tokens[-1] in self._eos
        if not stopped and self.params.criteria:
            ids = torch.tensor([tokens])
            answers = [bool(torch.as_tensor(ask(ids, None)).all()) for ask in self.params.criteria]
            stopped = any(answers)
        if stopped:
            return "stop"
        return "length" if len(tokens) >= self.end else None
