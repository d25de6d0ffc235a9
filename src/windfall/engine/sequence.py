"""One text being generated: its tokens, its policy, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from windfall.core.detokenizer import Detokenizer, LateText
from windfall.core.logprobs import PROCESSED, Asked, TokenLogprob, token_logprobs
from windfall.core.sampling import Dice, Sampler
from windfall.core.tree import DraftTree
from windfall.core.types import InputError, SamplingParams, Scores, Step, Verdict
from windfall.core.verify import walk
from windfall.core.wording import counted
from windfall.costs.acceptance import Calibrator
from windfall.costs.correction import Correction
from windfall.costs.curves import Costs
from windfall.costs.online import OnlineCosts
from windfall.grammar.base import Grammar
from windfall.grammar.guide import Guide
from windfall.model.target import Target
from windfall.policies.base import TreePolicy
from windfall.policies.context import Context


class Sequence:
    """Tokens are accepted one by one, so a text ends at the same token no matter how many a cycle brings."""

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        policy: TreePolicy,
        target: Target,
        coupled: bool,
        calibrators: Mapping[str, Calibrator],
        grammar: Grammar | None = None,
    ):
        """`calibrators` are by regime: what draft confidence means depends on how tokens are drawn. `grammar`: that of
        the parameters' constraint."""
        self.tokens, self.prompt_length = list(prompt), len(prompt)
        self.params = params
        self.policy = policy
        self.sampler = Sampler(params, len(prompt))
        self.dice = Dice(params, self.tokens) if coupled and not params.greedy else None
        regime = "greedy" if params.greedy else "coupled" if self.dice else "sampled"
        self.calibrator = calibrators[regime if grammar is None else f"{regime}, constrained"]
        self.correction = Correction()
        self._ends_simply = not (params.stop or params.criteria or grammar)  # by a token alone, or by its length
        self.text = Detokenizer(target.tokenizer, params.stop, self.tokens if self._ends_simply else None)
        self.late_text = LateText(self.text)  # for Steps whose text is decoded later
        self.finish: str | None = None
        self._target = target
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # until `take_prompt_logprobs`
        self._endings: list[str | None] = []  # how each token that was drawn but not accepted yet ends the text
        self._eos = frozenset(target.eos if params.eos is None else params.eos)
        self.guide = None if grammar is None else Guide(grammar, self._eos)
        limit, context = params.max_new_tokens, target.context
        self.end = len(prompt) + (limit if context is None else min(limit, context - len(prompt)))

    def resume(self, tokens: list[int]) -> None:
        """Continue a text that begins with these tokens. Their own text is not given out again.

        They may end the text, but nothing may follow the end.
        """
        if self.guide is not None:
            self._follow_grammar(self.guide, tokens)
        taken = self.extend(tokens)
        if taken < len(tokens):
            raise InputError(f"the text ends after {taken} of the {counted(len(tokens), 'token')} to resume from")
        self.text.take(final=self.finish is not None)

    def _follow_grammar(self, guide: Guide, tokens: list[int]) -> None:
        """Lead the guide along these tokens, up to the first that ends the text."""
        text = list(self.tokens)
        for place, token in enumerate(tokens):
            if not guide.legal(token):
                raise InputError(f"token {place + 1} of those to resume from does not follow the grammar")
            text.append(token)
            ending = self._ending(text)
            if ending != "stop":
                guide.go_to(tokens[: place + 1])
                ending = "stop" if guide.over else ending
            self.note_ending(ending)
            if ending is not None:
                break

    def context(self, costs: Costs, online_costs: OnlineCosts | None = None) -> Context:
        """What the policy may know besides the tree."""
        room = self.end - len(self.tokens)
        temperature, shift = self.params.temperature, self.correction.shift
        return Context(len(self.tokens), room, temperature, costs, self.calibrator, online_costs, shift)

    def begin_cycle(self, costs: Costs, online_costs: OnlineCosts | None = None) -> Context:
        """The context of a new cycle, for which the drafter gets the newest weight of the noise."""
        if self.dice:
            self.dice.kappa = self.calibrator.kappa
        if self.guide:
            self.guide.begin(self.tokens[self.prompt_length :])
        return self.context(costs, online_costs)

    def score_prompt(self) -> None:
        """Compute the log-probabilities of the prompt, if they are wanted and no token was generated yet."""
        count = self.params.prompt_logprobs
        if count is None or len(self.tokens) > self.prompt_length:
            return
        known: list[TokenLogprob | None] = [None]  # nothing comes before the first token
        for logits in self._target.prompt_logits(self.tokens):
            known += token_logprobs(logits, self.tokens[len(known) : len(known) + len(logits)], count)
        self._prompt_logprobs = tuple(known)

    def take_prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """What `score_prompt` computed, once."""
        known, self._prompt_logprobs = self._prompt_logprobs, None
        return known

    def asked_logprobs(self, tree: DraftTree, scores: Scores, verdict: Verdict) -> Asked | None:
        """The log-probabilities that are wanted for the tokens of a verdict of `walk_tree`; None: none are."""
        count = self.params.logprobs
        if count is None:
            return None
        return Asked(self.sampler.scored(scores.logits, verdict.path), emitted(tree, verdict), count)

    def walk_tree(self, tree: DraftTree, scores: Scores) -> Verdict:
        """The path of a scored tree that the target keeps, and its next token.

        If the caller gave processors or criteria, they are called as in plain decoding: once for each token, in order,
        and not after the end of the text.
        """
        if scores.draws is not None:
            draw: Callable[[int], int] = scores.draws.__getitem__  # node → the target's own token after it
            self.sampler.forget_processed()
        else:
            draw = self.sampler.draws(tree, scores.logits, self.tokens)
        guide, ahead = self.guide, list(self.tokens)
        if guide is not None:
            draw = self._within(guide, ahead, tree, scores.logits, draw)
        elif not (self.params.processors or self.params.criteria):
            return walk(tree, draw)

        def ends(token: int) -> bool:
            ahead.append(token)
            ending = self._ending(ahead)
            if guide is not None and ending != "stop":
                guide.go_to(ahead[len(self.tokens) :])
                ending = "stop" if guide.over else ending
            self.note_ending(ending)
            return ending is not None

        return walk(tree, draw, ends)

    def _within(
        self, guide: Guide, ahead: list[int], tree: DraftTree, logits: Tensor, draw: Callable[[int], int]
    ) -> Callable[[int], int]:
        """`draw` from the tokens that the grammar allows after `ahead`, the text up to the node.

        Without filters, a legal token that wins among all tokens also wins among the legal ones. Then no mask is
        needed. Processors may keep state, so they are called once. Processed log-probabilities come after the mask.
        """
        params = self.params
        processed = params.logprobs is not None and params.logprobs_mode == PROCESSED
        wins_anyway = not (params.filters or params.processors or processed)

        def draw_legal(node: int) -> int:
            guide.go_to(ahead[len(self.tokens) :])
            if wins_anyway and guide.legal(token := draw(node)):
                return token
            mask = torch.from_numpy(guide.mask())
            token = self.sampler.draw_masked(tree, logits, self.tokens, node, mask)
            if not guide.legal(token):
                raise InputError("no token is possible here: all that the grammar allows are excluded")
            return token

        return draw_legal

    def choose_legal(self, tree: DraftTree, kept: Tensor, room: int) -> tuple[DraftTree, Tensor]:
        """The tree and the nodes to verify: without those that the grammar forbids, and with text that it forces."""
        if self.guide is None:
            return tree, kept
        plan, kept = self.policy.cached_plan, self.guide.prune(kept)
        plain = plan is not None and not plan.passes  # plain decoding verifies no drafts
        return (tree, kept) if plain else self.guide.add_forced(tree, kept, room)

    def note_ending(self, ending: str | None) -> None:
        """Remember how the next token that will be accepted ends the text; None: it does not."""
        self._endings.append(ending)

    def accept(self, tree: DraftTree, verdict: Verdict) -> tuple[tuple[int, ...], str]:
        """Append the target's tokens up to the first that ends the text; returns those taken, and their text."""
        before = len(self.tokens)
        self.extend(emitted(tree, verdict))
        return tuple(self.tokens[before:]), self.text.take(final=self.finish is not None)

    def extend(self, tokens: list[int]) -> int:
        """Append tokens up to the first that ends the text; returns the number of those taken."""
        before = len(self.tokens)
        if self._ends_simply and before + len(tokens) < self.end and self._eos.isdisjoint(tokens) and not self._endings:
            self.tokens += tokens
            return len(tokens)
        for token in tokens:
            self.tokens.append(token)
            self.finish = self._endings.pop(0) if self._endings else self._ending(self.tokens)
            if self.finish:
                break
        return len(self.tokens) - before

    def observe(self, step: Step) -> None:
        """Let the policy and the calibrator learn from a cycle."""
        self.policy.observe(step)
        self.correction.observe(step, self.calibrator)
        self.calibrator.observe(step)

    def _ending(self, tokens: list[int]) -> str | None:
        """How the last of these tokens ends the text, or None. All criteria are called, as transformers does."""
        stopped = not self._ends_simply and self.text.push(tokens[-1])
        stopped = stopped or tokens[-1] in self._eos
        if not stopped and self.params.criteria:
            ids = torch.tensor([tokens])
            answers = [bool(torch.as_tensor(ask(ids, None)).all()) for ask in self.params.criteria]
            stopped = any(answers)
        if stopped:
            return "stop"
        return "length" if len(tokens) >= self.end else None


def emitted(tree: DraftTree, verdict: Verdict) -> list[int]:
    """The tokens that a verdict adds to the text."""
    return [*tree.arrays.tokens[verdict.path.numpy()[1:]].tolist(), verdict.bonus]
