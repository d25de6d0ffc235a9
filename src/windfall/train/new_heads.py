"""Untrained heads for a target: the target's widths, and initial weights from which training converges fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from windfall.core.errors import InputError
from windfall.heads.base import FeatureHead, HeadConfig
from windfall.heads.eagle import Eagle
from windfall.heads.eagle3 import Eagle3
from windfall.heads.fitting import fit
from windfall.heads.griffin import Griffin
from windfall.model.target import Target

Head = TypeVar("Head", bound=FeatureHead)


def new_eagle3(target: Target, shape: dict[str, Any]) -> Eagle3:
    """Three taps, each normalised, and the target's final norm if it has one."""
    taps = shape.get("taps") or default_taps(target.decoder.config.num_hidden_layers)
    head = _make(Eagle3, "eagle3", {"fc_norm": True}, tuple(taps), target, shape)
    copy_final_norm(head, target)
    return head


def new_eagle(target: Target, shape: dict[str, Any]) -> Eagle:
    """Embedding and the target's last state through one layer."""
    _refuse(shape, "taps", "a new eagle head reads the target's last state only; leave out the taps")
    return _make(Eagle, "eagle", {"fc_bias": True}, (-1,), target, shape)


def new_griffin(target: Target, shape: dict[str, Any]) -> Griffin:
    """An EAGLE head with GRIFFIN's fusion and two outputs."""
    if (shape.get("layers") or 1) > 1:
        raise InputError("a griffin head has one layer; leave out the number of layers")
    _refuse(shape, "taps", "a new griffin head reads the target's last state only; leave out the taps")
    return _make(Griffin, "griffin", {}, (-1,), target, shape)


def _make(
    kind: type[Head], name: str, flags: dict[str, bool], taps: tuple[int, ...], target: Target, shape: dict[str, Any]
) -> Head:
    """A head with random weights on the target's device; `shape["vocabulary"]` [Vd] are the tokens it drafts."""
    tokens: Tensor | None = shape.get("vocabulary")
    head = kind(
        HeadConfig(
            kind=name,
            layer=layer_like(target, shape),
            target_hidden=target.decoder.config.hidden_size,
            taps=taps,
            vocab_size=target.vocab_size,
            draft_vocab_size=None if tokens is None else len(tokens),
            flags=flags,
        )
    )
    head.draft_tokens = tokens
    initialise(head)
    fit(head, target).float().train()
    return head


def layer_like(target: Target, shape: dict[str, Any]) -> LlamaConfig:
    """The configuration of layers with the target's widths, except for what `shape` sets."""
    config = target.decoder.config
    rope = getattr(config, "rope_parameters", None) or {}
    intermediate = shape.get("intermediate") or getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=intermediate,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        num_hidden_layers=shape.get("layers") or 1,
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-5,
        max_position_embeddings=target.context or 32768,
        rope_parameters={"rope_type": "default", "rope_theta": float(rope.get("rope_theta") or 10000.0)},
        vocab_size=target.vocab_size,
        hidden_act="silu",
    )


def new_parallel(make: Callable[..., Head], target: Target, shape: dict[str, Any], **options: Any) -> Head:
    """Heads that begin as copies of the target's prediction; `make` is `new_medusa` or `new_hydra`."""
    for name in ("taps", "intermediate"):
        _refuse(shape, name, f"these heads read the target's last state and have their own shape; leave out {name}")
    if (shape.get("layers") or 1) > 1:
        raise InputError("these heads have blocks instead of layers; set blocks")
    head = make(target.model, **options, draft_tokens=shape.get("vocabulary"))
    fit(head, target).float().train()
    return head


def _refuse(shape: dict[str, Any], name: str, message: str) -> None:
    if shape.get(name) is not None:
        raise InputError(message)


@torch.no_grad()
def copy_final_norm(head: Any, target: Target) -> None:
    """Let `head.norm` start as the target's final norm, if it has one of the same kind."""
    norm = getattr(target.model.base_model, "norm", None)
    if norm is not None and getattr(norm, "weight", None) is not None and norm.weight.shape == head.norm.weight.shape:
        head.norm.weight.copy_(norm.weight)


def default_taps(layers: int) -> tuple[int, ...]:
    """EAGLE-3's: near the beginning, in the middle and near the end."""
    return tuple(sorted({min(2, layers), max(layers // 2, 1), max(layers - 3, 1)}))


def initialise(module: nn.Module) -> None:
    """Random matrices; those that project back into the residual stream are smaller."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.data.mul_(0.3)
