"""Writes small GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


TOKENS = ["<unk>", "<s>", "</s>", *map(chr, range(33, 94))]  # 64 of them


def write_gguf(file: Path, model: Any, kind: Callable[[str], str] = lambda name: "F32", **more: Any) -> None:
    """The model as llama.cpp would write it: its names, its order of the rotary dimensions, tensors quantised by name.

    `more` are values for the header under names of the architecture's; None leaves one out.
    """
    import gguf

    config, architecture = model.config, model.config.model_type
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*TOKENS[:3], "Ġ", "ĠĠ", "ĠĠĠĠ", *TOKENS[6:]])
    writer.add_token_merges(["Ġ Ġ", "ĠĠ ĠĠ"])
    writer.add_token_types([3, 3, 3] + [1] * 61)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    for key, value in more.items():
        writer.kv_data[0].pop(f"{architecture}.{key}", None)
        if value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    heads = heads if architecture == "llama" else {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name, values = gguf_tensor_name(name.removeprefix("model.")), tensor.numpy()
        if (count := heads.get(name.split(".")[-2])) is not None:
            rows = values.reshape(count, 2, values.shape[0] // count // 2, *values.shape[1:])
            values = np.ascontiguousarray(rows.swapaxes(1, 2).reshape(values.shape))
        quantised = gguf.GGMLQuantizationType[kind(name)]
        writer.add_tensor(name, gguf.quantize(values, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensor_name(name: str) -> str:
    for ours, theirs in {
        "embed_tokens": "token_embd",
        "layers.": "blk.",
        "self_attn.o_proj": "attn_output",
        "self_attn.": "attn_",
        "mlp.gate_up": "ffn_up",
        "mlp.": "ffn_",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "_proj": "",
    }.items():
        name = name.replace(ours, theirs)
    return "output_norm.weight" if name == "norm.weight" else name
