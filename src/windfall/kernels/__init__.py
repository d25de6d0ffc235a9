"""The small kernels between the matrix products of a pass: Triton on CUDA, plain torch elsewhere, one signature for
both. Nothing here waits for the device or looks at a value on the host: all of it can be captured in a CUDA graph."""

from windfall.kernels.attention import path_attention, tree_attention
from windfall.kernels.draw import draw
from windfall.kernels.norm import add_norm, rotate_and_store, silu_mul
from windfall.kernels.top import top_children

__all__ = ["add_norm", "draw", "path_attention", "rotate_and_store", "silu_mul", "top_children", "tree_attention"]
