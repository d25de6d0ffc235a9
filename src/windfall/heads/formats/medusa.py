"""The files of Medusa heads, as the release and vLLM write them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from windfall.checkpoints.tensors import read_tensors
from windfall.core.types import InputError
from windfall.heads.files import read_config, write_folder
from windfall.heads.formats.parallel import filled, largest, on_host, rename, vocabulary_size
from windfall.heads.medusa import HeadsConfig, Medusa, plain_layer

WEIGHTS = "medusa_lm_head.safetensors"
READ = (  # names in the release and in vLLM → slots
    (r"medusa_heads?\.(.+)", r"\1"),
    (r"(\d+)\.(\d+)\.linear\.(\w+)", r"blocks.\1.\2.\3"),
    (r"blocks\.(\d+)\.layers\.(\d+)\.(\w+)", r"blocks.\1.\2.\3"),
    (r"(\d+)\.\d+\.weight", r"vocabulary.\1.weight"),
    (r"lm_heads\.(\d+)\.weight", r"vocabulary.\1.weight"),
    (r"lm_head\.weight", r"vocabulary.0.weight"),
)
WRITE = {  # slots → names; {last} is the place after the last block
    "release": (
        (r"blocks\.(\d+)\.(\d+)\.(\w+)", r"\1.\2.linear.\3"),
        (r"vocabulary\.(\d+)\.weight", r"\1.{last}.weight"),
    ),
    "vllm": (
        (r"blocks\.(\d+)\.(\d+)\.(\w+)", r"blocks.\1.layers.\2.\3"),
        (r"vocabulary\.(\d+)\.weight", r"lm_heads.\1.weight"),
    ),
}


def read_medusa(folder: str | os.PathLike[str], target: Any = None) -> Medusa:
    """Medusa heads from a folder, with names as in the release or in vLLM.

    The number of heads is taken from the weights, because the release's configs name fewer heads than the files hold.
    If the file holds no vocabularies, all heads share the target's, and `target`, its transformers config, gives the
    vocabulary size unless the file does. A single vocabulary belongs to all heads, as in vLLM.
    """
    label, config = str(folder), read_config(Path(folder), str(folder))
    tensors = {rename(name, READ): tensor for name, tensor in read_tensors(Path(folder), label).items()}
    names = tensors.pop("token_map", None)
    heads, blocks = 1 + largest(tensors, r"blocks\.(\d+)\."), 1 + largest(tensors, r"blocks\.\d+\.(\d+)\.")
    heads = heads or 1 + largest(tensors, r"vocabulary\.(\d+)\.")
    width = next((t.shape[-1] for name, t in sorted(tensors.items()) if name.endswith(".weight")), 0)
    wanted = max(config.get("medusa_num_heads") or 0, config.get("num_heads") or 0, 1)
    if heads < wanted or not width:
        raise InputError(f"'{label}' lacks Medusa heads: its config.json names {wanted}, its weights hold {heads}")
    own = [tensor for name, tensor in tensors.items() if name.startswith("vocabulary.")]
    if len(own) == 1:
        tensors |= {f"vocabulary.{i}.weight": own[0] for i in range(heads)}
    if names is not None and own and len(own[0]) > len(names):
        tensors |= {name: tensors[name][names] for name in tensors if name.startswith("vocabulary.")}
    made = HeadsConfig(
        "medusa",
        plain_layer(width),
        width,
        taps=(-1,),
        vocab_size=vocabulary_size(config, None if names is not None else own, target, label),
        draft_vocab_size=None if names is None else len(names),
        flags={"shared_vocabulary": not own, "bias": any(name.endswith(".bias") for name in tensors)},
        heads=heads,
        blocks=blocks,
    )
    found: Medusa = filled(Medusa(made), tensors, names, label)
    return found


def write_medusa(head: Medusa, folder: str | os.PathLike[str], base: str = "", layout: str = "release") -> None:
    """Write a folder that `read_medusa` and the release's tools or vLLM can read; `base` names the target.

    vLLM needs a vocabulary: for heads that share the target's, that one is written, marked `original_lm_head`.
    """
    if layout not in WRITE:
        raise InputError(f"there is no layout '{layout}'; choose from {', '.join(WRITE)}")
    rules = [(ours, theirs.replace("{last}", str(head.config.blocks))) for ours, theirs in WRITE[layout]]
    tensors = {rename(name, rules): tensor for name, tensor in head.slots().items()}
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "base_model_name_or_path": base,
        "hidden_size": head.config.target_hidden,
        "vocab_size": head.config.vocab_size,
    }
    if layout == "release":
        config |= {"medusa_num_heads": head.config.heads, "medusa_num_layers": head.config.blocks}
    else:
        shared, bias = head.config.flag("shared_vocabulary"), head.config.flag("bias")
        config |= {"num_heads": head.config.heads, "num_hidden_layers": head.config.blocks, "medusa_fc_bias": bias}
        config |= {"original_lm_head": shared, "truncated_vocab_size": head.config.draft_vocab_size}
        tensors |= {"lm_heads.0.weight": head.vocabulary} if shared else {}
    if head.draft_tokens is not None:
        tensors["token_map"] = head.draft_tokens
    write_folder(Path(folder), config, on_host(tensors), WEIGHTS if layout == "release" else "model.safetensors")
