"""Medusa (Cai et al. 2024): independent heads on the target's last state, each one token further ahead; and the files
that they come in."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig

from windfall.core.types import InputError
from windfall.heads.base import FeatureHead, HeadConfig
from windfall.heads.files import read_config, read_tensors, write_folder

Rules = Sequence[tuple[str, str]]  # patterns of names and what becomes of them

WEIGHTS = "medusa_lm_head.safetensors"
READ = (  # the names of the release and of vLLM → our slots
    (r"medusa_heads?\.(.+)", r"\1"),
    (r"(\d+)\.(\d+)\.linear\.(\w+)", r"blocks.\1.\2.\3"),
    (r"blocks\.(\d+)\.layers\.(\d+)\.(\w+)", r"blocks.\1.\2.\3"),
    (r"(\d+)\.\d+\.weight", r"vocabulary.\1.weight"),
    (r"lm_heads\.(\d+)\.weight", r"vocabulary.\1.weight"),
    (r"lm_head\.weight", r"vocabulary.0.weight"),
)
WRITE = {  # our slots → their names; {last} is the place after the last block
    "release": (
        (r"blocks\.(\d+)\.(\d+)\.(\w+)", r"\1.\2.linear.\3"),
        (r"vocabulary\.(\d+)\.weight", r"\1.{last}.weight"),
    ),
    "vllm": (
        (r"blocks\.(\d+)\.(\d+)\.(\w+)", r"blocks.\1.layers.\2.\3"),
        (r"vocabulary\.(\d+)\.weight", r"lm_heads.\1.weight"),
    ),
}


@dataclass(frozen=True)
class HeadsConfig(HeadConfig):
    """Several heads, one for each token ahead. Flags: shared_vocabulary, and those of the kinds."""

    heads: int = 4  # as many tokens are drafted at the most
    blocks: int = 1  # residual blocks of a head


class Heads(FeatureHead):
    """What Medusa and Hydra share: a vocabulary for each head, or (`shared_vocabulary`) the target's for all."""

    config: HeadsConfig

    def __init__(self, config: HeadsConfig):
        super().__init__(config)
        drafted = config.draft_vocab_size or config.vocab_size
        own, biased = not config.flag("shared_vocabulary"), config.flag("vocabulary_bias")
        shape = (config.heads, drafted, config.layer.hidden_size)
        self.vocabularies = nn.Parameter(torch.zeros(shape)) if own else None
        self.vocabulary_biases = nn.Parameter(torch.zeros(shape[:2])) if own and biased else None

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def head_logits(self, head: int, state: Tensor) -> Tensor:
        """One head's states [.., H] → [.., Vd]."""
        if self.vocabularies is None:
            return super().logits(state)
        bias = None if self.vocabulary_biases is None else self.vocabulary_biases[head]
        return F.linear(state, self.vocabularies[head], bias)

    def copy_vocabulary(self, weight: Tensor) -> None:
        """Start every head's own vocabulary from the target's [V, H]."""
        if self.vocabularies is not None:
            rows = weight if self.draft_tokens is None else weight[self.draft_tokens]
            self.vocabularies.data.copy_(rows.detach().expand_as(self.vocabularies))

    def slots(self) -> dict[str, Tensor]:
        """Every parameter, head by head, under the names that files are translated to and from."""
        found: dict[str, Tensor] = {}
        for part, own in (("weight", self.vocabularies), ("bias", self.vocabulary_biases)):
            found |= {} if own is None else {f"vocabulary.{i}.{part}": each for i, each in enumerate(own.data)}
        return found


class Medusa(Heads):
    """Head i guesses x[t+2+i] from the feature of position t alone. Flags: shared_vocabulary, bias (of the blocks).

    The heads' weights are stacked, so that one product serves them all. A new head repeats the target's own guess.
    """

    def __init__(self, config: HeadsConfig):
        super().__init__(config)
        heads, width = config.heads, config.layer.hidden_size
        biased = config.blocks if config.flag("bias") else 0
        self.weights = nn.ParameterList(torch.zeros(heads, width, width) for _ in range(config.blocks))
        self.biases = nn.ParameterList(torch.zeros(heads, 1, width) for _ in range(biased))

    def states(self, features: Tensor) -> Tensor:
        """Features [n, H] → [heads, n, H], what the vocabularies read."""
        hidden = features.expand(self.config.heads, *features.shape)
        for place, weight in enumerate(self.weights):
            moved = torch.bmm(hidden, weight.mT)
            hidden = hidden + F.silu(moved + self.biases[place] if len(self.biases) else moved)
        return hidden

    def logits(self, state: Tensor) -> Tensor:
        """All heads' states [heads, n, H] → [heads, n, Vd]."""
        return super().logits(state) if self.vocabularies is None else torch.bmm(state, self.vocabularies.mT)

    def slots(self) -> dict[str, Tensor]:
        found = super().slots()
        for j, weight in enumerate(self.weights):
            found |= {f"blocks.{i}.{j}.weight": each for i, each in enumerate(weight.data)}
        for j, bias in enumerate(self.biases):
            found |= {f"blocks.{i}.{j}.bias": each for i, each in enumerate(bias.data[:, 0])}
        return found


