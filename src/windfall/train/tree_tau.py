"""Tokens per pass (tau) of a head on held-out texts, in training.

A text is what the target writes, so decoding it again needs no pass of the target: the head grows its tree from the
target's features of the tokens before, and the walk follows the text. Greedy texts give the tau of greedy decoding.
Texts drawn at a temperature give that of coupled drafting, with the very noise that drew them: the noise depends on
seed, position and token, and the shards record the seed.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from windfall import registry
from windfall.core.sampling import Dice
from windfall.core.tree import DraftTree
from windfall.core.types import SamplingParams
from windfall.core.verify import walk
from windfall.costs.acceptance import Calibrator
from windfall.costs.curves import ASSUMED
from windfall.drafters.base import Drafter
from windfall.heads.base import DraftHead
from windfall.model.target import Target
from windfall.policies.base import TreePolicy
from windfall.policies.beam import Beam
from windfall.policies.context import Context
from windfall.train.batch import Batch
from windfall.train.shards import Sampling, TokenData
from windfall.train.teacher import Teacher

BEAM = {"depth": 7, "k": 10, "nodes": 60}
CYCLES = 8  # of each text
GREEDY, COUPLED = "greedy", "coupled"
SPREAD = 0.618034  # texts begin at different places of their answers: this times the number of the text, modulo 1
END = -1  # in place of a token, after the end of an excerpt


class Excerpt(NamedTuple):
    """The beginning of a text, up to `end`. The target generated its tokens from `start` on."""

    tokens: list[int]
    start: int
    sampling: Sampling

    @property
    def kind(self) -> str:
        return COUPLED if self.sampling.temperature else GREEDY


def choose_excerpts(data: TokenData, count: int, max_length: int) -> list[Excerpt]:
    """Up to `count` excerpts, half of them of greedy texts and half of sampled ones, evenly spaced over the data.

    Texts are left out if their temperature or seed is not recorded.
    """
    longest = CYCLES * (BEAM["depth"] + 1)
    found: dict[str, list[Excerpt]] = {GREEDY: [], COUPLED: []}
    for index in range(len(data)):
        (tokens, answer), sampling = data[index], data.sampling(index)
        written = answer[:max_length].nonzero().flatten().tolist()
        written = [place for place in written if place > 1]  # a head needs a feature before the first root
        if not written or sampling.temperature is None or (sampling.temperature and sampling.seed is None):
            continue
        start = written[int(index * SPREAD % 1 * len(written))]
        after = (~answer[start:max_length]).nonzero().flatten().tolist()
        end = min(start + (after[0] if after else max_length), start + longest, max_length)
        excerpt = Excerpt(tokens[:end].tolist(), start, sampling)
        found[excerpt.kind].append(excerpt)
    chosen = []
    for own in found.values():
        wanted = min(len(own), max(1, count // 2))
        chosen += [own[place * len(own) // wanted] for place in range(wanted)]
    return chosen


class TreeTau:
    """Measures heads on the same excerpts, with a beam of depth 7 and width 10 and trees of 60 nodes."""

    def __init__(self, target: Target, drafter: str, excerpts: list[Excerpt]):
        """`drafter` is the name of the drafter that uses the heads."""
        self.target, self.drafter, self.excerpts = target, drafter, excerpts
        self.policy: TreePolicy = Beam(**BEAM)

    def measure(self, head: DraftHead) -> dict[str, float]:
        """Mean tokens per pass, by kind of text. The head stays as it is; a copy in the target's precision drafts."""
        shared = {id(own): own for own in head._shared.values()}  # the target's matrices, which are not copied
        twin = copy.deepcopy(head, {**shared, id(head._shared): {}})
        exact = {"weights": "full"} if self.drafter in ("head", "block") else {}
        drafter: Drafter = registry.drafter(self.drafter, model=twin, **exact)
        drafter.attach(self.target)
        found = {}
        for kind in (GREEDY, COUPLED):
            own = [excerpt for excerpt in self.excerpts if excerpt.kind == kind]
            cycles = replay(drafter, self.policy, own, self._features(drafter, own)) if own else []
            if cycles:
                found[kind] = sum(cycles) / len(cycles)
        return found

    def _features(self, drafter: Drafter, excerpts: list[Excerpt]) -> list[Tensor]:
        """The target's states [n, taps * Ht] over each excerpt."""
        teacher, found = Teacher(self.target.model, drafter.taps), []
        for excerpt in excerpts:
            tokens = torch.tensor([excerpt.tokens], device=self.target.device)
            found.append(teacher.run(Batch(tokens, torch.ones(tokens.shape, dtype=torch.bool))).features[0])
        return found


