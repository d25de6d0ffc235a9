"""Read and write the part of a head's config.json that all feature heads share: the decoder layer.

Where config and tensors disagree, the tensors count.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from windfall.checkpoints.quiet_libs import first_line, quiet
from windfall.core.types import InputError
from windfall.heads.base import HeadConfig
from windfall.heads.formats.checkpoint import Axis, Reading, Shape

DEFAULT_THETA = 10000.0
LAYER_KEYS = (  # of a layer's config that are written unchanged
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
)
FULL, SLIDING = "full_attention", "sliding_attention"  # values of layer_types
MROPE_KEYS = ("mrope_section", "mrope_interleaved")  # how positions in images share the channels
PARTIAL = "partial_rotary_factor"


def layer_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the head's own layer."""
    wrapped = config.get("transformer_layer_config") or (config.get("model_type") == "eagle" and config.get("model"))
    return dict(wrapped if isinstance(wrapped, dict) else config)


def vocabulary_size(config: Mapping[str, Any], tensors: Mapping[str, Tensor], label: str) -> int:
    """The number of target tokens that the head knows: the rows of its embedding (may be padded), if it has one."""
    own = tensors.get("embed_tokens.weight")
    return positive_int(layer_of(config), "vocab_size", label) if own is None or own.dim() != 2 else len(own)


