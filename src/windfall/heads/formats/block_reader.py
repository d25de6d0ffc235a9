"""What the files of block heads share."""

from __future__ import annotations

from typing import Any

import torch

from windfall.heads.block import BlockConfig, BlockHead
from windfall.heads.formats.checkpoint import check_tensors
from windfall.heads.formats.config import ConfigReader, vocabulary_size
from windfall.heads.formats.draft_vocabulary import draft_vocabulary


class BlockReader(ConfigReader):
    """Builds a block head; subclasses say what its config is."""

    def head(self) -> BlockHead:
        drafted = draft_vocabulary(self.config, self.tensors, self.label)
        config = self.block_config(None if drafted is None else len(drafted))
        if config.mask_token is not None and not 0 <= config.mask_token < config.vocab_size:
            self.refuse(f"has the mask token {config.mask_token}, and its target only {config.vocab_size} tokens")
        with torch.device("meta"):
            head = BlockHead(config)
        check_tensors(head, self.tensors, self.label)
        head.load_state_dict(self.tensors, assign=True)
        head.draft_tokens = drafted
        return head.eval()

    def block_config(self, drafted: int | None) -> BlockConfig:
        raise NotImplementedError

    def made(self, taps: list[int], drafted: int | None, flags: dict[str, bool], **more: Any) -> BlockConfig:
        """A config with what all files have in common."""
        fused = self.matrix("fc.weight").shape[1]
        if not taps or fused % len(taps):
            self.refuse(f"has an fc.weight with {fused} columns for {len(taps)} states of its target")
        return BlockConfig(
            kind="block",
            layer=self._layer_config(self._theta().stated[0]),
            target_hidden=fused // len(taps),
            taps=tuple(taps),
            vocab_size=vocabulary_size(self.config, self.tensors, self.label),
            draft_vocab_size=drafted,
            flags={**super().flags(), **flags},
            logit_scale=self.logit_scale,
            **more,
        )

    def whole_numbers(self, key: str, given: Any, lowest: int = 0) -> list[int]:
        sound = isinstance(given, list) and all(type(each) is int and each >= lowest for each in given)
        if not sound:
            self.refuse(f"says {key}: {given!r}, which must be a list of whole numbers")
        return list(given)
