"""The files of EAGLE-3 heads, as SpecForge, SGLang, vLLM and ModelOpt write them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from windfall.heads.base import HeadConfig
from windfall.heads.formats.checkpoint import Axis
from windfall.heads.formats.config import ConfigReader, layer_config

AUX = "eagle_aux_hidden_state_layer_ids"
VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class Eagle3Reader(ConfigReader):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.final_state = self.all_keys.get("use_aux_hidden_state") is False
        if self.final_state:  # such a head does not use `fc`
            for name in [name for name in self.tensors if name.startswith("fc.")]:
                del self.tensors[name]

    def axes(self) -> list[Axis]:
        return [self._taps(), self._residual(), self._output()]

    def _taps(self) -> Axis:
        """The target states that it reads. Tap k is the state after k layers: layer i outputs tap i + 1."""
        if self.final_state:
            return Axis("taps", [[-1]])
        outside, ids = self.config.get(AUX), self._layer_ids()
        if ids is None:
            usual = self._usual_taps()
            return Axis("taps", [usual], self._possible([[i + 1 for i in usual], [i - 1 for i in usual]]))
        if outside is not None:
            return Axis("taps", [ids], self.other_taps(ids))
        return Axis("taps", self._possible([[i + 1 for i in ids], ids]) or [ids])

    def other_taps(self, ids: list[int]) -> list[list[int]]:
        """What ids at the top of the config mean to other projects."""
        return self._possible([[i + 1 for i in ids]])

    def _usual_taps(self) -> list[int]:
        if self.shape is None:
            self.refuse("does not say which of the target's states it reads; read it together with its target")
        layers = self.shape.layers
        usual = [2, layers // 2, layers - 3]
        if not 2 < usual[1] < usual[2] or self._state_count() != 3:
            self.refuse(f"does not say which {self._state_count()} of its target's {layers} layers it reads")
        return usual

    def _possible(self, options: Iterable[list[int]]) -> list[list[int]]:
        deepest = self.shape.layers if self.shape else None
        return [ids for ids in options if min(ids) >= 0 and (deepest is None or max(ids) <= deepest)]

    def _residual(self) -> Axis:
        given = self.config.get("norm_before_residual")
        return self.default_residual() if given is None else Axis("norm_before_residual", [bool(given)])

    def default_residual(self) -> Axis:
        return Axis("norm_before_residual", [False], [True])

    def _output(self) -> Axis:
        """Whether the next step reads the normed state; EAGLE-3.1 heads do, and their files may not say so."""
        given = self.all_keys.get("norm_output")
        return Axis("norm_output", [False], [True]) if given is None else Axis("norm_output", [bool(given)])

    def _layer_ids(self) -> list[int] | None:
        given = self.config.get(AUX) if self.config.get(AUX) is not None else self.nested.get(AUX)
        if given is None:
            return None
        if not isinstance(given, list) or not given or not all(isinstance(i, int) and i >= 0 for i in given):
            self.refuse(f"says {AUX}: {given!r}, which must be a list of layers")
        return list(given)

    def _state_count(self) -> int:
        """The number of target states that it reads."""
        ids = self._layer_ids()
        norms = sum(name.startswith("fc_norm.") for name in self.tensors)
        return len(ids) if ids else self.config.get("num_aux_hidden_states") or norms or 3

    def target_hidden(self) -> int:
        if self.final_state:
            return super().target_hidden()
        fused, taps = self.matrix("fc.weight").shape[1], self._state_count()
        width = self.config.get("target_hidden_size") or fused // taps
        if width * taps != fused:
            self.refuse(f"has an fc.weight with {fused} columns for {taps} states of width {width}")
        return int(width)

    def flags(self) -> dict[str, bool]:
        has, said = self.tensors.__contains__, self.all_keys
        return {
            **super().flags(),
            "fc_norm": has("fc_norm.0.weight") or bool(said.get("fc_norm") or said.get("use_aux_norm")),
            "norm_before_fc": has("input_norm.weight") or bool(said.get("norm_before_fc")),
            "final_state": self.final_state,
        }


def variants(config: HeadConfig) -> dict[str, bool]:
    return {name: config.flag(name) for name in VARIANTS}


def eagle3_config(config: HeadConfig, vocabulary: int, dtype: str) -> dict[str, Any]:
    """Layers as boundaries (vLLM) at the top, as outputs (SGLang, ModelOpt) inside `eagle_config`."""
    outputs = [tap - 1 for tap in config.taps]
    nested = {"use_aux_hidden_state": True, AUX: outputs} if min(outputs) >= 0 else None
    nested = {"use_aux_hidden_state": False} if config.flag("final_state") else nested
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "torch_dtype": dtype,
        **layer_config(config, vocabulary),
        "draft_vocab_size": config.draft_vocab_size or vocabulary,
        "target_hidden_size": config.target_hidden,
        **variants(config),
        **({} if config.flag("final_state") else {AUX: list(config.taps)}),
        **({"eagle_config": nested} if nested else {}),
    }


def vllm_config(config: HeadConfig, vocabulary: int, dtype: str) -> dict[str, Any]:
    """The same as vLLM reads it: layers are boundaries everywhere, and rotary angles are named as in transformers 5."""
    made = eagle3_config(config, vocabulary, dtype)
    if AUX in made:
        made["num_aux_hidden_states"] = len(made[AUX])
        made["eagle_config"] = {"use_aux_hidden_state": True, AUX: made[AUX]}
    scaling = made.pop("rope_scaling") or {"rope_type": "default"}
    made["rope_parameters"] = {**scaling, "rope_theta": made["rope_theta"]}
    made["dtype"] = dtype
    return made


def eagle3_name(name: str) -> str:
    """The name of a tensor in EAGLE-3 files, which call the first layer `midlayer`."""
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name
