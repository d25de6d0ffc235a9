"""Choose between several readings of a head's file: the one that agrees best with the target wins."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from windfall.checkpoints.bundled import made_for
from windfall.core.errors import HeadWarning as HeadWarning
from windfall.core.types import InputError
from windfall.heads.base import FeatureHead, Guess
from windfall.heads.files import find
from windfall.heads.fitting import fit
from windfall.heads.layers import Unrolled
from windfall.model.batch import Rows
from windfall.prompts.samples import SAMPLES

if TYPE_CHECKING:
    from windfall.heads.formats import Checkpoint, Reading
    from windfall.model.target import Target

TOKENS = 128  # of the fixed text
OWN_TOKENS = 64  # of the target's own text; each takes a pass
STEPS = 3  # drafted tokens after each token of the text; from the second on, a head reads its own state
MIN_AGREEMENT = 0.3  # share of correct first predictions; below it something is wrong
MIN_STANDARD_ERRORS = 2.0  # by which a reading that the file does not state must be better than the stated one
QUESTION = SAMPLES[-1]
ANSWER = (
    "Weather is what happens in the air at a certain place and time: rain, sunshine, wind, and how warm or cold it is. "
    "It can change within hours. Climate is what the weather of a place is like over many years. In short, climate is "
    "what you expect, and weather is what you get. A single cold day says little about the climate. To learn how it "
    "changes, people compare the average of many years with that of many years before. They measure the temperature of "
    "the air and of the sea, how much rain and snow falls, and how much ice there is on land and on the water."
)


class Text(NamedTuple):
    """A text and the target's outputs for it."""

    tokens: Tensor  # [n]
    states: dict[int, Tensor]  # [n, H] by tap
    wanted: Tensor  # [n], the target's most likely next token
    start: int  # where the answer begins


class Score(NamedTuple):
    """Agreement of a reading's predictions with the target's tokens, over all steps."""

    agreement: float  # share of correct predictions
    likelihood: float  # mean log-probability of the target's token
    first: float  # agreement of the first step alone
    each: Tensor  # [n] log-probabilities whose mean is `likelihood`

    @property
    def rank(self) -> tuple[float, float]:
        """Equal agreements are ordered by likelihood."""
        return self.agreement, self.likelihood

    def surely_above(self, other: Score) -> bool:
        """Whether this one is significantly better, by a paired test over the same tokens."""
        gain = (self.each - other.each).double()
        error = float(gain.std()) / len(gain) ** 0.5 if len(gain) > 1 else 0.0
        return self.rank > other.rank and float(gain.mean()) > MIN_STANDARD_ERRORS * error


def choose(checkpoint: Checkpoint, target: Target) -> FeatureHead:
    """The head in the reading that agrees best; a HeadWarning says what was chosen if the file is ambiguous.

    The target runs once over a fixed text. The best of the stated readings is compared with readings of other projects
    that differ in one axis; those must be significantly better. If even the best hardly agrees, all readings are tried
    on a text that the target writes.
    """
    fit(checkpoint.build(checkpoint.stated[0]), target)  # refuses a head of another target early
    checkpoint.to(target.device, target.decoder.dtype)
    trial = Trial(checkpoint, target, *sample(target))
    best = trial.climb(trial.best(checkpoint.stated))
    if trial.score(best).first < MIN_AGREEMENT:
        trial = Trial(checkpoint, target, *continued(target))
        best, other = trial.best(checkpoint.stated), trial.best(checkpoint.readings)
        best = other if trial.score(other).first >= MIN_AGREEMENT else best
    head = fit(checkpoint.build(best), target)
    head.agreement = trial.score(best).first
    _warn_about(checkpoint, target, trial, best)
    return head


