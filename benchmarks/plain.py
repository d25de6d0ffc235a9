"""Plain decoding: this engine against `model.generate`, interleaved in one run, and the loop's own share of a step.

python benchmarks/plain.py [--target …] [--device …] [--dtype …] [--tokens 64] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from provenance import publish

import windfall
from windfall.checkpoints.find import load_model
from windfall.kernels.packed import packed_formats

PROMPT = "Explain in a few sentences why the sky is blue and sunsets are red."


def with_transformers(model: Any, ids: list[int], tokens: int) -> tuple[list[int], float]:
    inputs = torch.tensor([ids], device=model.device)
    started = time.perf_counter()
    out = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens
    )
    if out.is_cuda:
        torch.cuda.synchronize()
    return out[0, len(ids) :].tolist(), time.perf_counter() - started


def forward_seconds(engine: windfall.Engine) -> list[float]:
    """Record how long each forward of the model itself takes."""
    seconds: list[float] = []
    inner = engine.target.model.forward

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        out = inner(*args, **kwargs)
        seconds.append(time.perf_counter() - started)
        return out

    engine.target.model.forward = timed
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "device", "dtype", "json"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    engine = windfall.load(options.target, policy="none", device=options.device, dtype=options.dtype)
    model, ids = engine.target.model, engine.encode(PROMPT)
    if engine.target.device.type == "cpu":  # where windfall changes the model's layers
        model = load_model(options.target, device="cpu", dtype=options.dtype).model
    theirs, ours, same = [], [], True
    for round_ in range(options.rounds + 1):  # the first is the warm-up
        wanted, seconds = with_transformers(model, ids, options.tokens)
        started = time.perf_counter()
        got = engine.generate(ids, max_new_tokens=options.tokens, eos=())
        if round_:
            theirs.append(seconds)
            ours.append(time.perf_counter() - started)
        stops = [i for i, token in enumerate(wanted) if token in engine.target.eos]
        same = same and got.token_ids[: min(stops, default=None)] == wanted[: min(stops, default=None)]
    forwards = forward_seconds(engine)
    started = time.perf_counter()
    steps = list(engine.stream(ids, max_new_tokens=options.tokens, eos=()))
    step = (time.perf_counter() - started - steps[0].prefill_seconds) / len(steps)
    forward = sum(forwards[-len(steps) :]) / len(steps)
    result = {
        "what": "plain decoding, windfall `none` against transformers `generate`",
        "model": engine.target.name,
        "dtype": str(engine.target.decoder.dtype),
        "packed": packed_formats(engine.target.model),
        "device": str(engine.target.device),
        "exact_passes": engine.exact_passes,
        "tokens": options.tokens,
        "seconds_transformers": statistics.median(theirs),
        "seconds_windfall": statistics.median(ours),
        "ratio": statistics.median(t / o for t, o in zip(theirs, ours, strict=True)),
        "same_tokens": same,
        "step_ms": 1e3 * step,
        "loop_overhead_percent": 100 * (step - forward) / step,
    }
    publish(result, options.json)


if __name__ == "__main__":
    main()
