"""transformers' own loops for many requests: `generate` on a padded batch, and continuous batching."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from windfall.bench.hf_generate import hf_generate
from windfall.bench.runner import Case
from windfall.bench.throughput.answers import Answer, Part
from windfall.bench.throughput.serve import Serve
from windfall.core.clock import now
from windfall.model.target import Target

PADDED, CONTINUOUS = "HF generate", "HF continuous"
MEMORY_SHARE = 0.5  # of the free memory, for the KV cache of continuous batching
WAIT_SECONDS = 1.0  # between two looks at whether its thread still runs


class Unavailable(Exception):
    """Why a loop cannot run here."""


def padded_server(target: Target, temperature: float) -> Serve:
    """`model.generate` on a batch padded on the left; only its end is known."""

    def serve(cases: Sequence[Case], at_once: int) -> list[Answer]:
        assert len(cases) <= at_once
        started = now(target.device)
        texts = hf_generate(target, [case.ids for case in cases], cases[0].at(temperature))
        ended = now(target.device)
        return [Answer(tuple(text), started, ended) for text in texts]

    return serve


@contextmanager
def continuous_server(target: Target, temperature: float, concurrency: int) -> Iterator[Serve]:
    """transformers' continuous batching, warmed up; raises Unavailable with the reason."""
    if target.device.type == "cpu":
        raise Unavailable("continuous batching needs an accelerator")
    try:
        from transformers import ContinuousBatchingConfig, GenerationConfig
    except ImportError:
        raise Unavailable("this version of transformers has no continuous batching") from None
    if not hasattr(target.model, "continuous_batching_context_manager"):
        raise Unavailable("this model has no continuous batching")
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        eos_token_id=list(target.eos) or -1,
        pad_token_id=target.eos[0] if target.eos else 0,
        **(drawn if temperature else {"do_sample": False}),
    )
    limits = ContinuousBatchingConfig(
        max_requests_per_batch=concurrency, max_memory_percent=MEMORY_SHARE, allow_block_sharing=False
    )
    attention = target.model.config._attn_implementation
    manage = target.model.continuous_batching_context_manager
    try:
        # Its own thread writes to buffers made here, and a tensor made in inference mode cannot be written outside it.
        with torch.inference_mode(False), manage(config, continuous_batching_config=limits) as manager:
            yield lambda cases, at_once: _serve(manager, target, cases, at_once)
    except (RuntimeError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise Unavailable(f"continuous batching fails here: {str(error).partition(chr(10))[0]}") from error
    finally:
        if target.model.config._attn_implementation != attention:
            target.model.set_attn_implementation(attention)


def _serve(manager: Any, target: Target, cases: Sequence[Case], at_once: int) -> list[Answer]:
    waiting, numbers, answers = deque(enumerate(cases)), dict[str, tuple[int, float]](), dict[int, Answer]()

    def submit() -> None:
        number, case = waiting.popleft()
        params, started = case.params, time.perf_counter()
        eos = list(target.eos if params.eos is None else params.eos) or -1
        name = manager.add_request(
            case.ids, max_new_tokens=params.max_new_tokens, eos_token_id=eos, record_timestamps=True
        )
        if name is None:
            raise RuntimeError("a request was refused")
        numbers[name] = number, started

    for _ in range(min(at_once, len(cases))):
        submit()
    while len(answers) < len(cases):
        found = manager.get_result(timeout=WAIT_SECONDS)
        if found is None:
            if not manager.is_running():
                raise RuntimeError("its thread has ended")
            continue
        if not found.is_finished():
            continue
        if found.error is not None:
            raise RuntimeError(found.error)
        if waiting:
            submit()
        number, started = numbers[found.request_id]
        parts = tuple(Part(at, 1) for at in found.timestamps or ())
        answers[number] = Answer(tuple(found.generated_tokens), started, time.perf_counter(), parts)
    return [answers[number] for number in range(len(cases))]