def positive_int(layer: Mapping[str, Any], key: str, label: str, default: int | None = None) -> int:
    value = layer.get(key)
    value = default if value is None else value
    if value is None:
        raise InputError(f"the config.json of '{label}' lacks {key}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"the config.json of '{label}' says {key}: {value!r}, which must be a whole number above 0")
    return value


@dataclass
class ConfigReader:
    """From a config and tensors to the readings of a head. Subclasses add what is special to their format."""

    kind: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    label: str
    shape: Shape | None  # of the target

    def __post_init__(self) -> None:
        self.layer = layer_of(self.config)
        self.nested = self.config.get("eagle_config") or {}
        if not isinstance(self.nested, dict):
            self.refuse("says eagle_config, but not as a JSON object")
        self.all_keys = self.config | self.nested
        scaled = self.layer.get("logit_scale", self.config.get("logit_scale")) is not None
        self.logit_scale = self._positive_number("logit_scale", 1.0) if scaled else 1.0
        self._remove_unused()

    def _remove_unused(self) -> None:
        """Take out tensors that no engine reads, and multiply the head's own vocabulary by `logit_scale`."""
        for name in list(self.tensors):
            later = re.fullmatch(r"layers\.([1-9]\d*)\.hidden_norm\.weight", name)
            if later and f"layers.{later[1]}.input_layernorm.weight" in self.tensors:
                del self.tensors[name]
        own = self.tensors.get("lm_head.weight")
        if own is not None and own.is_floating_point() and self.logit_scale != 1:
            self.tensors["lm_head.weight"] = (own.float() * self.logit_scale).to(own.dtype)
            self.logit_scale = 1.0

    def readings(self, drafted: int | None) -> tuple[list[Reading], list[Reading]]:
        """The readings that the file states, and those of other projects; `drafted` is the draft vocabulary's size."""
        axes = [*self.axes(), self._theta(), Axis("order", ["embedding first"], ["feature first"])]
        stated = self._product(axes, [axis.stated for axis in axes], drafted)
        every = self._product(axes, [(*axis.stated, *axis.others) for axis in axes], drafted)
        known = [reading.choices for reading in stated]
        return stated, [reading for reading in every if reading.choices not in known]

    def _product(self, axes: list[Axis], values: list[Sequence[Any]], drafted: int | None) -> list[Reading]:
        names = [axis.name for axis in axes]
        choices = [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*values)]
        return [Reading(self._head_config(chosen, drafted), chosen) for chosen in choices]

    def _head_config(self, chosen: dict[str, Any], drafted: int | None) -> HeadConfig:
        return HeadConfig(
            kind=self.kind,
            layer=self._layer_config(chosen["rope_theta"]),
            target_hidden=self.target_hidden(),
            taps=tuple(chosen["taps"]),
            vocab_size=vocabulary_size(self.config, self.tensors, self.label),
            draft_vocab_size=drafted,
            flags={**self.flags(), **{name: chosen[name] for name in ("norm_before_residual", "norm_output")}},
            windows=self._windows(),
            logit_scale=self.logit_scale,
        )

    # -- what the formats differ in

    def axes(self) -> list[Axis]:
        """taps, norm_before_residual and norm_output."""
        return [Axis("taps", [[-1]]), Axis("norm_before_residual", [False]), Axis("norm_output", [False])]

    def target_hidden(self) -> int:
        """The width of one of the target's states."""
        return self.positive_int("hidden_size")

    def flags(self) -> dict[str, bool]:
        has = self.tensors.__contains__
        return {
            "fc_bias": has("fc.bias"),
            "own_embedding": has("embed_tokens.weight"),
            "own_vocabulary": has("lm_head.weight"),
        }

    # -- the layer

    def _theta(self) -> Axis:
        given = self._rope().get("rope_theta") or self.layer.get("rope_theta")
        if given is not None:
            if not isinstance(given, int | float) or given <= 0:
                self.refuse(f"says rope_theta: {given!r}, which must be a number above 0")
            return Axis("rope_theta", [float(given)])
        target = self.shape.theta if self.shape else None
        return Axis("rope_theta", [DEFAULT_THETA, *([float(target)] if target not in (None, DEFAULT_THETA) else [])])

    def _layer_config(self, theta: float) -> LlamaConfig:
        heads, width = self.positive_int("num_attention_heads"), self.positive_int("hidden_size")
        rope, context = self._rope(), self.shape and self.shape.context
        has = self.tensors.__contains__
        attention, queries = "layers.0.self_attn.", self.matrix("layers.0.self_attn.q_proj.weight").shape[0]
        values = {
            "hidden_size": width,
            "intermediate_size": self.positive_int("intermediate_size"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.positive_int("num_key_value_heads", heads),
            "num_hidden_layers": self.layers(),
            "head_dim": queries // heads,
            "max_position_embeddings": self.positive_int("max_position_embeddings", context or 2048),
            "rms_norm_eps": self._positive_number("rms_norm_eps", 1e-6),
            "hidden_act": self._activation(),
            "vocab_size": self.positive_int("vocab_size"),
            "attention_bias": has(f"{attention}q_proj.bias"),
            "mlp_bias": has("layers.0.mlp.gate_proj.bias"),
            "rope_parameters": {**rope, "rope_theta": theta},
        }
        rotated = int(values["head_dim"] * rope.get(PARTIAL, 1.0))
        if rotated < 2 or rotated % 2:
            self.refuse(f"rotates {rotated} of {values['head_dim']} channels, which must be an even number above 0")
        try:
            with quiet():
                config = LlamaConfig(**values)
        except Exception as error:
            raise InputError(f"the config.json of '{self.label}' cannot be used: {first_line(error)}") from error
        config.qk_norm, config.o_bias = has(f"{attention}q_norm.weight"), has(f"{attention}o_proj.bias")
        return config

    def _windows(self) -> tuple[int | None, ...]:
        """By layer: `sliding_window` in layers that `layer_types` calls sliding, or, without that list, in those from
        `max_window_layers` on if `use_sliding_window` is true."""
        layers, kinds = self.layers(), self.layer.get("layer_types")
        used = self.layer.get("use_sliding_window")
        if self.layer.get("sliding_window") is None or used is False or (kinds is None and used is None):
            return ()
        if kinds is None:
            first = self.layer.get("max_window_layers") or 0
            kinds = [SLIDING if layer >= first else FULL for layer in range(layers)]
        if not isinstance(kinds, list) or len(kinds) < layers:
            self.refuse(f"says layer_types: {kinds!r}, which must name the attention of its {layers} layers")
        if odd := [kind for kind in kinds[:layers] if kind not in (FULL, SLIDING)]:
            self.refuse(f"has a layer of type {odd[0]!r}; windfall knows {FULL} and {SLIDING}")
        window = self.positive_int("sliding_window")
        found = tuple(window if kind == SLIDING else None for kind in kinds[:layers])
        return found if any(found) else ()

    def layers(self) -> int:
        """The number of layers that there are tensors for; configs may give the target's number."""
        count = 1
        while f"layers.{count}.self_attn.q_proj.weight" in self.tensors:
            count += 1
        return count

    def _rope(self) -> dict[str, Any]:
        """The rotary positions. Multi-axis ones (mrope) are ordinary in a text, where all axes are equal."""
        found = self.layer.get("rope_parameters") or self.layer.get("rope_scaling") or {}
        if not isinstance(found, dict):
            self.refuse("says rope_scaling, but not as a JSON object")
        kind = found.get("rope_type") or found.get("type") or "default"
        kind = "default" if kind == "mrope" else kind
        if kind not in ("default", *ROPE_INIT_FUNCTIONS):
            self.refuse(f"has rotary positions of a kind that windfall does not know ({kind})")
        rope = {key: value for key, value in copy.deepcopy(found).items() if key not in (*MROPE_KEYS, PARTIAL, "type")}
        share = found.get(PARTIAL) if found.get(PARTIAL) is not None else self.layer.get(PARTIAL)
        if share is not None and (not isinstance(share, int | float) or not 0 < share <= 1):
            self.refuse(f"says {PARTIAL}: {share!r}, which must be a number above 0 and up to 1")
        return {**rope, "rope_type": kind, **({PARTIAL: share} if share not in (None, 1) else {})}

    def _activation(self) -> str:
        name = self.layer.get("hidden_act", "silu")
        if name not in ACT2FN:
            self.refuse(f"has the activation {name!r}, which transformers does not know")
        return str(name)

    def matrix(self, name: str) -> Tensor:
        found = self.tensors.get(name)
        if found is None or found.dim() != 2:
            self.refuse(f"lacks {name}" if found is None else f"has a {name} of shape {tuple(found.shape)}")
        return found

    def positive_int(self, key: str, default: int | None = None) -> int:
        return positive_int(self.layer, key, self.label, default)

    def _positive_number(self, key: str, default: float) -> float:
        value = self.layer.get(key, self.config.get(key, default))
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            self.refuse(f"says {key}: {value!r}, which must be a number above 0")
        return float(value)

    def refuse(self, reason: str) -> NoReturn:
        raise InputError(f"'{self.label}' {reason}")


def layer_config(config: HeadConfig, vocabulary: int) -> dict[str, Any]:
    """The head's own layer as transformers writes it."""
    layer = config.layer
    rope = {key: value for key, value in layer.rope_parameters.items() if key not in ("rope_theta", "type", PARTIAL)}
    share = layer.rope_parameters.get(PARTIAL)
    return {
        "model_type": "qwen3" if getattr(layer, "qk_norm", False) else "llama",
        **{key: getattr(layer, key) for key in LAYER_KEYS},
        "rope_theta": layer.rope_parameters["rope_theta"],
        "rope_scaling": rope if rope["rope_type"] != "default" else None,
        **({} if share is None else {PARTIAL: share}),
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        **_sliding_config(config),
    }


def _sliding_config(config: HeadConfig) -> dict[str, Any]:
    """The windows of the layers as speculators writes them."""
    sizes = {window for window in config.windows if window is not None}
    if not sizes:
        return {}
    if len(sizes) > 1:
        raise InputError(f"layers with different windows ({', '.join(map(str, sorted(sizes)))}) cannot be written")
    kinds = [FULL if window is None else SLIDING for window in config.windows]
    return {"sliding_window": sizes.pop(), "use_sliding_window": True, "layer_types": kinds}
