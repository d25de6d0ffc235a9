"""Milliseconds of a cycle's draft passes: the bundled head against untrained block heads, and those of a verify pass.

python benchmarks/draft_phase.py [--target MODEL] [--drafter HEAD] [--layers 2,3,5] [--block 8] [--passes 7]
                                 [--pairs projected,path] [--rank 64] [--candidates 16] [--length 512]
                                 [--widen llama-3.1-8b] [--json FILE]

The passes are those of a beam, captured as one CUDA graph and replayed after a text of `--length` tokens. Every
temperature has its own row: with sampling, the passes also read the noise of the coming draws. Medians.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from provenance import publish

import windfall
from windfall import registry
from windfall.bench.speed.passes import timed
from windfall.bench.widen import widen_pair
from windfall.core.types import GpuOptions, SamplingParams
from windfall.drafters.base import Drafter
from windfall.drafters.block import BlockDrafter
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.drafters.head_drafter import HeadDrafter
from windfall.engine.gpu.cycle import Cycle
from windfall.engine.gpu.drafters import ChildSampler
from windfall.engine.gpu.runner import GpuRunner
from windfall.engine.loading import as_drafter
from windfall.heads.fitting import fit
from windfall.model.target import Target
from windfall.render import console
from windfall.train.new_block import new_block

REPLAYS, WARM_UP = 41, 3
TEMPERATURES = (0.0, 1.0)
ROWS = 60  # of the verify pass
IN_FULL = "bundled head, all weights in full precision"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "drafter", "widen", "json"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--layers", default="2,3,5")
    parser.add_argument("--pairs", default="projected", help="kinds of pair scores of the block heads")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--candidates", type=int, help="children that a node of a block head can have")
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--passes", type=int, default=7)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    engine = windfall.load(options.target, options.drafter, device="cuda", dtype=options.dtype)
    if not isinstance(engine.drafter, FeatureHeadDrafter):
        parser.error(f"the drafter of {options.target} is no EAGLE head; --drafter names one")
    target, heads = engine.target, {"bundled head": engine.drafter.head, IN_FULL: engine.drafter.head}
    for layers, kind in itertools.product(map(int, options.layers.split(",")), options.pairs.split(",")):
        shape = {"layers": layers, "block": options.block, "vocabulary": heads["bundled head"].draft_tokens}
        head: Any = fit(new_block(target, {**shape, "pair": kind, "rank": options.rank}).eval(), target)
        heads[f"block head, {layers} layers" + (f", {kind}" if kind != "projected" else "")] = head
    rows = []
    with console.progress("Timing…") as progress:
        for place, (name, head) in enumerate(heads.items()):
            own, drafter = target, as_drafter(head)
            if options.widen:
                pair = widen_pair(target.model, head, options.widen)
                own, drafter = Target(pair.model, target.tokenizer), as_drafter(pair.head)
            assert isinstance(drafter, HeadDrafter)
            if name == IN_FULL:
                drafter = replace(drafter, weights="full")
            if options.candidates and isinstance(drafter, BlockDrafter):
                drafter = replace(drafter, candidates=options.candidates)
            rows += measure(name, own, drafter, options)
            progress((place + 1) / len(heads))
    settings = {"passes": options.passes, "length": options.length, "block": options.block, "widened_to": options.widen}
    settings |= {"rank": options.rank, "candidates": options.candidates}
    publish({"rows": rows, **settings, "dtype": options.dtype}, options.json)


@torch.inference_mode()
def measure(name: str, target: Target, drafter: Drafter, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each temperature."""
    drafter.attach(target)
    runner, reason = GpuRunner.of(target, drafter, GpuOptions(True))
    assert runner is not None, reason
    runner.gpu_target.reserve(options.length + 512)
    plan = registry.policy("beam", depth=options.passes).plan()
    assert plan is not None
    cycle = Cycle(plan, runner.drafter_form, runner.gpu_target)
    rows = []
    for temperature in TEMPERATURES:
        params = SamplingParams(temperature=temperature, seed=0)
        runner.gpu_target.set_sampling(params)
        sampler = ChildSampler(params, True, runner.gpu_target.sampling, cycle.noise_buffer(params))
        first, all_passes = (passes_time(cycle, sampler, count, options.length) for count in (1, options.passes))
        verify = verify_time(cycle, params, sampler, options.length)
        rows.append(
            {
                "drafter": name,
                "temperature": temperature,
                "first_ms": first,
                "draft_ms": all_passes,
                "verify_ms": verify,
            }
        )
    return rows


def passes_time(cycle: Cycle, sampler: ChildSampler, passes: int, length: int) -> float:
    key = ("draft", passes, *sampler.key)
    return replay_time(cycle, key, lambda: cycle.draft_passes(passes, sampler), length)


def verify_time(cycle: Cycle, params: SamplingParams, sampler: ChildSampler, length: int) -> float:
    columns = cycle.gpu_target.columns(ROWS)
    return replay_time(
        cycle, ("verify", *sampler.key), lambda: cycle.verify(ROWS, columns, params, sampler.noise), length
    )


def replay_time(cycle: Cycle, key: tuple[Any, ...], work: Any, length: int) -> float:
    """Milliseconds of this work, as a graph, after a text of this length."""
    cache, device = cycle.gpu_target.graph_cache, cycle.gpu_target.device
    run, reset = partial(cache.run, ("phase", cycle.buffers_id, *key), work), partial(cycle.set_length, length)
    return round(1000 * median([timed(device, run, reset) for _ in range(REPLAYS + WARM_UP)][WARM_UP:]), 4)


if __name__ == "__main__":
    main()