class Trial:
    """Compares the readings of a checkpoint on one text; scores are cached."""

    def __init__(self, checkpoint: Checkpoint, target: Target, tokens: list[int], start: int):
        self._checkpoint, self._target = checkpoint, target
        taps = sorted({tap for reading in checkpoint.readings for tap in reading.config.taps})
        self._text = scored(target, tokens, start, taps)
        self._scores: list[tuple[Reading, Score]] = []

    def score(self, reading: Reading) -> Score:
        known = next((found for tried, found in self._scores if tried is reading), None)
        if known is None:
            head = fit(self._checkpoint.build(reading), self._target)
            known = score(head, self._text, self._checkpoint.label)
            self._scores.append((reading, known))
        return known

    def best(self, readings: Sequence[Reading]) -> Reading:
        return max(readings, key=lambda reading: self.score(reading).rank)

    def climb(self, best: Reading) -> Reading:
        """Move to significantly better readings that differ in one axis, as long as there are any."""
        while True:
            near = [other for other in self._checkpoint.others if _differences(best, other) == 1]
            better = [other for other in near if self.score(other).surely_above(self.score(best))]
            if not better:
                return best
            best = self.best(better)

    def next_best(self, choices: dict[str, Any]) -> float:
        """The best agreement with other choices than these."""
        others = [
            found for tried, found in self._scores if any(tried.choices[axis] != choices[axis] for axis in choices)
        ]
        return max((found.agreement for found in others), default=0.0)


def _differences(one: Reading, other: Reading) -> int:
    return sum(value != other.choices[axis] for axis, value in one.choices.items())


def _warn_about(checkpoint: Checkpoint, target: Target, trial: Trial, chosen: Reading) -> None:
    found = trial.score(chosen)
    if len(checkpoint.stated) > 1 or chosen not in checkpoint.stated:
        differs = {
            axis: value
            for axis, value in chosen.choices.items()
            if any(reading.choices[axis] != value for reading in [*checkpoint.stated, chosen])
        }
        unsure = (
            "allows several readings" if chosen in checkpoint.stated else "seems to mean something else than it says"
        )
        _warn(
            f"'{checkpoint.label}' {unsure}; chosen: {_worded(differs)}, which agrees with {target.name} "
            f"on {found.agreement:.0%} of the tokens (the next best on {trial.next_best(differs):.0%})"
        )
    if found.first < MIN_AGREEMENT:
        _warn(
            f"'{checkpoint.label}' agrees with {target.name} on only {found.first:.0%} of the tokens: "
            f"{_reason(checkpoint.label, target)}. It will hardly make this model faster"
        )


def _reason(label: str, target: Target) -> str:
    """Why a head hardly agrees with its target, as far as its files say."""
    folder = find(label)
    known = None if folder is None else made_for(folder, target)
    if known is None:
        return "it was made for another model, or trained too little"
    return "it was made for this model, but trained too little" if known else "it was made for another model"


def _worded(choices: dict[str, Any]) -> str:
    shown = {axis: "/".join(map(str, value)) if isinstance(value, list) else value for axis, value in choices.items()}
    return ", ".join(f"{axis} {value}" for axis, value in shown.items())


def _warn(message: str) -> None:
    warnings.warn(message, HeadWarning, stacklevel=2)


@torch.inference_mode()
def score(head: FeatureHead, text: Text, label: str) -> Score:
    """Compare the head's predictions with the target's when it drafts after each token of the answer."""
    features = torch.cat([text.states[tap] for tap in head.config.taps], -1)[:-1]
    columns, first = len(features), max(text.start - 2, 0)  # column t predicts the successor of token t + 1
    right: list[Tensor] = []
    likely: list[Tensor] = []
    for step, guess in enumerate(rollout(head, features, text.tokens, min(STEPS, columns - first))):
        logq = torch.log_softmax(head.logits(guess.state[0, first : columns - step]).float(), -1)
        if not bool(torch.isfinite(logq).all()):
            raise InputError(f"'{label}' computes no finite numbers: its weights are damaged, or need more precision")
        hits, chances = _compared(logq, text.wanted[first + 1 + step :], head.draft_tokens)
        right.append(hits)
        likely.append(chances)
    each = torch.cat(likely)
    likelihood = float(each.mean()) if len(each) else -1e9
    return Score(float(torch.cat(right).mean()), likelihood, float(right[0].mean()), each)


