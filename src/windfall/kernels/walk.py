"""The walk down a verified tree as one small kernel: which nodes the target's draws follow."""

from __future__ import annotations

import torch
from torch import Tensor

from windfall.kernels.backend import on_triton


def walk(
    draws: Tensor,  # [n] long: the target's token after each node
    tokens: Tensor,  # [n] long
    parents: Tensor,  # [n] long, the root's is not read
    mask: Tensor,  # [n, n] bool: each node's ancestors and itself
    valid: Tensor | None = None,  # one integer on the device: the nodes from here on are padding
    out: Tensor | None = None,  # [n + 2] long
) -> tuple[Tensor, Tensor, Tensor]:
    """The accepted path (node numbers ascending, then -1) [n], its length [1] and the token after it [1], all long.

    A node is accepted if each node on its path, the root aside, is what was drawn after its parent. The three are views
    of one tensor, path first, so that one copy brings them to the host.
    """
    out = torch.empty(len(draws) + 2, dtype=torch.long, device=draws.device) if out is None else out
    if on_triton(draws):
        from windfall.kernels.jit.walk import walk as compiled

        compiled(draws, tokens, parents, mask, valid, out)
    else:
        reference(draws, tokens, parents, mask, valid, out)
    return out[:-2], out[-2:-1], out[-1:]


def reference(draws: Tensor, tokens: Tensor, parents: Tensor, mask: Tensor, valid: Tensor | None, out: Tensor) -> None:
    nodes = torch.arange(len(draws), device=draws.device)
    drawn = (tokens == draws[parents.clamp(min=0)]) | (nodes == 0)
    accepted = (drawn | ~mask).all(1)
    if valid is not None:
        accepted &= (nodes < valid) | (nodes == 0)
    order = torch.where(accepted, nodes, len(nodes)).sort().values
    out[:-2] = torch.where(order < len(nodes), order, -1)
    out[-2] = accepted.sum()
    out[-1:] = draws[torch.where(accepted, nodes, 0).amax().reshape(1)]
