"""Hydra (Ankner et al. 2024): heads that also read the tokens drafted so far; Hydra++ puts a decoder layer over the
target's features first. And the files that they come in."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig

from windfall.core.types import InputError
from windfall.heads.eagle3 import Plain
from windfall.heads.files import read_config, read_tensors, write_folder
from windfall.heads.layers import Memory, RMSNorm
from windfall.heads.medusa import Heads, HeadsConfig, filled, largest, on_host, plain_layer, rename, vocabulary_size

WEIGHTS = "hydra_lm_head.safetensors"
PREFIX = "prefix_embeding_layer"  # so spelt
NOT_OURS = r"^input_embed_fn\.|\.embed_tokens\.|inv_freq$"  # the target's embedding, which comes along, and angles
READ = {  # the release's names → our slots, by hydra_head_arch; dropout takes the even places in prefix-mlp
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


class Hydra(Heads):
    """Head i guesses x[t+2+i] from the feature of position t and the tokens x[t+1] … x[t+1+i].

    Flags: shared_vocabulary, vocabulary_bias, prefix (Hydra++). A new head repeats the target's own guess.
    """

    def __init__(self, config: HeadsConfig):
        super().__init__(config)
        width = config.layer.hidden_size
        self.mlps = nn.ModuleList(Grounded(width, i + 1, config.blocks) for i in range(config.heads))
        self.prefix = Prefix(config.layer) if config.flag("prefix") else None
        self.dropout = nn.Dropout(0.0)  # for training, before every block and vocabulary

    def contexts(self, features: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        """What the heads read of the target: its features [B, n, H] themselves, or the prefix layer's view of them."""
        if self.prefix is None:
            return features
        found: Tensor = self.prefix(features, self.rotary(positions, features.dtype), memory)
        return found

    def states(self, head: int, context: Tensor, tokens: Tensor) -> Tensor:
        """One head's view of contexts [.., H] and of head + 1 tokens [.., head + 1] each: [.., H]."""
        embedded = self.embed(tokens).flatten(-2)  # [.., (head + 1) * H]
        state: Tensor = self.mlps[head](torch.cat([context, embedded], -1), self.dropout)
        dropped: Tensor = self.dropout(state)
        return dropped

    def slots(self) -> dict[str, Tensor]:
        found = super().slots()
        for i, mlp in enumerate(self.mlps):
            for name, parameter in mlp.named_parameters():
                kind, _, rest = name.partition(".")
                found[f"{kind}.{i}.{rest}"] = parameter.data
        prefix = [] if self.prefix is None else self.prefix.named_parameters()
        return found | {f"prefix.{name}": parameter.data for name, parameter in prefix}


class Grounded(nn.Module):
    """Residual blocks; the first reads the context and the embeddings of some tokens, and its residual is learnt."""

    def __init__(self, width: int, tokens: int, blocks: int):
        super().__init__()
        wide = width * (tokens + 1)
        self.blocks = nn.ModuleList(nn.Linear(width if place else wide, width) for place in range(blocks))
        self.residual = nn.Linear(wide, width)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()
            self.residual.weight[:, :width] = torch.eye(width)

    def forward(self, x: Tensor, dropout: nn.Module) -> Tensor:
        x = dropout(x)
        x = self.residual(x) + F.silu(self.blocks[0](x))
        for block in self.blocks[1:]:
            x = dropout(x)
            x = x + F.silu(block(x))
        return x


class Prefix(nn.Module):
    """A decoder layer over the features of everything committed, and a norm."""

    def __init__(self, layer: LlamaConfig):
        super().__init__()
        self.layer = Plain(layer, 0)
        self.norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)

    def forward(self, features: Tensor, turn: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        out: Tensor = self.norm(self.layer(features, turn, memory))
        return out


def new_hydra(
    model: Any,
    heads: int = 4,
    blocks: int = 1,
    prefix: bool = False,
    shared_vocabulary: bool = True,
    draft_tokens: Tensor | None = None,
) -> Hydra:
    """Untrained heads for a transformers model; Hydra++ has 4 blocks and a prefix layer."""
    vocabulary = model.get_output_embeddings().weight  # [V, H]
    width = vocabulary.shape[1]
    config = HeadsConfig(
        "hydra",
        prefix_layer(model.config.get_text_config()) if prefix else plain_layer(width),
        width,
        taps=(-1,),
        vocab_size=len(vocabulary),
        draft_vocab_size=None if draft_tokens is None else len(draft_tokens),
        flags={"shared_vocabulary": shared_vocabulary, "vocabulary_bias": not shared_vocabulary, "prefix": prefix},
        heads=heads,
        blocks=blocks,
    )
    head = Hydra(config)
    head.draft_tokens = draft_tokens
    head.copy_vocabulary(vocabulary)
    if head.prefix is not None:
        _start_as_identity(head.prefix, getattr(model.base_model, "norm", None))
    return head


def _start_as_identity(prefix: Prefix, last: nn.Module | None) -> None:
    """Let the layer add nothing, and its norm give features their usual size back: that of the target's last norm."""
    with torch.no_grad():
        prefix.layer.self_attn.o_proj.weight.zero_()
        prefix.layer.mlp.down_proj.weight.zero_()
        scale = getattr(last, "weight", torch.ones(1)).detach().float()
        prefix.norm.weight.fill_(float(scale.pow(2).mean().sqrt()))


def prefix_layer(target: Any) -> LlamaConfig:
    """One decoder layer of the target's own measures, as the release has it."""
    heads, width = target.num_attention_heads, target.hidden_size
    names = ("hidden_act", "rms_norm_eps", "max_position_embeddings", "head_dim")
    known = {name: found for name in names if (found := getattr(target, name, None)) is not None}
    rope = getattr(target, "rope_parameters", None) or {}
    if "rope_type" in rope:  # one for all layers; ours turns whole heads
        known["rope_parameters"] = {name: each for name, each in rope.items() if name != "partial_rotary_factor"}
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=getattr(target, "intermediate_size", None) or 4 * width,
        num_attention_heads=heads,
        num_key_value_heads=getattr(target, "num_key_value_heads", None) or heads,
        num_hidden_layers=1,
        **known,
    )


# ---- files


def read_hydra(folder: str | os.PathLike[str], target: Any = None) -> Hydra:
    """Hydra heads from a folder in the release's layout (`mlp` or `prefix-mlp`, grounded).

    The release does not say how its prefix layer is built: like the target, whose transformers configuration is
    `target`; what `write_hydra` writes says it itself. Where a file holds no vocabularies all heads share the target's.
    """
    label, config = str(folder), read_config(Path(folder), str(folder))
    arch = config.get("hydra_head_arch", "mlp")
    if arch not in READ:
        raise InputError(f"'{label}' has heads of the kind '{arch}'; only {' and '.join(READ)} can be read")
    if not config.get("grounded_heads", False):
        raise InputError(
            f"the heads of '{label}' do not read drafted tokens (grounded_heads); only those that do can be"
        )
    ours = {name: t for name, t in read_tensors(Path(folder), label).items() if not re.search(NOT_OURS, name)}
    tensors = {_slot(name, arch): tensor for name, tensor in ours.items()}
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
    """A folder in the release's layout that `read_hydra` takes, as safetensors; `base` names the target."""
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
    """Our slot of a name in the release."""
    name = rename(name, READ[arch])
    kind, _, rest = name.partition(".")
    if kind != "blocks" or arch == "mlp":
        return name
    head, place, part = rest.split(".")
    return f"blocks.{head}.{int(place) // 2}.{part}"


def _name(slot: str, arch: str) -> str:
    """The release's name of one of our slots."""
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
