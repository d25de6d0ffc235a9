"""A head's tensors together with all readings of its files.

Projects disagree on some details of their formats, and files do not always say which project wrote them. Each possible
interpretation is a `Reading`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from windfall.core.types import InputError
from windfall.heads.base import DraftHead, FeatureHead, HeadConfig
from windfall.heads.kinds import KINDS, load, plain

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MAX_NAMES = 8  # tensors that an error message lists
CONCATENATED = {  # tensors whose columns are the embedding's and the feature's, by kind
    "eagle": ("fc.weight",),
    "griffin": ("fc.fc.weight", "fc.mlp.up_proj.weight"),
    "eagle3": tuple(f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"),
}


class Shape(NamedTuple):
    """What reading a head needs to know about its target."""

    layers: int
    theta: float | None = None
    context: int | None = None

    @classmethod
    def of(cls, config: Any) -> Shape:
        """From the target's transformers config."""
        rope = getattr(config, "rope_parameters", None) or {}
        theta = rope.get("rope_theta") or getattr(config, "rope_theta", None)
        return cls(config.num_hidden_layers, theta, getattr(config, "max_position_embeddings", None))


class Axis(NamedTuple):
    """A detail on which projects differ."""

    name: str
    stated: Sequence[Any]  # values that the file can mean, the most likely first
    others: Sequence[Any] = ()  # what it means to other projects; taken if that clearly agrees better


@dataclass(frozen=True)
class Reading:
    """One interpretation of a file."""

    config: HeadConfig
    choices: dict[str, Any]  # by axis


@dataclass
class Checkpoint:
    """A head's tensors, and all readings of its files."""

    label: str
    tensors: dict[str, Tensor]
    draft_tokens: Tensor | None
    stated: list[Reading] = field(default_factory=list)  # what the file can mean; one, unless it is ambiguous
    others: list[Reading] = field(default_factory=list)  # what other projects would have meant by it

    @property
    def readings(self) -> list[Reading]:
        return [*self.stated, *self.others]

    def build(self, reading: Reading) -> FeatureHead:
        """The head in this reading; all readings share their tensors."""
        with torch.device("meta"):
            head: FeatureHead = load(KINDS[reading.config.kind].head)(reading.config)
        tensors = _feature_last(self.tensors, head) if reading.choices["order"] == "feature first" else self.tensors
        check_tensors(head, tensors, self.label)
        head.load_state_dict(tensors, assign=True)
        head.draft_tokens = self.draft_tokens
        return head.eval()

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        self.tensors = {name: tensor.to(device, dtype) for name, tensor in self.tensors.items()}


def plainly_named(tensors: dict[str, Tensor], label: str) -> dict[str, Tensor]:
    """Under the names of heads, without rotary frequencies, which are computed."""
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("rotary_emb.inv_freq"):
            continue
        if plain(name) in named:
            raise InputError(f"'{label}' has {plain(name)} twice, once as {name}")
        named[plain(name)] = tensor
    return named


def check_tensors(head: DraftHead, tensors: Mapping[str, Tensor], label: str) -> None:
    """Require every tensor of the head, and no other, in the right shape and as floating-point numbers."""
    wanted = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    faults = []
    if missing := sorted(wanted.keys() - tensors.keys()):
        faults.append(f"lacks {_listed(missing)}")
    if unused := sorted(tensors.keys() - wanted.keys()):
        faults.append(f"has {_listed(unused)}, which this kind of head does not use")
    shapes = [
        f"{name} as {tuple(tensors[name].shape)} instead of {shape}"
        for name, shape in sorted(wanted.items())
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if shapes:
        faults.append(f"has {_listed(shapes)}")
    if odd := sorted(name for name in wanted.keys() & tensors.keys() if tensors[name].dtype not in FLOAT_DTYPES):
        faults.append(f"must have floating-point numbers in {_listed([f'{n} ({tensors[n].dtype})' for n in odd])}")
    if faults:
        raise InputError(f"'{label}', taken for a head of kind {head.config.kind}, {'; it '.join(faults)}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _feature_last(tensors: dict[str, Tensor], head: FeatureHead) -> dict[str, Tensor]:
    """The tensors of a project that concatenates the feature before the embedding, with these columns exchanged."""
    width = head.config.layer.hidden_size
    names = [name for name in CONCATENATED[head.config.kind] if name in tensors and tensors[name].dim() == 2]
    return {**tensors, **{name: tensors[name].roll(width, 1) for name in names}}
