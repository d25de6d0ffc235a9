"""Models with packed weights, for a CPU: packed after loading, or with the numbers that a GGUF file has.

A GGUF file is converted once into a folder with its configuration, its tokenizer and `panels.safetensors`. This file
stores the panels of each weight under the parameter's name; format, sizes and the GGUF type are in its metadata.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from windfall.checkpoints.bundled import SIGNS_BEFORE_PACKING, signs_of
from windfall.checkpoints.gguf import (
    ARCHITECTURES,
    cache_dir,
    converted,
    dequantised,
    matched,
    opened,
    reordered,
)
from windfall.checkpoints.gguf_blocks import HALVES, INTEGERS, panels
from windfall.checkpoints.model_dir import readable
from windfall.core.types import InputError
from windfall.kernels.few_rows import Kernel, bf16_is_faster, cpu_kernel
from windfall.kernels.packed import PackedLinear
from windfall.kernels.panels import BLOCK, LAYOUT, Panels, is_bf16, of_halves, rounded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE = "file"  # the name of the option that keeps the numbers of a GGUF file
ROUNDED = {"bf16": lambda weight: of_halves(weight.bfloat16()), "int8": rounded}  # by the names of options
WEIGHTS = (*ROUNDED, FILE, "full")
PANELS_FILE = "panels.safetensors"
KEPT_IN_BF16 = ("llama", "mistral", "phi3", "qwen2", "qwen3")  # model types, whose linear layers are only called


class Packed(NamedTuple):
    """A weight as it is stored."""

    weight: Panels
    format_name: str


class CannotPack(InputError):
    """A GGUF file of an unknown kind."""


def can_pack(device: torch.device) -> bool:
    return device.type == "cpu" and cpu_kernel(cache_dir() / "kernels") is not None


def required_kernel(device: torch.device) -> Kernel:
    """The kernel that packed weights need; an InputError if there is none."""
    if device.type != "cpu":
        raise InputError(f"packed weights are for a CPU, not for {device}; use --device cpu, or leave out --weights")
    kernel = cpu_kernel(cache_dir() / "kernels")
    if kernel is None:
        raise InputError("packed weights need Linux and a C compiler (cc, gcc or clang); leave out --weights")
    return kernel


def check_weights(weights: str | None) -> str | None:
    """The name of a kind of weights; an InputError if there is no such kind."""
    if weights is not None and weights not in WEIGHTS:
        raise InputError(f"there are no weights '{weights}'; choose from {', '.join(WEIGHTS)}")
    return weights


def pack(model: PreTrainedModel, weights: str, kernel: Kernel) -> PreTrainedModel:
    """Pack the linear layers of a model on a CPU; everything else becomes float32."""
    setattr(model, SIGNS_BEFORE_PACKING, signs_of(model.parameters()))
    for name, layer in [*model.named_modules()]:
        if _takes_panels(model, name):
            _replace(model, name, Packed(ROUNDED[weights](layer.weight.detach()), weights), kernel)
    return model.float()


def keep_bf16(model: PreTrainedModel) -> PreTrainedModel:
    """Pack the linear layers of a model in float32 whose weights are numbers in bf16: the model stays the same.

    It is returned as it is where bf16 is not faster.
    """
    kernel = cpu_kernel(cache_dir() / "kernels")
    plain = model.config.model_type in KEPT_IN_BF16 and not getattr(model, "is_quantized", False)
    names = [name for name, _ in model.named_modules() if plain and _takes_panels(model, name)]
    if kernel is None or not names or not is_bf16(model.get_submodule(names[0]).weight) or not bf16_is_faster(kernel):
        return model
    for name in names:
        weight: Any = model.get_submodule(name).weight.detach()
        if is_bf16(weight):
            _replace(model, name, Packed(ROUNDED["bf16"](weight), "bf16"), kernel)
    return model


def _replace(model: PreTrainedModel, name: str, packed: Packed, kernel: Kernel) -> None:
    """Let this linear layer have packed weights."""
    layer: Any = model.get_submodule(name)
    embedding: Any = model.get_input_embeddings()
    shared = embedding if embedding.weight is layer.weight else None
    model.set_submodule(name, PackedLinear(kernel, *packed, layer.bias, shared).eval())


def read_gguf(file: Path, name: str, kernel: Kernel) -> tuple[PreTrainedModel, Path]:
    """The model of a GGUF file, whose linear layers stay packed; and its folder, which has the tokenizer."""
    folder = converted(file, f"{name}-panels-{LAYOUT}", _convert)
    with readable(f"cannot load '{file}'", str(file)):
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
        stored = _read(folder)
        model = _with_placeholders(config, stored, kernel)
        tied = {"lm_head.weight": stored["model.embed_tokens.weight"]}  # if the file has no other
        for weight, packed in {**tied, **stored}.items():
            if isinstance(packed, Packed) and _takes_panels(model, _layer(weight)):
                _replace(model, _layer(weight), packed, kernel)
    return model, folder


def _read(folder: Path) -> dict[str, Tensor | Packed]:
    """The weights of a converted GGUF file."""
    with safe_open(str(folder / PANELS_FILE), framework="pt") as file:
        about = json.loads(file.metadata()["packed"])
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {
        name: Packed(Panels(tensor, *about[name][:-1]), about[name][-1]) if name in about else tensor
        for name, tensor in found.items()
    }


def _layer(weight: str) -> str:
    return weight.rpartition(".")[0]


def _takes_panels(model: PreTrainedModel, name: str) -> bool:
    """Whether this is a linear layer that the kernel can compute."""
    layer = model.get_submodule(name)
    return type(layer) is nn.Linear and layer.in_features % BLOCK == 0


def _with_placeholders(config: Any, stored: dict[str, Tensor | Packed], kernel: Kernel) -> PreTrainedModel:
    """The model with all weights but those of packed linear layers, which take no memory."""
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {}
    for name, found in stored.items():
        if isinstance(found, Tensor):
            weights[name] = found
            continue
        if _takes_panels(empty, _layer(name)):
            weights[name] = torch.zeros(1).expand(found.weight.outputs, found.weight.inputs)
        else:
            weights[name] = kernel.unpack(found.weight)
    made: PreTrainedModel = type(empty).from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32)
    return made


def _convert(file: Path, folder: Path) -> None:
    """Write the configuration and the tokenizer of a GGUF file, and its weights in panels."""
    with opened(file) as contents:
        found = matched(contents)
        if found is None:
            known = ", ".join(ARCHITECTURES)
            raise CannotPack(f"weights of '{file}' cannot stay packed: it is none of {known}; use --weights int8")
        empty, tensors, paired = found
        stored, about = {}, {}
        for name, tensor in tensors.items():
            format, inputs = tensor.tensor_type.name, int(tensor.shape[0])
            if len(tensor.shape) == 2 and inputs % BLOCK == 0 and format in (*HALVES, *INTEGERS):
                packed = panels(reordered(tensor.data, tensor, paired), format, inputs)
                stored[name], about[name] = packed.bytes, [*packed[1:], format]
            else:
                stored[name] = torch.from_numpy(reordered(dequantised(tensor), tensor, paired))
    empty.config.save_pretrained(folder)
    if empty.generation_config is not None:
        empty.generation_config.save_pretrained(folder)
    if contents.tokenizer is not None:
        contents.tokenizer.save_pretrained(folder)
    save_file(stored, folder / PANELS_FILE, metadata={"packed": json.dumps(about)})
