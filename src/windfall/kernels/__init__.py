"""The small kernels between the matrix products of a forward pass.

Each function has one signature and two implementations: Triton on CUDA, plain torch elsewhere. No function synchronizes
with the device or reads a device value on the host, so all of them can be captured in a CUDA graph. The exceptions are
in C, for CPUs: `few_rows` and `packed` compute matrix products, and `cpu_layers` norms, gates and attention.
"""

from windfall.kernels.attention import path_attention, tree_attention
from windfall.kernels.draw import draw
from windfall.kernels.norm import add_norm, gate_mul, rotate_and_store, soft_cap
from windfall.kernels.top import top_children

__all__ = [
    "add_norm",
    "draw",
    "gate_mul",
    "path_attention",
    "rotate_and_store",
    "soft_cap",
    "top_children",
    "tree_attention",
]
