"""Small folders of training texts that a tiny target wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from helpers.tiny import VOCABULARY, prompt
from windfall.train.shards import FinishedPrompt, Text, write_metadata, write_shard


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
