"""Zero-pads a small model to the shape of a large one: it writes the same text at the large model's cost.

It is a timing proxy for when no large weights are available. Every matrix is put into a larger one of zeros. Norms are
rescaled, because zeros lower the mean square. Attention heads lie inside larger heads, at the places with the same
rotary frequencies. Additional layers add nothing.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from windfall.core.errors import InputError
from windfall.heads.base import DraftHead
from windfall.heads.block import BlockHead
from windfall.heads.eagle3 import Eagle3
from windfall.heads.layers import head_dim


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that determine its cost, except the vocabulary, which is not changed."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = {
    "llama-3.2-1b": Shape(2048, 16, 8192, 32, 8, 64),
    "llama-3.2-3b": Shape(3072, 28, 8192, 24, 8, 128),
    "llama-3.1-8b": Shape(4096, 32, 14336, 32, 8, 128),
    "llama-3.1-70b": Shape(8192, 80, 28672, 64, 8, 128),
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # with layers like Llama's
LAYOUT: dict[str, tuple[str, ...]] = {  # the meaning of the rows and columns of each parameter
    "embed_tokens": ("token", "hidden"),
    "lm_head": ("token", "hidden"),
    "q_proj": ("query", "hidden"),
    "k_proj": ("key", "hidden"),
    "v_proj": ("key", "hidden"),
    "o_proj": ("hidden", "query"),
    "gate_proj": ("inner", "hidden"),
    "up_proj": ("inner", "hidden"),
    "down_proj": ("hidden", "inner"),
    "fc": ("hidden", "tap"),
    "mask": ("hidden",),
    "before": ("rank", "hidden"),
    "after": ("rank", "hidden"),
    "hidden": ("rank", "hidden"),
    "carried": ("rank", "rank"),
    "scale": ("rank",),
    "norm": ("hidden",),
    "input_layernorm": ("hidden",),
    "post_attention_layernorm": ("hidden",),
    "hidden_norm": ("hidden",),
    "fc_norm": ("tap",),
    "input_norm": ("tap",),
    "q_norm": ("head",),
    "k_norm": ("head",),
}
NORMS = tuple(name for name in LAYOUT if name.endswith("norm"))


class Pair(NamedTuple):
    """A widened model and the widened head that drafts for it."""

    model: Any
    head: DraftHead


class Places(NamedTuple):
    """Which places of the small axis go to which places of the large one."""

    sources: Tensor  # [n] long
    goals: Tensor  # [n] long


def widen_pair(
    model: Any,
    head: DraftHead,
    like: str | Shape = "llama-3.1-8b",
    name: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Pair:
    """A target and its head widened together; they draft the same trees and write the same text."""
    layers = model.config.get_text_config().num_hidden_layers
    wide = widen(model, like, name, device, dtype)
    where = {"device": wide.device, "dtype": wide.dtype}
    return Pair(wide, widen_head(head, like, name or _name(model), layers, **where))


@torch.no_grad()
def widen(
    model: Any,
    like: str | Shape = "llama-3.1-8b",
    name: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """A transformers model of a Llama-like family, zero-padded to the shape `like` (a name in SHAPES, or a Shape).

    Device and dtype are the model's own unless given; the large weights are allocated there. The function is the same
    up to rounding: scale factors that are not powers of two are rounded in bfloat16. The model's name says that it is
    widened; `name` is the name of the small one. A model with more layers than the shape keeps them, and its name says
    how many.
    """
    config = model.config
    if config.model_type not in FAMILIES:
        raise InputError(f"only models of the families {', '.join(FAMILIES)} can be widened, not {config.model_type}")
    widening = Widening.of(config, like, config.hidden_size)
    larger = widening.config(config, widening.layers)
    larger._name_or_path = widening.name(name or _name(model))
    with torch.device("meta"):
        wide = type(model)(larger)
    wide = wide.to(dtype or model.dtype).to_empty(device=device or model.device)
    wide.tie_weights()
    base = wide.base_model
    base.rotary_emb = type(base.rotary_emb)(larger).to(wide.device)  # its buffers are in no checkpoint
    widening.fill(wide, model)
    wide.generation_config = copy.deepcopy(model.generation_config)
    return wide.eval().requires_grad_(False)


@torch.no_grad()
def widen_head(
    head: DraftHead,
    like: str | Shape = "llama-3.1-8b",
    name: str | None = None,
    target_layers: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> DraftHead:
    """A head that makes the same guesses, for a target of the shape `like`; the draft vocabulary is not changed.

    `target_layers` is the number of layers of the small target. It is needed for a head that reads the last layer,
    whose number is higher in the large target.
    """
    config = head.config
    if not isinstance(head, Eagle3 | BlockHead) or getattr(config, "pair", "none") not in ("none", "projected", "path"):
        raise InputError(f"only eagle3 heads and block heads without tables can be widened, not {config.kind}")
    if getattr(config, "conv_taps", 0):
        raise InputError("block heads with convolutions cannot be widened")
    widening = Widening.of(config.layer, like, config.target_hidden)
    hidden = widening.shape.hidden
    deepest = max(widening.shape.layers, target_layers or 0)
    taps = tuple(deepest if tap == target_layers else tap for tap in config.taps)
    layer = widening.config(config.layer, config.layer.num_hidden_layers)
    kind: Any = type(head)
    with torch.device("meta"):
        wide = kind(replace(config, layer=layer, target_hidden=hidden, taps=taps))
    wide = wide.to(dtype or head.dtype).to_empty(device=device or head.device)
    widening.fill(wide, head)
    wide.draft_tokens = None if head.draft_tokens is None else head.draft_tokens.to(wide.device)
    wide.agreement = head.agreement
    wide.__dict__["name"] = widening.name(name or f"{config.kind} head")
    found: DraftHead = wide.eval().requires_grad_(False)
    return found


@dataclass(frozen=True)
class Widening:
    """Where the weights of a small model go in a large one, and the factors they are multiplied by."""

    small: Shape
    shape: Shape
    tap: int  # width of the states that the small head reads
    label: str  # of the large shape

    @classmethod
    def of(cls, config: Any, like: str | Shape, tap: int) -> Widening:
        shape = _find(like)
        small = Shape(
            config.hidden_size,
            config.num_hidden_layers,
            config.intermediate_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim(config),
        )
        made = cls(small, shape, tap, like if isinstance(like, str) else "a larger shape's")
        made.check()
        return made

    def check(self) -> None:
        small, large = self.small, self.shape
        for field, own in (("hidden", max(small.hidden, self.tap)), ("intermediate", small.intermediate)):
            new = getattr(large, field)
            if own > new:
                fitting = [name for name, shape in SHAPES.items() if getattr(shape, field) >= own]
                raise InputError(
                    f"{self.label} is smaller: its {field} width is {new}, this model's {own}; "
                    f"choose from {', '.join(fitting) or 'no shape that is known here'}"
                )
        if small.kv_heads * self.copies > large.kv_heads:
            raise InputError(
                f"{small.heads} heads that share {small.kv_heads} keys do not fit into the {large.heads} heads and "
                f"{large.kv_heads} keys of {self.label}"
            )
        if large.head_dim % small.head_dim:
            raise InputError(
                f"heads of {small.head_dim} do not fit the rotary frequencies of heads of {large.head_dim}"
            )

    @property
    def layers(self) -> int:
        return max(self.small.layers, self.shape.layers)

    def name(self, of: str) -> str:
        deeper = "" if self.layers == self.shape.layers else f" with {self.layers} layers"
        return f"{of} widened to {self.label} cost{deeper}"

    def config(self, small: Any, layers: int) -> Any:
        """The small model's configuration with the large one's sizes."""
        made, shape = copy.deepcopy(small), self.shape
        made.hidden_size, made.intermediate_size = shape.hidden, shape.intermediate
        made.num_attention_heads, made.num_key_value_heads = shape.heads, shape.kv_heads
        made.head_dim = shape.head_dim
        made.rms_norm_eps = small.rms_norm_eps * self.small.hidden / shape.hidden
        if kinds := getattr(small, "layer_types", None):
            made.layer_types = [*kinds, *[kinds[-1]] * (layers - len(kinds))]
        made.num_hidden_layers = layers
        self.check_rope(small, made)
        return made

    def check_rope(self, small: Any, large: Any) -> None:
        """Check that the large heads have the small ones' rotary frequencies at every `stride`-th place."""
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        old, new = (LlamaRotaryEmbedding(config) for config in (small, large))
        if not torch.equal(old.inv_freq, new.inv_freq[:: self.stride]):
            raise InputError(f"rotary positions of the type {old.rope_type} change with the size of a head")

    @property
    def stride(self) -> int:
        return self.shape.head_dim // self.small.head_dim

    @property
    def group(self) -> tuple[int, int]:
        """Query heads that share a key, in the small model and in the large one."""
        return self.small.heads // self.small.kv_heads, self.shape.heads // self.shape.kv_heads

    @property
    def copies(self) -> int:
        """Copies of each key head, if the large model shares one among fewer query heads."""
        return -(-self.group[0] // self.group[1])

    # ---- from the small parameters to the large ones

    def fill(self, wide: nn.Module, small: nn.Module) -> None:
        """Fill with zeros, then put the small parameters in their places."""
        for parameter in wide.parameters():
            parameter.zero_()
        larger = dict(wide.named_parameters())
        for name, parameter in small.named_parameters():
            self._put(larger[name], parameter, _part(name), self._scale(name, small))
        for name, norm in _norms(small):
            field = "eps" if hasattr(norm, "eps") else "variance_epsilon"
            size: int = larger[f"{name}.weight"].numel()
            setattr(wide.get_submodule(name), field, getattr(norm, field) * norm.weight.numel() / size)

    def _put(self, large: Tensor, small: Tensor, part: str, scale: float) -> None:
        precise = torch.float64 if small.dtype == torch.float64 else torch.float32
        values = small.detach().to(large.device, precise) * scale
        axes = [self.places(axis, size) for axis, size in zip(LAYOUT[part], small.shape, strict=False)]
        for dim, places in enumerate(axes):
            values = values.index_select(dim, places.sources.to(large.device))
        goals = torch.meshgrid(*(places.goals.to(large.device) for places in axes), indexing="ij")
        large[goals] = values.to(large.dtype)

    def _scale(self, name: str, small: nn.Module) -> float:
        """The factor of a parameter: norms correct the mean square for the zeros, queries the larger softmax scale."""
        part, sharper = _part(name), math.sqrt(self.stride)
        if part == "q_norm":
            return 1.0
        if part == "k_norm":
            return 1 / sharper
        if part in NORMS:
            width, larger = (self.tap if LAYOUT[part] == ("tap",) else self.small.hidden), self.shape.hidden
            return math.sqrt(width / larger)
        if part == "q_proj":  # a norm after it would remove the factor
            attention = small.get_submodule(name.rpartition(".q_proj")[0])
            return 1.0 if getattr(attention, "q_norm", None) is not None else sharper
        return 1.0

    def places(self, axis: str, size: int) -> Places:
        """Where an axis of the small model lies in the large one; `size` is its length."""
        if axis in ("hidden", "tap"):  # several states may lie side by side
            width = self.small.hidden if axis == "hidden" else self.tap
            goals = torch.arange(size // width)[:, None] * self.shape.hidden + torch.arange(width)
            return Places(torch.arange(size), goals.flatten())
        if axis == "head":
            return Places(torch.arange(size), self._inside())
        if axis == "query":
            group, wide = self.group
            heads = torch.arange(self.small.heads)
            key, place = heads // group, heads % group
            return self._heads(heads, (key * self.copies + place // wide) * wide + place % wide)
        if axis == "key":
            slots = torch.arange(self.small.kv_heads * self.copies)
            return self._heads(slots // self.copies, slots)
        return Places(torch.arange(size), torch.arange(size))

    def _heads(self, old: Tensor, new: Tensor) -> Places:
        """Head old[i] of the small model goes to new[i] of the large one."""
        sources = old[:, None] * self.small.head_dim + torch.arange(self.small.head_dim)
        goals = new[:, None] * self.shape.head_dim + self._inside()
        return Places(sources.flatten(), goals.flatten())

    def _inside(self) -> Tensor:
        """[d] places of a small head inside a large one; halves stay halves, as rotary positions pair them."""
        half = torch.arange(self.small.head_dim // 2) * self.stride
        return torch.cat([half, half + self.shape.head_dim // 2])


def _find(like: str | Shape) -> Shape:
    if isinstance(like, Shape):
        return like
    if like not in SHAPES:
        raise InputError(f"there is no shape '{like}'; choose from {', '.join(SHAPES)}")
    return SHAPES[like]


def _part(name: str) -> str:
    """The key of LAYOUT for a parameter: q_proj for layers.0.self_attn.q_proj.weight."""
    words = name.removesuffix(".weight").removesuffix(".bias").split(".")
    part = next(word for word in reversed(words) if not word.isdigit())
    if part not in LAYOUT:
        raise InputError(f"it is not known how to widen {name}")
    return part


def _norms(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if "Norm" in type(module).__name__ and hasattr(module, "weight"):
            yield name, module


def _name(model: Any) -> str:
    return os.path.basename(str(model.config._name_or_path).rstrip("/")) or type(model).__name__
