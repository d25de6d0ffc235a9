"""The tensors d2t and t2d, which say what tokens a head drafts, as EAGLE-3 and speculators write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from windfall.core.types import InputError
from windfall.heads.base import DraftHead
from windfall.heads.formats.config import vocabulary_size


def draft_vocabulary(config: Mapping[str, Any], tensors: dict[str, Tensor], label: str) -> Tensor | None:
    """[Vd] target id of each draft id; None: the whole vocabulary. Takes d2t and t2d out of the tensors."""
    offsets, mask = tensors.pop("d2t", None), tensors.pop("t2d", None)
    whole, reduced = vocabulary_size(config, tensors, label), config.get("draft_vocab_size")
    listed = whole if offsets is None else offsets.numel()
    rows = len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else reduced or listed
    if offsets is None:
        if rows != whole:
            raise InputError(f"'{label}' drafts {rows} of {whole} tokens and lacks d2t, which says which")
        return None
    if offsets.dim() != 1 or offsets.is_floating_point() or offsets.dtype == torch.bool:
        found = f"{tuple(offsets.shape)} of {offsets.dtype}"
        raise InputError(f"'{label}': d2t must be a list of whole numbers, not {found}")
    if len(offsets) != rows or reduced not in (None, rows):
        raise InputError(f"'{label}': d2t has {len(offsets)} entries for {reduced or rows} drafted tokens")
    tokens = torch.arange(len(offsets)) + offsets.long()
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < whole or len(set(tokens.tolist())) != len(tokens):
        raise InputError(f"'{label}': d2t must lead from each draft id to another of the target's {whole} tokens")
    if mask is not None and (mask.dim() != 1 or len(mask) <= tokens.max() or not bool(mask.bool()[tokens].all())):
        raise InputError(f"'{label}': d2t and t2d contradict each other")
    return None if torch.equal(tokens, torch.arange(whole)) else tokens


def draft_mapping(head: DraftHead, vocabulary: int, light: bool) -> dict[str, Tensor]:
    """d2t and t2d, which say what tokens are drafted; d2t takes half the bytes in a light head."""
    if head.draft_tokens is None:
        return {}
    tokens = head.draft_tokens.cpu().long()
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[tokens] = True
    offsets = tokens - torch.arange(len(tokens))
    return {"d2t": offsets.int() if light else offsets, "t2d": mask}