def rollout(head: FeatureHead, features: Tensor, tokens: Tensor, steps: int) -> Iterator[Guess]:
    """Draft this many steps after every token of a text [n] at once, from the states [n - 1, taps * H] before them.

    The drafted tokens are taken from the text, so the last `step` rows of a step are meaningless. A row of a later step
    sees the text's rows up to its own and the earlier rows of its own chain.
    """
    columns = len(features)
    memory, hidden = Unrolled(head.config.windows), head.fuse(features)[None]
    positions = torch.arange(columns, device=head.device)[None]
    diagonal = torch.eye(columns, dtype=torch.bool, device=head.device)[None]
    memory.mask, seen = torch.ones_like(diagonal).tril(), positions
    for step in range(steps):
        memory.age = (positions + step)[:, :, None] - seen[:, None]
        guess = head(tokens[None, 1:].roll(-step, 1), hidden, positions + step, memory)
        yield guess
        hidden, memory.mask = guess.recycled, torch.cat([memory.mask, diagonal], -1)
        seen = torch.cat([seen, positions + step + 1], 1)


def _compared(logq: Tensor, wanted: Tensor, draft_tokens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Whether the most likely tokens of logq [n, Vd] are the wanted ones, and the log-probabilities of those wanted
    tokens that it can draft."""
    best = logq.argmax(-1)
    if draft_tokens is None:
        return (best == wanted).float(), logq.gather(1, wanted[:, None])[:, 0]
    known = (draft_tokens[None] == wanted[:, None]).nonzero()  # pairs of row and draft id
    return (draft_tokens[best] == wanted).float(), logq[known[:, 0], known[:, 1]]


@torch.inference_mode()
def scored(target: Target, tokens: list[int], start: int, taps: list[int]) -> Text:
    """One pass of the target over the tokens."""
    decoder, before = target.decoder, target.decoder.taps
    decoder.taps = tuple(taps)
    decoder.reset(1)
    try:
        logits, hidden = decoder.feed([Rows.chain(tokens, 0)], causal=True)
    finally:
        decoder.taps = before
        decoder.reset(0)
    assert hidden is not None
    states = dict(zip(taps, hidden[0].chunk(len(taps), -1), strict=True))
    return Text(torch.tensor(tokens, device=target.device), states, logits[0].argmax(-1), start)


def sample(target: Target) -> tuple[list[int], int]:
    """A question and its answer, and where the answer begins; random tokens if there is no tokenizer."""
    tokenizer, room = target.tokenizer, min(512, target.context or 512)
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(target.vocab_size, (min(TOKENS + 1, room),), generator=generator).tolist(), 1
    question = _question(tokenizer)[-room // 2 :]
    answer = list(tokenizer(ANSWER, add_special_tokens=False).input_ids)[: min(TOKENS, room // 2)]
    return [*question, *answer], max(len(question), 1)


def _question(tokenizer: Any) -> list[int]:
    if getattr(tokenizer, "chat_template", None):
        try:
            asked = [{"role": "user", "content": QUESTION}]
            return list(tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False))
        except Exception:  # a template may raise anything
            pass
    return list(tokenizer(f"{QUESTION}\n\n").input_ids)


@torch.inference_mode()
def continued(target: Target) -> tuple[list[int], int]:
    """The question and the target's own greedy answer."""
    tokens, start = sample(target)
    tokens, decoder = tokens[: max(start, 2)], target.decoder
    start, before = len(tokens), decoder.taps
    decoder.taps = ()
    target.prefill([tokens])
    try:
        for _ in range(min(OWN_TOKENS, (target.context or 4096) - start)):
            [logits], _ = decoder.feed([Rows.chain(tokens[-1:], len(tokens) - 1)])
            decoder.commit([[0]])
            tokens.append(int(logits[-1].argmax()))
            if tokens[-1] in target.eos:
                break
    finally:
        decoder.taps = before
        decoder.reset(0)
    return tokens, start
