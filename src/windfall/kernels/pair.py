"""The input of an EAGLE-3 head: a token's embedding and a feature, normalised separately and concatenated."""

from __future__ import annotations

from torch import Tensor

from windfall.kernels.backend import on_triton
from windfall.kernels.norm import add_norm_reference


def pair_norm(
    tokens: Tensor,  # [n] long
    embedding: Tensor,  # [V, H]
    embedding_weight: Tensor,  # [H]
    hidden: Tensor,  # [n, H], or [m, H] with an index
    index: Tensor | None,  # [n] long: rows of hidden
    hidden_weight: Tensor,  # [H]
    eps: float,
    both: Tensor,  # [n, 2H], written: the embedding's norm, then the feature's
    residual: Tensor,  # [n, H], written: the feature, normalised or not
    normed_residual: bool = False,
) -> None:
    """Normalise both parts, rounding as the heads' RMSNorm does."""
    if on_triton(hidden):
        from windfall.kernels.triton.pair import pair_norm as run
    else:
        run = reference
    run(tokens, embedding, embedding_weight, hidden, index, hidden_weight, eps, both, residual, normed_residual)


def reference(
    tokens: Tensor,
    embedding: Tensor,
    embedding_weight: Tensor,
    hidden: Tensor,
    index: Tensor | None,
    hidden_weight: Tensor,
    eps: float,
    both: Tensor,
    residual: Tensor,
    normed_residual: bool = False,
) -> None:
    """`pair_norm` with torch."""
    rows = hidden[: len(tokens)] if index is None else hidden[index]
    width = rows.shape[1]
    normed = add_norm_reference(rows, None, hidden_weight, eps)[0]
    both[:, :width] = add_norm_reference(embedding[tokens], None, embedding_weight, eps)[0]
    both[:, width:] = normed
    residual.copy_(normed if normed_residual else rows)
