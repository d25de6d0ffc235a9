"""What the files of Medusa and Hydra heads share: tensor names are translated to and from the slots of `Heads`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from windfall.core.types import InputError

Rules = Sequence[tuple[str, str]]  # patterns of names and their replacements


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies on the host, which can be saved."""
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }


def rename(name: str, rules: Rules) -> str:
    """Apply, in order, every rule whose pattern matches the whole name."""
    for pattern, becomes in rules:
        if re.fullmatch(pattern, name):
            name = re.sub(pattern, becomes, name)
    return name


def largest(names: Mapping[str, Tensor], pattern: str) -> int:
    """The largest number that the pattern finds in the names; -1 if there is none."""
    return max((int(found[1]) for name in names if (found := re.match(pattern, name))), default=-1)


def vocabulary_size(config: Mapping[str, Any], own: Sequence[Tensor] | None, target: Any, label: str) -> int:
    """The size of the target's vocabulary, according to the file or the target's config."""
    size = config.get("vocab_size") or (len(own[0]) if own else None) or getattr(target, "vocab_size", None)
    if size is None:
        raise InputError(f"'{label}' does not say how many tokens its target has; add vocab_size to its config.json")
    return int(size)


def filled(head: Any, tensors: Mapping[str, Tensor], draft_tokens: Tensor | None, label: str) -> Any:
    """Copy the tensors into the head's slots; an InputError names missing, unused and misshapen ones."""
    head = head.to(next(iter(tensors.values())).dtype)
    slots = head.slots()
    if missing := sorted(slots.keys() - tensors.keys()):
        raise InputError(f"'{label}' lacks {len(missing)} of its weights: {_some(missing)}")
    if unused := sorted(tensors.keys() - slots.keys()):
        raise InputError(f"'{label}' has weights that {head.config.kind} heads have no use for: {_some(unused)}")
    for name, slot in slots.items():
        if tensors[name].shape != slot.shape:
            found, wanted = tuple(tensors[name].shape), tuple(slot.shape)
            raise InputError(f"'{label}' has weights of another shape: {name} is {found}, not {wanted}")
        slot.copy_(tensors[name])
    if draft_tokens is not None:
        ids, limit = draft_tokens.tolist(), head.config.vocab_size
        if draft_tokens.dim() != 1 or len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) >= limit:
            raise InputError(f"the token_map of '{label}' must name different tokens below {limit}")
        head.draft_tokens = draft_tokens.long()
    return head.eval()


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
