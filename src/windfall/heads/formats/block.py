"""The files of block heads: windfall's own, and those of other projects (see `dflash`).

windfall's own files hold what the head does not borrow from its target: config.json, and model.safetensors under the
names of the module.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from windfall.checkpoints.bundled import TARGET, description
from windfall.checkpoints.tensors import read_tensors
from windfall.heads.block import PAIRS, BlockConfig, BlockHead
from windfall.heads.files import read_config, write_folder
from windfall.heads.formats.block_reader import BlockReader
from windfall.heads.formats.checkpoint import Shape, plainly_named
from windfall.heads.formats.config import layer_config
from windfall.heads.formats.dflash import DFlashReader
from windfall.heads.formats.draft_vocabulary import draft_mapping
from windfall.heads.kinds import BLOCK_MODEL_TYPE

if TYPE_CHECKING:
    from windfall.model.target import Target

SIZES = {"block": "block_size", "candidates": "candidates", "rank": "pair_rank", "conv_group": "conv_group"}
FLAGS = ("bidirectional", "predict_anchor", "fc_norm", "anchor_windows")


def read_block(folder: str | os.PathLike[str], target: Any = None) -> BlockHead:
    """A block head from a folder; `target` is its target's transformers config."""
    label, shape = str(folder), None if target is None else Shape.of(target)
    config, tensors = read_config(Path(folder), label), plainly_named(read_tensors(Path(folder), label), label)
    reader = OwnReader if config.get("model_type") == BLOCK_MODEL_TYPE else DFlashReader
    return reader("block", config, tensors, label, shape).head()


def write_block(
    head: BlockHead,
    folder: str | os.PathLike[str],
    dtype: torch.dtype = torch.bfloat16,
    target: Target | None = None,
) -> None:
    """Write a head in windfall's own layout; `target` adds its description."""
    given, vocabulary = head.config, head.config.vocab_size
    config = {
        "architectures": ["WindfallBlockHead"],
        "torch_dtype": str(dtype).removeprefix("torch."),
        **layer_config(replace(given, windows=()), vocabulary),
        "model_type": BLOCK_MODEL_TYPE,
        "draft_vocab_size": given.draft_vocab_size or vocabulary,
        "target_hidden_size": given.target_hidden,
        "target_states": list(given.taps),
        **{key: getattr(given, name) for name, key in SIZES.items()},
        "pair_score": given.pair,
        "conv_taps": given.conv_taps,
        "mask_token_id": given.mask_token,
        **{name: given.flag(name) for name in FLAGS},
        "windows": list(given.windows),
        "causal_layers": list(given.causal_layers),
        "embedding_scale": given.embedding_scale,
        "softcap": given.softcap,
    }
    if head.lm_head is None and given.logit_scale != 1:
        config["logit_scale"] = given.logit_scale
    if target is not None:
        config[TARGET] = description(target)
    saved = {name: tensor.detach().to("cpu", dtype).clone().contiguous() for name, tensor in head.state_dict().items()}
    write_folder(Path(folder), config, {**saved, **draft_mapping(head, vocabulary, light=True)})


class OwnReader(BlockReader):
    """windfall's own files."""

    def block_config(self, drafted: int | None) -> BlockConfig:
        said = self.config
        sizes = {name: self.positive_int(key) for name, key in SIZES.items()}
        pair, taps, mask = said.get("pair_score"), said.get("conv_taps", 0), said.get("mask_token_id")
        if pair not in PAIRS:
            self.refuse(f"has a pair score of kind {pair!r}; windfall knows {', '.join(PAIRS)}")
        if type(taps) is not int or taps < 0 or (taps and self.positive_int("hidden_size") % sizes["conv_group"]):
            self.refuse(f"says conv_taps: {taps!r} and conv_group: {sizes['conv_group']}, which do not fit its width")
        if mask is not None and type(mask) is not int:
            self.refuse(f"says mask_token_id: {mask!r}, which must be a token or null")
        return self.made(
            self.whole_numbers("target_states", said.get("target_states"), lowest=-1),
            drafted,
            {name: bool(said.get(name)) for name in FLAGS},
            **sizes,
            pair=pair,
            conv_taps=taps,
            mask_token=mask,
            windows=self._listed_windows(),
            causal_layers=tuple(self.whole_numbers("causal_layers", said.get("causal_layers", []))),
            embedding_scale=self._positive_number("embedding_scale", 1.0),
            softcap=None if said.get("softcap") is None else self._positive_number("softcap", 1.0),
        )

    def _listed_windows(self) -> tuple[int | None, ...]:
        given = self.config.get("windows") or []
        sound = isinstance(given, list) and all(each is None or (type(each) is int and each > 0) for each in given)
        if not sound or (given and len(given) != self.layers()):
            self.refuse(
                f"says windows: {given!r}, which must be a number or null for each of its {self.layers()} layers"
            )
        return tuple(given)