def new_medusa(
    model: Any, heads: int = 4, blocks: int = 1, shared_vocabulary: bool = True, draft_tokens: Tensor | None = None
) -> Medusa:
    """Untrained heads for a transformers model; `draft_tokens` [Vd] narrows what they choose from."""
    vocabulary = model.get_output_embeddings().weight  # [V, H]
    config = HeadsConfig(
        "medusa",
        plain_layer(vocabulary.shape[1]),
        vocabulary.shape[1],
        taps=(-1,),
        vocab_size=len(vocabulary),
        draft_vocab_size=None if draft_tokens is None else len(draft_tokens),
        flags={"shared_vocabulary": shared_vocabulary, "bias": True},
        heads=heads,
        blocks=blocks,
    )
    head = Medusa(config)
    head.draft_tokens = draft_tokens
    head.copy_vocabulary(vocabulary)
    return head


def plain_layer(width: int) -> LlamaConfig:
    """The layer of heads that have none: nothing but a width."""
    return LlamaConfig(hidden_size=width, num_attention_heads=1)


# ---- files


def read_medusa(folder: str | os.PathLike[str], target: Any = None) -> Medusa:
    """Medusa heads from a folder, named as in the release or in vLLM; every tensor must have its place.

    The weights decide how many heads there are, as the release's configurations name fewer than their files hold.
    Where the file holds no vocabularies all heads share the target's, whose transformers configuration (`target`)
    then says how many tokens that has, if the file does not. A single vocabulary is every head's, as in vLLM.
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
    """A folder that `read_medusa` takes, and the release's tools or vLLM with it; `base` names the target.

    vLLM has no heads without a vocabulary: of heads that share the target's it gets that one, as `original_lm_head`.
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


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of their own, as files want them."""
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }


def rename(name: str, rules: Rules) -> str:
    """The name after every rule whose pattern is the whole of it, in order."""
    for pattern, becomes in rules:
        if re.fullmatch(pattern, name):
            name = re.sub(pattern, becomes, name)
    return name


def largest(names: Mapping[str, Tensor], pattern: str) -> int:
    """The largest number that the pattern finds in the names; -1 if it finds none."""
    return max((int(found[1]) for name in names if (found := re.match(pattern, name))), default=-1)


def vocabulary_size(config: Mapping[str, Any], own: Sequence[Tensor] | None, target: Any, label: str) -> int:
    """How many tokens the target has, as far as the file or the target's configuration says."""
    size = config.get("vocab_size") or (len(own[0]) if own else None) or getattr(target, "vocab_size", None)
    if size is None:
        raise InputError(f"'{label}' does not say how many tokens its target has; add vocab_size to its config.json")
    return int(size)


def filled(head: Any, tensors: Mapping[str, Tensor], names: Tensor | None, label: str) -> Any:
    """The head with these tensors in its slots; what is missing, left over or of another shape is named."""
    head = head.to(next(iter(tensors.values())).dtype)
    slots = head.slots()
    if missing := sorted(slots.keys() - tensors.keys()):
        raise InputError(f"'{label}' lacks {len(missing)} of its weights: {_some(missing)}")
    if unused := sorted(tensors.keys() - slots.keys()):
        raise InputError(f"'{label}' has weights that {head.config.kind} heads have no use for: {_some(unused)}")
    for name, slot in slots.items():
        if tensors[name].shape != slot.shape:
            found, wanted = tuple(tensors[name].shape), tuple(slot.shape)
            raise InputError(f"'{label}' has weights of another shape: {name} is {found}, not {wanted}")
        slot.copy_(tensors[name])
    if names is not None:
        low, high, limit = int(names.min()), int(names.max()), head.config.vocab_size
        if names.dim() != 1 or len(set(names.tolist())) < len(names) or low < 0 or high >= limit:
            raise InputError(f"the token_map of '{label}' must name different tokens below {limit}")
        head.draft_tokens = names.long()
    return head.eval()


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
