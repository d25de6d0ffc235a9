"""Small folders of training texts that a tiny target wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from helpers.tiny import VOCABULARY, prompt
from windfall import registry
from windfall.engine.engine import Engine
from windfall.model.target import Target
from windfall.train.shards import FinishedPrompt, Sampling, Text, write_metadata, write_shard


def write_texts(folder: Path, model: Any, count: int = 12, length: int = 24) -> Path:
    """Greedy continuations of random prompts; the last two are held out, and trained on too, to see memory at work."""
    prompts = torch.tensor([prompt(6, seed=i) for i in range(count)])
    written = model.generate(prompts, max_new_tokens=length, do_sample=False, pad_token_id=0).tolist()
    answer = [False] * 6 + [True] * length
    folder.mkdir(parents=True, exist_ok=True)
    write_metadata(folder, {"target": {"vocab_size": VOCABULARY}})
    shown = [FinishedPrompt(i, False, [Text(text, answer)]) for i, text in enumerate(written)]
    held = [FinishedPrompt(count + i, True, [Text(text, answer)]) for i, text in enumerate(written[-2:])]
    write_shard(folder, 0, shown + held)
    return folder


def write_drawn_texts(folder: Path, target: Target, count: int = 8, length: int = 24) -> Path:
    """Answers to random prompts, every other one greedy and the others at temperature 1; two of each are held out.

    As in `write_texts`, the held-out texts are trained on too.
    """
    plain = Engine(target, registry.drafter("ngram"), registry.policy("none"))
    texts = []
    for number in range(count):
        sampling, start = Sampling(float(number % 2), 1000 + number), prompt(6, seed=number)
        drawn = plain.generate(start, max_new_tokens=length, temperature=sampling.temperature, seed=sampling.seed)
        answer = [False] * len(start) + [True] * len(drawn.token_ids)
        texts.append(Text(start + drawn.token_ids, answer, sampling))
    folder.mkdir(parents=True, exist_ok=True)
    write_metadata(folder, {"target": {"vocab_size": target.vocab_size}})
    shown = [FinishedPrompt(i, False, [text]) for i, text in enumerate(texts)]
    held = [FinishedPrompt(count + i, True, [text]) for i, text in enumerate(texts[-4:])]
    write_shard(folder, 0, shown + held)
    return folder
