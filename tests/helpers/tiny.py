"""Tiny random models of many families: the engine's test beds."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

VOCABULARY = 61
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
GROUPED = {"num_key_value_heads": 2}
FAMILIES = {
    "llama": ("Llama", GROUPED),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 8}),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": None}),
    "mistral-window": ("Mistral", {**GROUPED, "sliding_window": 12}),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt2": ("GPT2", {"n_inner": 48}),
    "gptj": ("GPTJ", {"n_inner": 48, "rotary_dim": 8}),
    "phi": ("Phi", {}),
    "phi3": ("Phi3", {**GROUPED, "sliding_window": None}),
    "gemma": ("Gemma", {**GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2", {**GROUPED, "head_dim": 8, "sliding_window": 12, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3", {**GROUPED, "head_dim": 8, "sliding_window": 12, "query_pre_attn_scalar": 8}),
    "olmo2": ("Olmo2", GROUPED),
    "starcoder2": ("Starcoder2", {**GROUPED, "sliding_window": None}),
    "mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 4, "sliding_window": None}),
}


def tiny(
    family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object
) -> torch.nn.Module:
    """A random model whose next-token distributions are far from flat, so that a wrong row changes the text."""
    prefix, extra = FAMILIES[family]
    config_class = getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**{**SHAPE, **extra, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
        model.get_output_embeddings().weight.mul_(2)
    return model.to(dtype).eval()


def states_of(model: Any, tokens: list[int]) -> dict[int, Tensor]:
    """The model's states over a text, [1, n, H] by boundary: the last before the final norm, and -1 after it."""
    kept: list[Tensor] = []
    base = model.base_model
    norm = next(getattr(base, name) for name in FINAL_NORMS if hasattr(base, name))
    handle = norm.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
    with torch.no_grad():
        *states, final = base(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    handle.remove()
    return {**dict(enumerate([*states, kept[0]])), -1: final}


def features_of(model: Any, tokens: list[int], taps: tuple[int, ...]) -> Tensor:
    """What a head with these taps reads, [1, n, taps * H]."""
    states = states_of(model, tokens)
    return torch.cat([states[tap] for tap in taps], -1)


def prompt(length: int = 9, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
