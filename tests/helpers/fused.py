"""Tiny models of every family that the fused forward runs, and checks of its logits against transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from helpers.architectures import WINDOW, build
from helpers.tiny import VOCABULARY, prompt
from helpers.trees import random_tree
from windfall.core.types import GpuOptions
from windfall.engine.gpu.graphs import GraphCache
from windfall.engine.gpu.host_policy import GraphTarget
from windfall.engine.gpu.target import GpuTarget

PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}


def phi4_mini(width: int) -> dict[str, Any]:
    """The settings of Phi-4-mini, for heads of this width: they are partly rotated, by other angles in long texts."""
    factors = torch.linspace(1, 3, width * 3 // 8).tolist()
    rope = {
        **{**PARTIAL, "rope_type": "longrope", "original_max_position_embeddings": 256},
        "short_factor": factors,
        "long_factor": [2 * each for each in factors],
    }
    limits = {"original_max_position_embeddings": 256, "max_position_embeddings": 1024}
    return {"rope_parameters": rope, **limits, "tie_word_embeddings": True, "sliding_window": None}


GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.6,
    "attention_multiplier": 0.2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # the name and the changes that helpers.architectures takes
    "mistral": ("mistral", {}),
    "qwen2, mixed": ("qwen2", {}),
    "qwen3, mixed": ("qwen3", {}),
    "phi3": ("phi3", {}),
    "phi3, partly rotated": ("phi3", {"rope_parameters": PARTIAL}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", {"final_logit_softcapping": 20.0}),
    "gemma3, with images": ("gemma3", {}),
    "gpt-oss": ("gpt_oss", {"swiglu_limit": 1.5, "swiglu_alpha": 1.5}),
    "qwen3-moe": ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [1]}),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {}),
    "phi4-mini": ("phi3", phi4_mini(8)),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "granite": ("granite", GRANITE),
    "cohere": ("cohere", {"logit_scale": 1.5, "use_qk_norm": True}),
    "cohere2": ("cohere2", {"logit_scale": 1.5}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "starcoder2": ("starcoder2", {}),
    "exaone4": ("exaone4", {}),
    "ernie": ("ernie4_5", {}),
    "seed-oss": ("seed_oss", {}),
    "arcee": ("arcee", {"mlp_bias": True}),
    "ministral": ("ministral", {}),
    "mellum": ("mellum", {}),
    "cwm": ("cwm", {}),
    "helium": ("helium", {}),
}
MODELS = {name: made for name, made in MODELS.items() if made[0] in CONFIG_MAPPING}  # older versions lack some


def model(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **changes: Any) -> Any:
    """A random model whose windows have 12 tokens."""
    kind, own = MODELS[name]
    made = build(kind, **{**own, **changes}).to(device, dtype)
    if dtype == torch.float64:
        made.config._experts_implementation = "eager"  # torch has no grouped product for it
    if kind == "gemma2":
        made.set_attn_implementation("eager")  # others ignore the soft cap in some versions of transformers
    return made


@torch.inference_mode()
def logits_of(target: Any, length: int, size: int, exact: bool = False) -> tuple[Tensor, Tensor]:
    """Logits of the rows of a random tree after a text, from the fused forward and from transformers."""
    tree, text = random_tree(size, seed=size, width=VOCABULARY), prompt(length, seed=length)
    device = next(target.parameters()).device
    made = GraphTarget(GpuTarget(target, (), GraphCache(device), GpuOptions(True, exact=exact)))
    made.prefill([[*text, int(tree.tokens[0])]])
    (found,) = made.score([tree])
    wanted = torch.empty_like(found.logits)
    for row in range(size):
        path = tree.mask()[row].nonzero()[:, 0]
        tokens = torch.tensor([[*text, *tree.tokens[path].tolist()]], device=device)
        wanted[row] = target(input_ids=tokens, use_cache=False).logits[0, -1]
    assert length > WINDOW
    return found.logits, wanted
