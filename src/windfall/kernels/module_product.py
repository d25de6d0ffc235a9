"""Products that linear layers compute themselves, because they are quantised or have adapters.

The kernel of such a layer may round a row in another way for another number of rows; some use one kernel for a single
row and another one for several. In exact mode a layer is therefore called with a fixed number of rows. One row then
costs a pass of PIECE_ROWS rows. This takes little more time while reading the weights takes most of it: kernels of 4
and 8 bits compute tiles of at least 16 rows, and weights of 4 bits are read as fast as 32 rows are computed.

Larger numbers of rows are used where `steady_sizes` has found that they give the same bits. Prompts then take few
calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PIECE_ROWS = 32  # rows of a call in exact mode
LARGER_PIECES = (64, 128, 256, 512)  # rows of a call that may be used, too
ROWS_TESTED_ALONE = (0, 5, 18, PIECE_ROWS - 1)
MAGNITUDES = (1.0, 0.1, 8.0)  # of trial rows; some kernels treat large inputs apart
OUTLIER = 60.0  # of single inputs of trial rows


class ModuleProduct:
    """The product of rows [n, K] with several linear layers, side by side; it stands for their merged weight [N, K]."""

    def __init__(self, modules: Sequence[nn.Module], inputs: int, outputs: int):
        self.modules, self.shape = tuple(modules), (outputs, inputs)
        self.sizes: list[tuple[int, ...]] = [(PIECE_ROWS,)] * len(self.modules)  # rows of a call in exact mode

    def __len__(self) -> int:
        return self.shape[0]

    def __call__(self, x: Tensor, exact: bool) -> Tensor:
        """[n, K] → [n, N]"""
        if exact:
            made = [by_sizes(x, module, sizes) for module, sizes in zip(self.modules, self.sizes, strict=True)]
        else:
            made = [call(module, x) for module in self.modules]
        return made[0] if len(made) == 1 else torch.cat(made, -1)

    @property
    def kinds(self) -> list[str]:
        """The classes of the layers."""
        return sorted(set(map(kind_of, self.modules)))


def kind_of(module: nn.Module) -> str:
    """A layer's class; also that of its weight, or its package, if the class alone says nothing."""
    kind, weight = type(module), type(getattr(module, "weight", None))
    if kind is nn.Linear and weight is not nn.Parameter:
        return f"Linear ({weight.__name__})"
    foreign = kind is not nn.Linear and kind.__name__ == nn.Linear.__name__
    return f"{kind.__module__.partition('.')[0]}.Linear" if foreign else kind.__name__


def call(module: nn.Module, x: Tensor) -> Tensor:
    """A layer's product with rows [n, K], given as transformers gives them."""
    made: Tensor = module(x[None])[0]
    return made


def by_sizes(x: Tensor, module: nn.Module, sizes: tuple[int, ...]) -> Tensor:
    """A layer's product in calls of these numbers of rows only, which are ascending; missing rows are zeros."""
    size = next((size for size in sizes if size >= len(x)), sizes[-1])
    made = [call(module, piece) for piece in torch.split(F.pad(x, (0, 0, 0, -len(x) % size)), size)]
    return (made[0] if len(made) == 1 else torch.cat(made))[: len(x)]


def steady_sizes(module: nn.Module, rows: Tensor) -> tuple[int, ...]:
    """The numbers of rows with which a layer can be called, so that a row has the same bits in every pass.

    It is empty if a row depends on the others even among a fixed number of rows, for example because one scale
    quantises the inputs of all rows. The layer computes `trial_rows` to find out.
    """
    first, *others = torch.split(rows, PIECE_ROWS)
    whole = call(module, first)
    same = [_same(call(module, first), whole), _same(call(module, first.flip(0)).flip(0), whole)]
    for place, other in zip(ROWS_TESTED_ALONE, others, strict=False):
        row, wanted = first[place : place + 1], whole[place : place + 1]
        same.append(_same(call(module, torch.cat([row, torch.zeros_like(other[1:])]))[:1], wanted))
        same.append(_same(call(module, torch.cat([other[1:], row]))[-1:], wanted))
    if not torch.stack(same).all():
        return ()
    pieces = torch.cat([whole, *(call(module, other) for other in others)])
    larger = torch.stack([_same(call(module, rows[:size]), pieces[:size]) for size in LARGER_PIECES]).tolist()
    return (PIECE_ROWS, *(size for size, equal in zip(LARGER_PIECES, larger, strict=True) if equal))


def trial_rows(inputs: int, like: Tensor) -> Tensor:
    """Random rows [n, K] of several magnitudes, with the dtype and device of `like`.

    Every seventh has a few inputs that are much larger than the others.
    """
    count = LARGER_PIECES[-1]
    rows = torch.randn(count, inputs, generator=torch.Generator().manual_seed(0))
    rows *= torch.tensor(MAGNITUDES)[torch.arange(count) % len(MAGNITUDES)][:, None]
    rows[::7, :: max(inputs // 4, 1)] = OUTLIER
    return rows.to(like.device, like.dtype)


def _same(x: Tensor, y: Tensor) -> Tensor:
    """Whether the bits are the same; on the device, so that nothing waits for it."""
    return (x.contiguous().view(torch.uint8) == y.contiguous().view(torch.uint8)).all()
