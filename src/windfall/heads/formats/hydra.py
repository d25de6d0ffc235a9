"""The files of Hydra heads, as the release writes them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from windfall.checkpoints.tensors import read_tensors
from windfall.core.types import InputError
from windfall.heads.files import read_config, write_folder
from windfall.heads.formats.parallel import filled, largest, on_host, rename, vocabulary_size
from windfall.heads.hydra import Hydra, prefix_layer
from windfall.heads.medusa import HeadsConfig, plain_layer

WEIGHTS = "hydra_lm_head.safetensors"
PREFIX = "prefix_embeding_layer"  # spelt like this in the files
UNUSED = r"^input_embed_fn\.|\.embed_tokens\.|inv_freq$"  # the target's embedding, and rotary frequencies
READ = {  # names → slots, by hydra_head_arch; in prefix-mlp the even places are dropout modules
    "mlp": (
        (r"hydra_mlp\.(\d+)\.(\d+)\.linear\.(\w+)", r"blocks.\1.\2.\3"),
        (r"hydra_mlp\.(\d+)\.0\.res_connection\.(\w+)", r"residual.\1.\2"),
        (r"hydra_lm_head\.(\d+)\.(\w+)", r"vocabulary.\1.\2"),
    ),
    "prefix-mlp": (
        (r"hydra_mlp\.(\d+)\.(\d+)\.linear\.(\w+)", r"blocks.\1.\2.\3"),
        (r"hydra_mlp\.(\d+)\.1\.res_connection\.(\w+)", r"residual.\1.\2"),
        (r"hydra_lm_head\.(\d+)\.1\.(\w+)", r"vocabulary.\1.\2"),
        (rf"{PREFIX}\.layers\.0\.(.+)", r"prefix.layer.\1"),
        (rf"{PREFIX}\.norm\.weight", r"prefix.norm.weight"),
    ),
}


def read_hydra(folder: str | os.PathLike[str], target: Any = None) -> Hydra:
    """Hydra heads from a folder in the release's layout (`mlp` or `prefix-mlp`, grounded).

    The release's files do not describe the prefix layer, which is built like the target's layers; `target` is the
    target's transformers config. Files of `write_hydra` describe it. Without vocabularies all heads share the target's.
    """
    label, config = str(folder), read_config(Path(folder), str(folder))
    arch = config.get("hydra_head_arch", "mlp")
    if arch not in READ:
        raise InputError(f"'{label}' has heads of the kind '{arch}'; only {' and '.join(READ)} can be read")
    if not config.get("grounded_heads", False):
        raise InputError(
            f"the heads of '{label}' do not read drafted tokens (grounded_heads); only those that do can be"
        )
    used = {name: t for name, t in read_tensors(Path(folder), label).items() if not re.search(UNUSED, name)}
    tensors = {_slot(name, arch): tensor for name, tensor in used.items()}
    names = tensors.pop("token_map", None)
    heads, blocks = 1 + largest(tensors, r"blocks\.(\d+)\."), 1 + largest(tensors, r"blocks\.\d+\.(\d+)\.")
    wanted = max(config.get("hydra_num_heads") or 0, 1)
    if heads < wanted or "blocks.0.0.weight" not in tensors:
        raise InputError(f"'{label}' lacks Hydra heads: its config.json names {wanted}, its weights hold {heads}")
    width = len(tensors["blocks.0.0.weight"])
    own = [tensor for name, tensor in tensors.items() if name.startswith("vocabulary.") and tensor.dim() == 2]
    made = HeadsConfig(
        "hydra",
        _layer(config, target, label) if arch == "prefix-mlp" else plain_layer(width),
        width,
        taps=(-1 - config.get("hidden_state_offset", 0),),
        vocab_size=vocabulary_size(config, None if names is not None else own, target, label),
        draft_vocab_size=None if names is None else len(names),
        flags={
            "shared_vocabulary": not own,
            "vocabulary_bias": "vocabulary.0.bias" in tensors,
            "prefix": arch == "prefix-mlp",
        },
        heads=heads,
        blocks=blocks,
    )
    found: Hydra = filled(Hydra(made), tensors, names, label)
    return found


def write_hydra(head: Hydra, folder: str | os.PathLike[str], base: str = "") -> None:
    """Write a folder in the release's layout, as safetensors; `base` names the target."""
    arch = "mlp" if head.prefix is None else "prefix-mlp"
    tensors = {_name(slot, arch): tensor for slot, tensor in head.slots().items()}
    config = {
        "model_type": "hydra",
        "base_model_name_or_path": base,
        "hydra_num_heads": head.config.heads,
        "hydra_num_layers": head.config.blocks,
        "hydra_head_arch": arch,
        "grounded_heads": True,
        "hidden_state_offset": -1 - head.config.taps[0],
        "hidden_size": head.config.target_hidden,
        "vocab_size": head.config.vocab_size,
    }
    if head.prefix is not None:
        config["prefix_config"] = head.config.layer.to_dict()
    if head.draft_tokens is not None:
        tensors["token_map"] = head.draft_tokens
    write_folder(Path(folder), config, on_host(tensors), WEIGHTS)


def _slot(name: str, arch: str) -> str:
    """The slot of a name in the release."""
    name = rename(name, READ[arch])
    kind, _, rest = name.partition(".")
    if kind != "blocks" or arch == "mlp":
        return name
    head, place, part = rest.split(".")
    return f"blocks.{head}.{int(place) // 2}.{part}"


def _name(slot: str, arch: str) -> str:
    """The release's name of a slot."""
    kind, _, rest = slot.partition(".")
    if kind == "prefix":
        return f"{PREFIX}.{rest.replace('layer.', 'layers.0.', 1)}"
    head, _, rest = rest.partition(".")
    shifted = arch == "prefix-mlp"
    if kind == "vocabulary":
        return f"hydra_lm_head.{head}.{'1.' if shifted else ''}{rest}"
    if kind == "residual":
        return f"hydra_mlp.{head}.{int(shifted)}.res_connection.{rest}"
    place, _, part = rest.partition(".")
    return f"hydra_mlp.{head}.{2 * int(place) + 1 if shifted else place}.linear.{part}"


def _layer(config: dict[str, Any], target: Any, label: str) -> LlamaConfig:
    if "prefix_config" in config:
        return LlamaConfig(**config["prefix_config"])
    if target is None:
        raise InputError(f"'{label}' has a prefix layer like its target's, and does not say which that is")
    return prefix_layer(target)
