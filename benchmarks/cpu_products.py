"""Which matrix product is quickest for few rows on this CPU? All products of one pass of a small Llama.

    python benchmarks/cpu_products.py [--layers 30] [--rounds 7] [--json FILE]

A verify pass is a product of a few rows with every weight of the model. torch offers several ways to compute it;
windfall has a kernel of its own, which is compiled here if need be, for weights in float32 and for packed ones.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from provenance import publish
from torch import Tensor
from torch.nn import functional as F

from windfall.checkpoints.find import cache_dir
from windfall.kernels import few_rows
from windfall.kernels.few_rows import linear, prepare_few_rows
from windfall.kernels.panels import of_halves, rounded

ROWS = (1, 2, 3, 4, 6, 8, 16, 32, 64)
LAYER = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]  # SmolLM2-135M
VOCABULARY = (49152, 576)
PACKED = ("windfall bf16", "windfall int8", "windfall int4")
Kernel = tuple[Callable[[Tensor], Any], Callable[[Tensor, Any], Tensor]]  # prepare a weight; multiply


def packed_linear(rows: int) -> Kernel:
    """Weights reordered for oneDNN, for this number of rows."""
    return (
        lambda weight: torch.ops.mkldnn._reorder_linear_weight(weight, rows),
        lambda x, weight: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""),
    )


def kernels(rows: int) -> dict[str, Kernel]:
    return {
        "F.linear": (lambda weight: weight, F.linear),
        "x @ W.T stored transposed": (lambda weight: weight.T.contiguous(), torch.mm),
        "(W @ x.T).T": (lambda weight: weight, lambda x, weight: torch.mm(weight, x.T).T),
        "oneDNN packed": packed_linear(rows),
        "windfall": (lambda weight: weight, linear),
        "windfall bf16": (lambda weight: of_halves(weight.bfloat16()), prepared().product_of_panels),
        "windfall int8": (rounded, prepared().product_of_panels),
        "windfall int4": (partial(rounded, bits=4), prepared().product_of_panels),
    }


def prepared() -> few_rows.Kernel:
    kernel = few_rows.prepared_kernel()
    if kernel is None:
        raise SystemExit("the kernel cannot be compiled here")
    return kernel


def milliseconds(shapes: list[tuple[int, int]], rows: int, rounds: int) -> dict[str, float]:
    """The shortest time of all products by kernel, each with weights of its own, as in a model. Kernels take turns."""
    inputs = {width: torch.randn(rows, width) for width in {shape[1] for shape in shapes}}
    weights = [torch.randn(shape) for shape in shapes]
    prepared = {name: [prepare(weight) for weight in weights] for name, (prepare, _) in kernels(rows).items()}
    best = dict.fromkeys(prepared, float("inf"))
    for _ in range(rounds + 1):
        for name, (_, multiply) in kernels(rows).items():
            started = time.perf_counter()
            for (_, width), weight in zip(shapes, prepared[name], strict=True):
                multiply(inputs[width], weight)
            best[name] = min(best[name], 1e3 * (time.perf_counter() - started))
    return best


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json")
    options = parser.parse_args()
    prepare_few_rows(cache_dir() / "kernels")
    shapes = LAYER * options.layers + [VOCABULARY]
    table: dict[str, dict[str, float]] = {}
    for rows in ROWS:
        for name, best in milliseconds(shapes, rows, options.rounds).items():
            table.setdefault(name, {})[str(rows)] = best
        print(rows, {name: round(own[str(rows)], 1) for name, own in table.items()}, file=sys.stderr, flush=True)
    in_float32 = [own for name, own in table.items() if name not in PACKED]
    least = {str(rows): min(own[str(rows)] for own in in_float32) for rows in ROWS}
    growth = {name: own["4"] / own["1"] for name, own in {**table, "the best of each in float32": least}.items()}
    publish(
        {
            "what": "milliseconds of all matrix products of a pass, by rows; the fastest round",
            "ms": table,
            "4 rows / 1": growth,
        },
        options.json,
    )


if __name__ == "__main__":
    main()
