"""transformers' own `generate`, as a reference for texts and speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from windfall.core.types import SamplingParams
from windfall.model.target import Target

Tokens = list[int]


@torch.inference_mode()
def hf_generate(
    target: Target, prompts: Sequence[Tokens], params: SamplingParams, assistant: Any = None
) -> list[Tokens]:
    """The answers of `model.generate` to these prompts, in one batch padded on the left.

    `assistant` is a model for assisted generation, or the number of tokens that prompt lookup drafts. The model's own
    generation config is replaced during the call, so that no other setting of it counts.
    """
    from transformers import GenerationConfig

    model, eos = target.model, target.eos if params.eos is None else params.eos
    pad, width = eos[0] if eos else 0, max(map(len, prompts))
    drawn = {"do_sample": True, "temperature": params.temperature, "top_k": 0, "top_p": 1.0}
    lookup = assistant if isinstance(assistant, int) else None
    config = GenerationConfig(
        max_new_tokens=params.max_new_tokens,
        eos_token_id=list(eos) or None,
        pad_token_id=pad,
        **({"do_sample": False} if params.greedy else drawn),
        **({} if lookup is None else {"prompt_lookup_num_tokens": lookup}),
    )
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=target.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=target.device)
    own, model.generation_config = model.generation_config, config
    try:
        torch.manual_seed(params.noise_seed)
        helper = assistant if lookup is None else None
        made: Tensor = model.generate(input_ids=ids, attention_mask=mask, assistant_model=helper)
    finally:
        model.generation_config = own
    return [_until_end(answer, eos) for answer in made[:, width:].tolist()]


def _until_end(answer: Tokens, eos: Sequence[int]) -> Tokens:
    """The answer up to its end-of-text token, which is included; padding follows it."""
    end = next((place for place, token in enumerate(answer) if token in eos), len(answer))
    return answer[: end + 1]
