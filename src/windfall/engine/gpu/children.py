"""Buffers in which a captured draft pass gives the host the children of its nodes."""

from __future__ import annotations

import torch
from torch import Tensor

from windfall.engine.gpu.transfer import PackedBuffer

CHILDREN_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # children per node in captured draft passes


class ChildrenBuffers:
    """A buffer for each number of nodes and of children."""

    def __init__(self, device: torch.device):
        self._device = device
        self._buffers: dict[tuple[int, int], PackedBuffer] = {}

    def buffer(self, nodes: int, k: int) -> PackedBuffer:
        """The buffer for k children of each of these nodes."""
        if (nodes, k) not in self._buffers:
            number, shape = torch.float32, (nodes, k)
            arrays = {"values": (number, shape), "tokens": (torch.long, shape), "entropy": (number, (nodes,))}
            self._buffers[nodes, k] = PackedBuffer(self._device, **arrays)
        return self._buffers[nodes, k]


def publish_children(found: PackedBuffer, values: Tensor, tokens: Tensor) -> None:
    """Send these children [n, at most k] to the host; places without a child get -inf."""
    there, most = found.device, values.shape[1]
    if most < there["values"].shape[1]:
        there["values"].fill_(-torch.inf)
    there["values"][:, :most].copy_(values)
    there["tokens"][:, :most].copy_(tokens)
    found.publish()
