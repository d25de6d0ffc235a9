"""Which of several readings of a head's file is right: the one whose first guesses are most often the target's."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from windfall.batch import Rows
from windfall.errors import HeadWarning as HeadWarning
from windfall.heads.base import FeatureHead
from windfall.heads.files import find
from windfall.heads.fitting import fit
from windfall.heads.layers import Unrolled
from windfall.prompts import SAMPLES
from windfall.records import InputError
from windfall.shipped import made_for

if TYPE_CHECKING:
    from windfall.heads.formats import Checkpoint, Reading
    from windfall.target import Target

TOKENS = 64
ENOUGH = 0.3  # share of agreeing guesses below which something is wrong
QUESTION = SAMPLES[-1]
ANSWER = (
    "Weather is what happens in the air at a certain place and time: rain, sunshine, wind, and how warm or cold it is. "
    "It can change within hours. Climate is what the weather of a place is like over many years. In short, climate is "
    "what you expect, and weather is what you get. A single cold day says little about the climate."
)


class Text(NamedTuple):
    """Tokens that the target has scored."""

    tokens: Tensor  # [n]
    states: dict[int, Tensor]  # [n, H] by tap
    wanted: Tensor  # [n], the target's likeliest next token
    start: int  # where the answer begins


class Score(NamedTuple):
    """Compared in this order: nearly equal agreements are told apart by likelihood."""

    agreement: float  # share of guesses that were the target's
    likelihood: float  # mean log-probability of the target's token


def choose(checkpoint: Checkpoint, target: Target) -> FeatureHead:
    """The head in the reading that agrees best; whatever had to be guessed is told as a HeadWarning.

    One pass of the target over a known text, and one of each reading that the file allows. Where none agrees, the
    target writes a text of its own, and what other projects would have meant by the file is tried too.
    """
    fit(checkpoint.build(checkpoint.told[0]), target)  # refuses another target's head before anything is computed
    checkpoint.to(target.device, target.decoder.dtype)
    readings = checkpoint.told
    scores = _measure(readings, checkpoint, target, *sample(target))
    best = max(range(len(scores)), key=scores.__getitem__)
    if scores[best].agreement < ENOUGH:
        readings = [*checkpoint.told, *checkpoint.others]
        scores = _measure(readings, checkpoint, target, *continued(target))
        best = max(range(len(checkpoint.told)), key=scores.__getitem__)
        other = max(range(len(scores)), key=scores.__getitem__)
        best = other if scores[other].agreement >= ENOUGH else best
    head = fit(checkpoint.build(readings[best]), target)
    head.agreement = scores[best].agreement
    _tell(checkpoint, target, readings, scores, best)
    return head


def _measure(
    readings: list[Reading], checkpoint: Checkpoint, target: Target, tokens: list[int], start: int
) -> list[Score]:
    taps = sorted({tap for reading in readings for tap in reading.config.taps})
    text = scored(target, tokens, start, taps)
    return [score(fit(checkpoint.build(reading), target), text, checkpoint.label) for reading in readings]


def _tell(checkpoint: Checkpoint, target: Target, readings: list[Reading], scores: list[Score], best: int) -> None:
    agreement, chosen = scores[best].agreement, readings[best]
    if len(checkpoint.told) > 1 or chosen not in checkpoint.told:
        differs = {
            axis: value
            for axis, value in chosen.choices.items()
            if any(reading.choices[axis] != value for reading in [*checkpoint.told, chosen])
        }
        rest = max((s.agreement for i, s in enumerate(scores) if i != best), default=0.0)
        unsure = "allows several readings" if chosen in checkpoint.told else "seems to mean something else than it says"
        _warn(
            f"'{checkpoint.label}' {unsure}; chosen: {_worded(differs)}, which agrees with {target.name} "
            f"on {agreement:.0%} of the tokens (the next best on {rest:.0%})"
        )
    if agreement < ENOUGH:
        _warn(
            f"'{checkpoint.label}' agrees with {target.name} on {agreement:.0%} of the tokens only: "
            f"{_reason(checkpoint.label, target)}, and will hardly speed up this one"
        )


def _reason(label: str, target: Target) -> str:
    """Why a head hardly agrees with its target, as far as its files tell."""
    folder = find(label)
    known = None if folder is None else made_for(folder, target)
    if known is None:
        return "it was made for another model, or trained too little"
    return "it was made for this very model, but trained too little" if known else "it was made for another model"


def _worded(choices: dict[str, Any]) -> str:
    shown = {axis: "/".join(map(str, value)) if isinstance(value, list) else value for axis, value in choices.items()}
    return ", ".join(f"{axis} {value}" for axis, value in shown.items())


def _warn(message: str) -> None:
    warnings.warn(message, HeadWarning, stacklevel=2)


@torch.inference_mode()
def score(head: FeatureHead, text: Text, label: str) -> Score:
    """How the head's first guess after each token of the answer compares with the target's."""
    features = torch.cat([text.states[tap] for tap in head.config.taps], -1)[:-1]
    columns = len(features)
    memory = Unrolled(head.config.windows)
    memory.mask = torch.ones(1, columns, columns, dtype=torch.bool, device=head.device).tril()
    positions = torch.arange(columns, device=head.device)[None]
    memory.age = positions[:, :, None] - positions[:, None]
    guess = head(text.tokens[None, 1:], head.fuse(features)[None], positions, memory)
    first = max(text.start - 2, 0)  # column t guesses what follows token t + 1
    logq = torch.log_softmax(head.logits(guess.state[0, first:]).float(), -1)
    if not bool(torch.isfinite(logq).all()):
        raise InputError(f"'{label}' computes no finite numbers: its weights are damaged, or need more precision")
    wanted, best = text.wanted[first + 1 :], logq.argmax(-1)
    if head.draft_tokens is None:
        return Score(float((best == wanted).float().mean()), float(logq.gather(1, wanted[:, None]).mean()))
    known = (head.draft_tokens[None] == wanted[:, None]).nonzero()  # pairs of row and draft id
    agreement = float((head.draft_tokens[best] == wanted).float().mean())
    return Score(agreement, float(logq[known[:, 0], known[:, 1]].mean()) if len(known) else -1e9)


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
    """A question and its answer, and where that begins; any tokens where there is no tokenizer."""
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
        except Exception:  # a template may refuse anything
            pass
    return list(tokenizer(f"{QUESTION}\n\n").input_ids)


@torch.inference_mode()
def continued(target: Target) -> tuple[list[int], int]:
    """The question, and what the target itself says to it, greedily."""
    tokens, start = sample(target)
    tokens, decoder = tokens[: max(start, 2)], target.decoder
    start, before = len(tokens), decoder.taps
    decoder.taps = ()
    target.prefill([tokens])
    try:
        for _ in range(min(TOKENS, (target.context or 4096) - start)):
            [logits], _ = decoder.feed([Rows.chain(tokens[-1:], len(tokens) - 1)])
            decoder.commit([[0]])
            tokens.append(int(logits[-1].argmax()))
            if tokens[-1] in target.eos:
                break
    finally:
        decoder.taps = before
        decoder.reset(0)
    return tokens, start
