"""A batch of texts and its rows.

The host decides which rows are trained, because it would have to wait for a GPU to learn how many a mask there has. So
`answer` and `lengths` stay on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

PADDING_MULTIPLE = 64  # on a GPU texts are padded to a multiple of this, plus one


class Rows(NamedTuple):
    """Some rows of a batch of texts, by text and place; `x[rows]` takes them of x [b, n, ..]."""

    texts: Tensor  # [N] long
    places: Tensor  # [N] long

    @classmethod
    def where(cls, mask: Tensor, device: torch.device) -> Rows:
        """The rows at which a mask [b, n] on the host is true, on the device."""
        texts, places = send(mask.nonzero().T, device)
        return cls(texts, places)


@dataclass(frozen=True)
class Batch:
    """Texts padded on the right with token 0."""

    tokens: Tensor  # [b, n] long
    answer: Tensor  # [b, n] bool, on the host: tokens that the target generated
    lengths: Tensor | None = None  # [b] long, on the host: without padding
    temperatures: Tensor | None = None  # [b] float: 0 for greedy texts, nan where it is not recorded

    @cached_property
    def answered(self) -> Tensor:
        """[b, n - 1] bool, on the host: the rows r with a column before them, where the target generated x[r+1]."""
        rows = self.answer[:, 1:].clone()
        rows[:, 0] = False
        return rows

    @cached_property
    def rows(self) -> Rows:
        """The answer rows: those that are `answered`."""
        return Rows.where(self.answered, self.tokens.device)

    def to(self, device: torch.device) -> Batch:
        """The batch for this device. On a GPU it is padded, so that fewer shapes occur and rows are aligned."""
        wider = -(self.tokens.shape[1] - 1) % PADDING_MULTIPLE if device.type == "cuda" else 0
        tokens, answer = (F.pad(x, (0, wider)) for x in (self.tokens, self.answer))
        temperatures = None if self.temperatures is None else send(self.temperatures, device)
        return Batch(send(tokens, device), answer, self.lengths, temperatures)


def send(given: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device. A GPU copies it from pinned memory later, and the host goes on."""
    given = given.contiguous()  # else torch makes a copy first, in memory that is not pinned
    given = given.pin_memory() if device.type == "cuda" else given
    return given.to(device, non_blocking=True)
