"""Fields that clients send although they ask for nothing: any value of some, and one value of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

IGNORED = (  # the text stays the same
    "user",
    "metadata",
    "safety_identifier",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
)
Values = Mapping[str, tuple[Any, ...]]  # by field
SHARED: Values = {
    "best_of": (1,),
    # of vLLM and SGLang
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "bad_words": ([],),
    "logits_processors": ([],),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
}
CHAT: Values = {
    **SHARED,
    "store": (False,),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "verbosity": ("medium",),
    # of vLLM
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "include_reasoning": (True,),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
}
COMPLETIONS: Values = {**SHARED, "suffix": ("",), "logprobs": (False,), "add_special_tokens": (True,)}
STREAM: Values = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}  # of `stream_options`


def drop_neutral(given: Any, neutral: Values) -> Any:
    """A JSON object without ignored fields, and without fields that have a neutral value."""
    if not isinstance(given, dict):
        return given
    return {
        key: value
        for key, value in given.items()
        if key not in IGNORED and not any(_same(value, each) for each in neutral.get(key, ()))
    }


def _same(value: Any, other: Any) -> bool:
    """Whether these are equal as JSON: true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
