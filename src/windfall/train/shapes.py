"""Untrained heads for a target: widths from the target, weights that start near something useful."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from windfall.core.errors import InputError
from windfall.heads import hydra, medusa
from windfall.heads.base import FeatureHead, HeadConfig
from windfall.heads.eagle import Eagle
from windfall.heads.eagle3 import Eagle3
from windfall.heads.fitting import fit
from windfall.heads.griffin import Griffin
from windfall.model.target import Target

Head = TypeVar("Head", bound=FeatureHead)


def layer_like(target: Target, shape: dict[str, Any]) -> LlamaConfig:
    """A layer of the target's widths, unless `shape` says otherwise."""
    config = target.decoder.config
    rope = getattr(config, "rope_parameters", None) or {}
    return LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=shape.get("intermediate")
        or getattr(config, "intermediate_size", None)
        or 4 * config.hidden_size,
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


def new_eagle3(target: Target, shape: dict[str, Any]) -> Eagle3:
    """Three taps, each normalised; the target's final norm where it has one; `shape["vocabulary"]` [Vd] is drafted."""
    count = target.decoder.config.num_hidden_layers
    taps = shape.get("taps") or default_taps(count)
    tokens: Tensor | None = shape.get("vocabulary")
    head = Eagle3(
        HeadConfig(
            kind="eagle3",
            layer=layer_like(target, shape),
            target_hidden=target.decoder.config.hidden_size,
            taps=tuple(taps),
            vocab_size=target.vocab_size,
            draft_vocab_size=None if tokens is None else len(tokens),
            flags={"fc_norm": True},
        )
    )
    head.draft_tokens = tokens
    initialise(head)
    norm = getattr(target.model.base_model, "norm", None)
    if norm is not None and getattr(norm, "weight", None) is not None and norm.weight.shape == head.norm.weight.shape:
        with torch.no_grad():
            head.norm.weight.copy_(norm.weight)
    ready(head, target)
    return head


def new_eagle(target: Target, shape: dict[str, Any]) -> Eagle:
    """Embedding and last state through one layer; `shape["vocabulary"]` [Vd] is drafted."""
    return _on_last_state(Eagle, "eagle", {"fc_bias": True}, target, shape)


def new_griffin(target: Target, shape: dict[str, Any]) -> Griffin:
    """EAGLE's, with GRIFFIN's fusion and two outputs."""
    if (shape.get("layers") or 1) > 1:
        raise InputError("a griffin head has one layer; leave out the number of layers")
    return _on_last_state(Griffin, "griffin", {}, target, shape)


def _on_last_state(kind: type[Head], name: str, flags: dict[str, bool], target: Target, shape: dict[str, Any]) -> Head:
    """A head that reads what the target's vocabulary head reads."""
    _refuse(shape, "taps", f"a new {name} head reads the target's last state and no other; leave out the taps")
    tokens: Tensor | None = shape.get("vocabulary")
    head = kind(
        HeadConfig(
            kind=name,
            layer=layer_like(target, shape),
            target_hidden=target.decoder.config.hidden_size,
            taps=(-1,),
            vocab_size=target.vocab_size,
            draft_vocab_size=None if tokens is None else len(tokens),
            flags=flags,
        )
    )
    head.draft_tokens = tokens
    initialise(head)
    ready(head, target)
    return head


def new_medusa(target: Target, shape: dict[str, Any], **options: Any) -> medusa.Medusa:
    """Heads that repeat the target's own guess; `options` are those of `heads.medusa.new_medusa`."""
    return _parallel(medusa.new_medusa, target, shape, options)


def new_hydra(target: Target, shape: dict[str, Any], **options: Any) -> hydra.Hydra:
    """Heads that repeat the target's own guess; `options` are those of `heads.hydra.new_hydra`."""
    return _parallel(hydra.new_hydra, target, shape, options)


def _parallel(make: Callable[..., Head], target: Target, shape: dict[str, Any], options: dict[str, Any]) -> Head:
    for name in ("taps", "intermediate"):
        _refuse(shape, name, f"these heads read the target's last state and have their own shape; leave out {name}")
    if (shape.get("layers") or 1) > 1:
        raise InputError("these heads have blocks instead of layers; set blocks")
    head = make(target.model, **options, draft_tokens=shape.get("vocabulary"))
    ready(head, target)
    return head


def _refuse(shape: dict[str, Any], name: str, message: str) -> None:
    if shape.get(name) is not None:
        raise InputError(message)


def default_taps(layers: int) -> tuple[int, ...]:
    """EAGLE-3's: near the beginning, the middle, near the end."""
    return tuple(sorted({min(2, layers), max(layers // 2, 1), max(layers - 3, 1)}))


def initialise(module: nn.Module) -> None:
    """Small random matrices, projections back into the residual stream smaller still."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.data.mul_(0.3)


def ready(head: FeatureHead, target: Target) -> None:
    """On the target's device with what it borrows, its own parameters in fp32."""
    fit(head, target).float().train()
