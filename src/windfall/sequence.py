"""One text being generated: its tokens, its policy, and when it ends."""

from __future__ import annotations

from collections.abc import Callable

import torch

from windfall.calibration import Calibrator
from windfall.context import Context
from windfall.cost import Costs
from windfall.detokenizer import Detokenizer
from windfall.ledger import Ledger
from windfall.policies.base import TreePolicy
from windfall.records import SamplingParams, Scores, Verdict
from windfall.sampling import Dice, Sampler
from windfall.target import Target
from windfall.tree import DraftTree


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
        self.drafted = 0  # tokens that the drafter has taken in
        self._eos = frozenset(target.eos if params.eos is None else params.eos)
        limit = params.max_new_tokens
        self.end = len(prompt) + (limit if target.context is None else min(limit, target.context - len(prompt)))

    @property
    def regime(self) -> str:
        """What draft confidence means depends on how tokens are drawn."""
        return "greedy" if self.params.greedy else "coupled" if self.dice else "sampled"

    def context(self, costs: Costs, calibrator: Calibrator, ledger: Ledger | None = None) -> Context:
        if self.dice:
            self.dice.kappa = calibrator.kappa
        room = self.end - len(self.tokens)
        return Context(len(self.tokens), room, self.params.temperature, costs, calibrator, ledger)

    def draws(self, tree: DraftTree, scores: Scores) -> Callable[[int], int]:
        """A function: node → the target's own token after it."""
        if scores.draws is not None:
            return scores.draws.__getitem__
        return self.sampler.draws(tree, scores.logits, self.tokens)

    def accept(self, tree: DraftTree, verdict: Verdict) -> tuple[tuple[int, ...], str]:
        """Append the target's tokens up to the first that ends the text; returns those taken, and their text."""
        before = len(self.tokens)
        for token in [*tree.arrays.tokens[verdict.path.numpy()[1:]].tolist(), verdict.bonus]:
            self.tokens.append(token)
            self.finish = self._ending(token)
            if self.finish:
                break
        return tuple(self.tokens[before:]), self.text.take(final=self.finish is not None)

    def _ending(self, token: int) -> str | None:
        stopped = self.text.push(token) or token in self._eos
        if not stopped and self.params.criteria:
            ids = torch.tensor([self.tokens])
            stopped = any(bool(torch.as_tensor(ask(ids, None)).all()) for ask in self.params.criteria)
        if stopped:
            return "stop"
        return "length" if len(self.tokens) >= self.end else None
