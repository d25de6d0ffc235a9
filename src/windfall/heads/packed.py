"""Draft heads with large weights in int8, on a CPU: most of a draft pass is reading them.

A head's precision changes what is drafted, but never the text.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windfall.core.errors import InputError
from windfall.heads.base import DraftHead
from windfall.heads.cpu_layers import use_cpu_layers
from windfall.kernels.few_rows import FewRowsLinear, Kernel, is_faster, prepared_kernel
from windfall.kernels.packed import PackedLinear
from windfall.kernels.panels import BLOCK, rounded

Head = TypeVar("Head", bound=DraftHead)
MIN_NUMBERS = 2**18  # of a weight: smaller ones take no time
MIN_VOCABULARY = 2**20  # numbers, from which on int8 may be faster
TRIAL_ROWS = 4


def in_precision(head: Head, wanted: str) -> Head:
    """The head with its large weights in this precision (auto, int8 or full). Only heads on a CPU change."""
    if wanted == "full" or head.device.type != "cpu":
        return head
    kernel = prepared_kernel() if head.dtype is torch.float32 and head.vocabulary.shape[1] % BLOCK == 0 else None
    if kernel is None and wanted == "int8":
        raise InputError(
            "int8 weights of a head need Linux, a C compiler, float32 and a width that is a multiple of 32; "
            "leave weights out or set it full"
        )
    if kernel is None or (wanted == "auto" and head.vocabulary.numel() < MIN_VOCABULARY):
        return head
    vocabulary = PackedLinear(kernel, rounded(head.vocabulary.detach()), "int8", head.vocabulary_bias)
    if wanted == "auto" and not _pays(vocabulary, head.vocabulary):
        return head
    return packed(head, kernel, vocabulary)


def packed(head: Head, kernel: Kernel, vocabulary: PackedLinear) -> Head:
    """The same head with this vocabulary, and with int8 in its large linear layers. It shares all other tensors."""
    kept: list[Any] = [*head.parameters(), *head.buffers(), *head._shared.values(), head.draft_tokens]
    twin = copy.deepcopy(head, {id(tensor): tensor for tensor in kept})
    twin._shared = {name: tensor for name, tensor in head._shared.items() if name == "embedding"}
    twin.lm_head, twin.packed_vocabulary = None, vocabulary
    for name, layer in [*twin.named_modules()]:
        if (
            type(layer) in (nn.Linear, FewRowsLinear)
            and layer.in_features % BLOCK == 0
            and layer.weight.numel() >= MIN_NUMBERS
        ):
            twin.set_submodule(name, PackedLinear(kernel, rounded(layer.weight.detach()), "int8", layer.bias))
    use_cpu_layers(twin)
    return twin.eval()


@torch.inference_mode()
def _pays(vocabulary: PackedLinear, full: Tensor) -> bool:
    x = torch.ones(TRIAL_ROWS, full.shape[1])
    return is_faster(partial(vocabulary, x), partial(F.linear, x, full))
