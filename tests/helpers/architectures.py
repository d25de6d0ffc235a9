"""Tiny random models of every causal-LM architecture that transformers has.

`build` reads an architecture's configuration class, shrinks the fields that set sizes and draws the weights anew.
`CHANGES` has what single architectures need besides.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 61
WINDOW = 12
LARGEST = 10_000_000  # parameters; a tiny model that has more was not shrunk

SIZES: dict[str, Any] = {}
for value, names in {
    VOCABULARY: "vocab_size decoder_vocab_size vocab_size_per_layer_input",
    32: "hidden_size d_model n_embd emb_dim dim input_embedding_size output_embedding_size embedding_size embed_dim "
    "backbone_hidden_size d_inner lru_width word_embed_proj_dim cross_attention_hidden_size attention_hidden_size",
    48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dff dim_ff ffn_hidden_size "
    "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size feed_forward_size "
    "dense_intermediate_size expert_ffn_hidden_size intermediate_size_mlp moe_shared_expert_intermediate_size "
    "prefix_dense_intermediate_size",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_attention_heads n_head "
    "n_heads num_heads decoder_attention_heads num_decoder_attention_heads attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts index_n_heads swa_num_attention_heads linear_num_value_heads "
    "linear_num_heads zero_expert_num mamba_n_heads mamba_num_heads n_mamba_heads encoder_attention_heads "
    "num_encoder_attention_heads encoder_layers num_encoder_layers",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok moe_topk moe_k top_k_experts "
    "num_experts_per_token linear_num_key_heads max_window_layers n_groups n_group topk_group num_mem_blocks "
    "num_shared_experts hc_mult hc_count o_groups heads_per_ngram",
    1: "n_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers mamba_n_groups mamba_ngroups "
    "num_mtp_layers num_nextn_predict_layers",
    8: "head_dim v_head_dim qk_rope_head_dim qk_nope_head_dim swa_head_dim index_head_dim rotary_dim dim_head "
    "kv_channels attention_head_size linear_key_head_dim linear_value_head_dim linear_head_dim mamba_head_dim "
    "query_pre_attn_scalar d_head hidden_size_per_layer_input laurel_rank gated_norm_rank adapter_rank "
    "state_size ssm_state_size mamba_d_state chunk_size mamba_chunk_size router_hidden_size o_lora_rank hc_lowrank "
    "d_rel log_scaling_n_floor block_multiple_of ffn_round_up_to_multiple_of block_size prompt_mid_dim",
    1000: "floor_scale",
    16: "kv_lora_rank q_lora_rank pronunciation_embed_dim shape_embed_dim",
    256: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length rel_extent "
    "position_bias_max_distance",
    30: "pronunciation_vocab_size shape_vocab_size encoder_hash_byte_group_vocab",
}.items():
    SIZES |= dict.fromkeys(names.split(), value)
WINDOWS = [
    "sliding_window",
    "window_size",
    "sliding_window_size",
    "local_attention",
    "attention_chunk_size",
    "keep_window_size",
    "attention_window_size",
    "index_topk",
]
SETTINGS: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "forced_eos_token_id": None,
    "tie_word_embeddings": False,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "use_sliding_window": True,
}

QWEN4 = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}  # where four layers would be of one kind
CHANGES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        **MIXED,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        },
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "gemma3": {"text_config": MIXED},
    "gemma3_text": MIXED,
    "gemma3n_text": {"num_kv_shared_layers": 2, **MIXED},
    "gemma4_assistant": {
        "text_config": {
            "num_hidden_layers": 4,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 4,
        }
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "kolibri1": MIXED,
    "laguna": MIXED,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "mellum": MIXED,
    "ministral": MIXED,
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (16, 16)},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "num_key_value_heads": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # other configurations of an architecture
    "big_bird, full attention": ("big_bird", {"attention_type": "original_full"}),
    "falcon, ALiBi": ("falcon", {"alibi": True}),
    "granitemoehybrid, attention only": ("granitemoehybrid", {"layer_types": ["full_attention"] * 4}),
    "lfm2, attention only": ("lfm2", {"layer_types": ["full_attention"] * 4}),
    "minimax_m3_vl_text, full attention": ("minimax_m3_vl_text", {}),
    "qwen2, no window": ("qwen2", {"use_sliding_window": False}),
}
PARTS = {"musicgen": "decoder", "musicgen_melody": "decoder"}  # where the language model is a part of the configuration


def names() -> list[str]:
    """Every model type of transformers' causal language models, and the variants."""
    return sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])


def class_name(name: str) -> str:
    """The class that transformers uses for this model type."""
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[VARIANTS.get(name, (name,))[0]])


def inner_classes(config_class: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """The classes of the configurations that this one contains, as it is without arguments if it can be made so."""
    names = config_class.sub_configs
    try:
        usual = config_class()
    except Exception:  # a default that does not pass its own validation
        usual = config_class(**{name: copy.deepcopy(changes[name]) for name in names if name in changes})
    parts = {name: getattr(usual, name, None) for name in names}
    return {name: type(part) for name, part in parts.items() if isinstance(part, transformers.PretrainedConfig)}


def tiny_config(config_class: Any, window: int, **changes: Any) -> Any:
    """A configuration of this class whose sizes are small, in the configurations it contains too."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    wanted = SIZES | SETTINGS | dict.fromkeys(WINDOWS, window)
    values = {name: value for name, value in wanted.items() if name in fields}
    if "kv_lora_rank" in fields:  # latent attention has a key for each head
        values["num_key_value_heads"] = values["num_attention_heads"]
    for name, inner in inner_classes(config_class, changes).items():
        values[name] = tiny_config(inner, window, **changes.pop(name, {}))
    return config_class(**{**values, **changes})


def build(name: str, seed: int = 0, window: int = WINDOW, **changes: Any) -> Any:
    """A random model of this architecture in fp32, whose next token depends on all that it reads.

    Where attention has a window, it is `window` tokens long. A name may be one of `VARIANTS`.
    """
    name, special = VARIANTS.get(name, (name, CHANGES.get(name, {})))
    config = tiny_config(CONFIG_MAPPING[name], window, **{**special, **changes})
    make = transformers.AutoModelForCausalLM.from_config
    if name in PARTS:
        config, make = getattr(config, PARTS[name]), getattr(transformers, class_name(name))
    with torch.device("meta"):
        size = make(copy.deepcopy(config)).num_parameters()
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters are too many: a size is missing in SIZES")
    torch.manual_seed(seed)
    model = make(config).float().eval()
    randomize(model)
    return model


@torch.no_grad()
def randomize(model: Any) -> None:
    """Weights with enough spread that the next token depends on the context; norms and biases a little off."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.1 * torch.randn_like(parameter))
    for embeddings, scale in ((model.get_input_embeddings(), 1.0), (model.get_output_embeddings(), 3.0)):
        if isinstance(getattr(embeddings, "weight", None), torch.Tensor):
            weight = embeddings.weight
            weight.normal_(0, scale * (weight.shape[-1] ** -0.5 if scale > 1 else 1))