@torch.inference_mode()
def replay(
    drafter: Drafter, policy: TreePolicy, excerpts: list[Excerpt], features: list[Tensor], cycles: int = CYCLES
) -> list[int]:
    """Decode the excerpts once more, up to `cycles` cycles of each; return the tokens of every cycle."""
    texts = [_Text(excerpt, own) for excerpt, own in zip(excerpts, features, strict=True)]
    hidden = [text.features[: text.place - 1] for text in texts]
    drafter.start([list(text.committed) for text in texts], hidden, [text.dice for text in texts])
    emitted: list[int] = []
    for _ in range(cycles):
        drafted, kept = _draft(drafter, policy, texts)
        paths, bonus, hidden = [], [], []
        for text, tree, keep in zip(texts, drafted, kept, strict=True):
            path, following, states = text.follow(tree.select(keep))
            paths.append(keep[path])
            bonus.append(following)
            hidden.append(states)
            emitted.append(text.emitted)
        drafter.commit(drafted, paths, bonus, hidden)
        live = [b for b, text in enumerate(texts) if text.place < len(text.tokens)]
        if not live:
            break
        drafter.retain(live)
        texts = [texts[b] for b in live]
    return emitted


def _draft(drafter: Drafter, policy: TreePolicy, texts: list[Any]) -> tuple[list[DraftTree], list[Tensor]]:
    """A tree for each text, and its nodes to verify."""
    contexts = [text.context() for text in texts]
    growers = [policy.fresh() for _ in texts]
    trees = drafter.begin([text.committed[-1] for text in texts])

    def next_pass() -> list[Any]:
        return [grower.grow(tree, ctx) for grower, tree, ctx in zip(growers, trees, contexts, strict=True)]

    while any(grows := next_pass()):
        trees = drafter.expand(trees, grows)
    kept = [grower.select(tree, ctx) for grower, tree, ctx in zip(growers, trees, contexts, strict=True)]
    return trees, kept


class _Text:
    """An excerpt that is being decoded again."""

    def __init__(self, excerpt: Excerpt, features: Tensor):
        self.tokens, self.place, self.features = excerpt.tokens, excerpt.start, features
        self.committed = excerpt.tokens[: excerpt.start]  # grows
        self.temperature = excerpt.sampling.temperature or 0.0
        params = SamplingParams(temperature=self.temperature, seed=excerpt.sampling.seed)
        self.dice = Dice(params, self.committed) if self.temperature else None
        self.emitted = 0  # tokens of the last cycle

    def context(self) -> Context:
        room = len(self.tokens) - self.place
        return Context(len(self.committed), room, self.temperature, ASSUMED, Calibrator())

    def follow(self, tree: DraftTree) -> tuple[Tensor, int, Tensor]:
        """Walk down the tree along the text: the path, the token after it, and the target's states on the path."""
        following, depths = [*self.tokens[self.place :], END], tree.depth.tolist()
        verdict = walk(tree, lambda node: following[depths[node]])
        states = self.features[self.place - 1 : self.place - 1 + len(verdict.path)]
        self.emitted = len(verdict.path) - (verdict.bonus == END)
        self.committed += following[: self.emitted]
        self.place += self.emitted
        return verdict.path, verdict.bonus, states
