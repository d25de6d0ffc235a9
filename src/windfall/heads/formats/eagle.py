"""The files of EAGLE-1/2 heads (also of HASS and TALF) and of GRIFFIN heads."""

from __future__ import annotations

from typing import Any

from windfall.heads.base import HeadConfig
from windfall.heads.formats.config import ConfigReader, layer_config


class EagleReader(ConfigReader):
    def flags(self) -> dict[str, bool]:
        found = super().flags()
        if self.all_keys.get("eagle_fc_bias", self.layer.get("bias")) and not found["fc_bias"]:
            self.refuse("says that fc has a bias, and lacks fc.bias")
        return found


class GriffinReader(ConfigReader):
    def layers(self) -> int:
        count = super().layers()
        if count != 1:
            self.refuse(f"has {count} layers; a griffin head has one")
        return count


def eagle_config(config: HeadConfig, vocabulary: int, dtype: str) -> dict[str, Any]:
    named = {"architectures": ["LlamaForCausalLM"], "torch_dtype": dtype}
    return {**named, **layer_config(config, vocabulary), "bias": config.flag("fc_bias")}


def griffin_config(config: HeadConfig, vocabulary: int, dtype: str) -> dict[str, Any]:
    named = {"architectures": ["LlamaForCausalLM"], "torch_dtype": dtype}
    return {**named, **layer_config(config, vocabulary), "qkv_bias": config.layer.attention_bias}
