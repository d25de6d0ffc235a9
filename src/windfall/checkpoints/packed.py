"""Models with packed weights, for a CPU: packed after loading, or read from a GGUF file as they are.

A GGUF file is converted once into a folder with its configuration, its tokenizer and `packed.safetensors`. This file
holds the blocks of each weight under the name of the model's parameter, and the numbers of their formats as metadata.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
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
from windfall.checkpoints.model_dir import readable
from windfall.core.types import InputError
from windfall.kernels.few_rows import Kernel, cpu_kernel, fits
from windfall.kernels.packed import PackedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE = "file"  # the name of the option that keeps the blocks of a GGUF file
PACKED = {"bf16": "BF16", "int8": "Q8_0"}  # names of options, and of GGUF's formats
WEIGHTS = (*PACKED, FILE)
WIDE = ("F32", "F64")  # formats that are not packed
BLOCKS_FILE = "packed.safetensors"
OUTPUTS_PER_PART = 1024  # that are packed at a time


class Blocks(NamedTuple):
    """A weight as it is stored."""

    bytes: Tensor  # [N, bytes] uint8
    format: int


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
    import gguf

    kind = gguf.GGMLQuantizationType[PACKED[weights]]
    size, _ = gguf.GGML_QUANT_SIZES[kind]
    setattr(model, SIGNS_BEFORE_PACKING, signs_of(model.parameters()))
    for name, layer in [*model.named_modules()]:
        if not _takes_blocks(model, name) or layer.in_features % max(size, 32):
            continue
        parts = torch.split(layer.weight.detach(), OUTPUTS_PER_PART)
        packed = [torch.from_numpy(gguf.quantize(part.float().numpy(), kind)) for part in parts]
        _replace(model, name, Blocks(torch.cat(packed), int(kind)), kernel)
    return model.float()


def _replace(model: PreTrainedModel, name: str, blocks: Blocks, kernel: Kernel) -> None:
    """Let this linear layer have packed weights."""
    layer: Any = model.get_submodule(name)
    embedding: Any = model.get_input_embeddings()
    shared = embedding if embedding.weight is layer.weight else None
    packed = PackedLinear(kernel, *blocks, layer.in_features, layer.bias, shared)
    model.set_submodule(name, packed.eval())


def read_gguf(file: Path, name: str, kernel: Kernel) -> tuple[PreTrainedModel, Path]:
    """The model of a GGUF file, whose linear layers keep their blocks; and its folder, which has the tokenizer."""
    folder = converted(file, f"{name}-packed", _convert)
    with readable(f"cannot load '{file}'", str(file)):
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
        stored = _read(folder)
        model = _with_placeholders(config, stored, kernel)
        tied = {"lm_head.weight": stored["model.embed_tokens.weight"]}  # if the file has no other
        for weight, blocks in {**tied, **stored}.items():
            if isinstance(blocks, Blocks) and _takes_blocks(model, _layer(weight)):
                _replace(model, _layer(weight), blocks, kernel)
    return model, folder


def _read(folder: Path) -> dict[str, Tensor | Blocks]:
    """The weights of a converted GGUF file."""
    with safe_open(str(folder / BLOCKS_FILE), framework="pt") as file:
        formats = json.loads(file.metadata()["formats"])
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {name: Blocks(tensor, formats[name]) if name in formats else tensor for name, tensor in found.items()}


def _layer(weight: str) -> str:
    return weight.rpartition(".")[0]


def _takes_blocks(model: PreTrainedModel, name: str) -> bool:
    """Whether this is a linear layer that the kernel can compute."""
    layer = model.get_submodule(name)
    return type(layer) is nn.Linear and fits(layer.out_features, layer.in_features)


def _with_placeholders(config: Any, stored: dict[str, Tensor | Blocks], kernel: Kernel) -> PreTrainedModel:
    """The model with all weights but those of packed linear layers, which take no memory."""
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {}
    for name, found in stored.items():
        if isinstance(found, Tensor):
            weights[name] = found
            continue
        outputs, inputs = empty.get_parameter(name).shape
        if _takes_blocks(empty, _layer(name)):
            weights[name] = torch.zeros(1).expand(outputs, inputs)
        else:
            weights[name] = kernel.take_rows(found.bytes, torch.arange(outputs), inputs, found.format)
    made: PreTrainedModel = type(empty).from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32)
    return made


def _convert(file: Path, folder: Path) -> None:
    """Write the configuration and the tokenizer of a GGUF file, and the blocks of its weights."""
    with opened(file) as contents:
        found = matched(contents)
        if found is None:
            known = ", ".join(ARCHITECTURES)
            raise InputError(f"weights of '{file}' cannot stay packed: it is none of {known}; use --weights int8")
        empty, tensors, paired = found
        arrays, formats = {}, {}
        for name, tensor in tensors.items():
            packed = len(tensor.shape) == 2 and tensor.tensor_type.name not in WIDE
            values = np.ascontiguousarray(tensor.data).view(np.uint8) if packed else dequantised(tensor)
            arrays[name] = torch.from_numpy(np.ascontiguousarray(reordered(values, tensor, paired)))
            if packed:
                formats[name] = int(tensor.tensor_type)
    empty.config.save_pretrained(folder)
    if empty.generation_config is not None:
        empty.generation_config.save_pretrained(folder)
    if contents.tokenizer is not None:
        contents.tokenizer.save_pretrained(folder)
    save_file(arrays, folder / BLOCKS_FILE, metadata={"formats": json.dumps(formats)})
