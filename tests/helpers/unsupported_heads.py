"""Made-up folders of the kinds of heads that windfall does not read, as their projects write them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from helpers.peers import WIDTH, Config, Tensors, layer_config, layer_shapes, random_tensors
from helpers.tiny import VOCABULARY


class File(NamedTuple):
    name: str  # of the kind
    by: str  # by what it is recognised
    config: Config
    tensors: tuple[str, ...] = ()  # besides those of a layer and `fc`

    @property
    def title(self) -> str:
        return f"{self.name} by {self.by}"


def _dflash(**more: Any) -> Config:
    return {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16, "dflash_config": more}


def _speculators(kind: str, name: str, **more: Any) -> Config:
    return {"speculators_model_type": kind, "architectures": [name], "transformer_layer_config": layer_config(), **more}


BODY = ("hidden_norm.weight", "norm.weight", "embed_tokens.weight", "layers.0.input_layernorm.weight")
IDS = {"mask_token_id": 5, "target_layer_ids": [1, 3, 5]}
FILES = (
    File("Domino", "its config", _dflash(projector_type="domino", gru_hidden_dim=4, **IDS), BODY),
    File("Domino", "its tensors", _dflash(**IDS), (*BODY, "prefix_gru.weight_ih_l0", "embed_proj.0.weight")),
    File("XPress", "speculators", _speculators("xpress", "XPressSpeculator", draft_vocab_size=30), BODY),
    File("JetSpec of speculators", "speculators", _speculators("jetspec", "JetSpecSpeculator"), BODY),
    File("P-EAGLE", "speculators", _speculators("peagle", "PEagleSpeculator"), ("layers.0.hidden_norm.weight",)),
    File("P-EAGLE", "its tensors", {"draft_vocab_size": 30}, ("layers.0.hidden_norm.weight", "mask_hidden")),
    File("MTP", "DeepSeek-V3's names", {"architectures": ["DeepseekV3ForCausalLMNextN"]}, ("layers.0.eh_proj.weight",)),
    File("MTP", "GLM-4.5's names", {"model_type": "glm4_moe"}, ("layers.46.eh_proj.weight", "layers.46.enorm.weight")),
    File("MTP", "MiMo's names", {"model_type": "mimo"}, ("model.mtp_layers.0.input_proj.weight",)),
    File("MTP", "Qwen3-Next's names", {"model_type": "qwen3_next"}, ("mtp.fc.weight", "mtp.norm.weight")),
    File("MTP", "speculators", _speculators("mtp", "MTPDraftModel"), ("mtp_layers.0.input_proj.weight",)),
    File(
        "EAGLE-3 with MLA",
        "its tensors",
        {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "kv_lora_rank": 8, "draft_vocab_size": 30},
        ("layers.0.hidden_norm.weight", "layers.0.self_attn.kv_a_proj_with_mqa.weight"),
    ),
    File("Gemma-4 assistant", "its config", {"model_type": "gemma4_assistant", "backbone_hidden_size": 64}, BODY[1:]),
    File("Gemma-4 assistant", "its tensors", {}, (*BODY[1:], "pre_projection.weight", "post_projection.weight")),
    File("MLPSpeculator", "its config", {"model_type": "mlp_speculator", "n_predict": 3}, ("speculator.emb.0.weight",)),
    File("Medusa-2", "its config", {"medusa_num_heads": 3}, (*BODY[1:], "medusa_head.0.0.linear.weight")),
    File("SpecExit", "its config", {"draft_vocab_size": 30, "early_stop_method": "confidence_progress_remain"}),
)


def layout(case: File) -> tuple[Config, Tensors]:
    """config.json and tensors; shapes matter to nothing that recognises them."""
    body = random_tensors({"fc.weight": (WIDTH, 3 * WIDTH), **layer_shapes("layers.0.", WIDTH)})
    alone = {"MTP", "MLPSpeculator"}
    tensors = {} if case.name in alone else body
    return {**layer_config(vocab_size=VOCABULARY), **case.config}, {
        **tensors,
        **{name: torch.ones(WIDTH) for name in case.tensors},
    }
