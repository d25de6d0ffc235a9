"""What windfall's loop does with each option of `model.generate`. docs/transformers.md has the same lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from windfall.core.types import InputError

# Done by transformers before the loop begins, or by the processors and criteria that it passes to the loop.
HONOURED = frozenset([
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "num_return_sequences",
    "return_dict_in_generate",
    "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "renormalize_logits",
    "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
    "forced_eos_token_id",
    "exponential_decay_length_penalty", "remove_invalid_values", "guidance_scale", "watermarking_config",
    "pad_token_id", "bos_token_id", "eos_token_id", "use_cache",
])  # fmt: skip

# Without effect on the text: they concern memory and compilation, or methods that are refused below.
HARMLESS = frozenset([
    "early_stopping", "length_penalty", "diversity_penalty", "low_memory", "decoder_start_token_id",
    "transformers_version",
    "max_cache_len", "cache_config", "prefill_chunk_size", "compile_config", "disable_compile",
    "continuous_batching_config",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "max_matching_ngram_size",
    "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight",
])  # fmt: skip

BEAMS = "windfall decodes greedily or by sampling"
DRAFTS = "windfall drafts by itself"
NO_TOKENIZER = "transformers passes no tokenizer to a custom loop"
NOT_KEPT = "windfall's loop does not keep what it asks for; leave it out"

# Option → a test of (its value, the config) for what the loop does not do, and the reason that is shown.
REFUSED: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "num_beams": (lambda value, _: (value or 1) > 1, f"{BEAMS}; it must be 1"),
    "num_beam_groups": (lambda value, _: (value or 1) > 1, f"{BEAMS}; it must be 1"),
    "constraints": (lambda value, _: value is not None, f"{BEAMS}, and this needs beams"),
    "force_words_ids": (lambda value, _: value is not None, f"{BEAMS}, and this needs beams"),
    "penalty_alpha": (
        lambda value, config: not config.do_sample and (value or 0) > 0 and (config.top_k or 0) > 1,
        f"it asks for contrastive search; {BEAMS}",
    ),
    "dola_layers": (lambda value, _: value is not None, f"it asks for DoLa; {BEAMS}"),
    "prompt_lookup_num_tokens": (lambda value, _: value is not None, f"{DRAFTS}: custom_generate(drafter='ngram')"),
    "assistant_early_exit": (lambda value, _: value is not None, f"{DRAFTS}: custom_generate(drafter='self')"),
    "use_mtp": (lambda value, _: bool(value), f"{DRAFTS}; leave it out"),
    "speculation_type": (lambda value, _: value is not None, f"{DRAFTS}; leave it out"),
    "is_assistant": (lambda value, _: bool(value), f"{DRAFTS}; leave it out"),
    "token_healing": (lambda value, _: bool(value), NO_TOKENIZER),
    "stop_strings": (
        lambda value, _: value is not None,
        f"{NO_TOKENIZER}; give a StopStringCriteria among the stopping_criteria",
    ),
    "cache_implementation": (
        lambda value, _: value == "quantized",
        "windfall keeps its KV cache in full precision; leave 'quantized' out",
    ),
    "output_scores": (lambda value, _: bool(value), NOT_KEPT),
    "output_logits": (lambda value, _: bool(value), NOT_KEPT),
    "output_attentions": (lambda value, _: bool(value), NOT_KEPT),
    "output_hidden_states": (lambda value, _: bool(value), NOT_KEPT),
}

# Arguments of `generate` that transformers does not pass to a custom loop.
REFUSED_ARGUMENTS = {
    "assistant_model": "windfall drafts by itself: custom_generate(drafter=the assistant)",
    "synced_gpus": "windfall's loop does not wait for other GPUs",
}

MODEL_INPUTS = frozenset([
    "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "output_attentions",
    "output_hidden_states",
])  # fmt: skip


def refuse_options(config: Any, arguments: dict[str, Any], inputs: dict[str, Any]) -> None:
    """Refuse what this loop does not support; `arguments` are those of `generate`, `inputs` those of the model."""
    for name, (asked, reason) in REFUSED.items():
        if asked(getattr(config, name, None), config):
            raise InputError(f"{name} is not supported: {reason}")
    for name, reason in REFUSED_ARGUMENTS.items():
        if arguments.get(name):
            raise InputError(f"{name} is not supported: {reason}")
    if unknown := [name for name, value in inputs.items() if name not in MODEL_INPUTS and value is not None]:
        raise InputError(f"windfall's loop does not know what to do with {', '.join(unknown)}")


def refuse_inputs(ids: Tensor, inputs: dict[str, Any], longest: int, context: int | None) -> None:
    """Refuse prompts, masks, positions and caches that the loop cannot use; `longest` counts prompt and answer."""
    mask, positions, cache = (inputs.get(name) for name in ("attention_mask", "position_ids", "past_key_values"))
    if not ids.numel():
        raise InputError("windfall's loop needs input_ids")
    if context is not None and longest > context:
        raise InputError(f"the model takes {context} tokens, and max_length (prompt and answer) is {longest}")
    if cache is not None and cache.get_seq_length():
        raise InputError("past_key_values must be empty: windfall's loop reads the whole prompt, and fills the cache")
    if mask is not None:
        seen = mask.int()
        if mask.shape != ids.shape or bool((seen.diff(dim=1) < 0).any()) or not bool(seen[:, -1].all()):
            raise InputError("windfall's loop takes prompts padded on the left: a mask of zeros, then ones")
    if positions is not None and not _implied(positions, torch.ones_like(ids) if mask is None else mask):
        raise InputError("position_ids must count the tokens that attention_mask shows, from 0; leave them out")


def _implied(positions: Tensor, mask: Tensor) -> bool:
    """Whether these are the positions that a mask [B, L] implies; those of hidden tokens do not matter."""
    if positions.shape[-1] != mask.shape[-1] or (positions.dim() > 1 and positions.shape[-2] not in (1, len(mask))):
        return False
    shown = mask.bool()
    return not bool(((positions.to(mask.device) != shown.long().cumsum(-1) - 1) & shown).any())
