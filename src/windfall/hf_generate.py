"""windfall inside `model.generate`: the loop is ours; inputs, processors, criteria and streamers stay transformers'."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PrefixConstrainedLogitsProcessor

from windfall.drafters.base import Drafter
from windfall.engine import Engine
from windfall.loading import load
from windfall.records import InputError, SamplingParams
from windfall.target import Target

KEPT = 4  # engines of a model
UNDERSTOOD = ("attention_mask", "position_ids", "past_key_values", "use_cache", "cache_position", "logits_to_keep")


def custom_generate(
    drafter: Any = None,
    policy: Any = None,
    *,
    drafter_options: Mapping[str, Any] | None = None,
    policy_options: Mapping[str, Any] | None = None,
    preset: str | None = None,
    coupled: bool = True,
    graphs: bool | None = None,
    compile: bool = False,
    exact: bool = False,
    host_policies: bool = False,
) -> Callable[..., Any]:
    """A decoding loop for `model.generate(..., custom_generate=windfall.custom_generate(...))`.

    The arguments are those of `windfall.load`. Greedy and sampling, one prompt or a left-padded batch.
    """
    words = {
        "drafter_options": drafter_options,
        "policy_options": policy_options,
        "preset": preset,
        "coupled": coupled,
        "graphs": graphs,
        "compile": compile,
        "exact": exact,
        "host_policies": host_policies,
    }

    def decode(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        streamer: Any = None,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        if synced_gpus:
            raise InputError("windfall's loop does not wait for other GPUs; synced_gpus must be False")
        engine = _engine_of(model, drafter, policy, words)
        streamer = streamer or _callers_streamer()
        _refuse(input_ids, logits_processor, generation_config, model_kwargs, engine.target.context)
        starts = _padding(input_ids, model_kwargs.get("attention_mask"))
        params = [
            _params(input_ids[row], start, row, logits_processor, stopping_criteria, generation_config)
            for row, start in enumerate(starts)
        ]
        prompts = [ids[start:].tolist() for ids, start in zip(input_ids, starts, strict=True)]
        return _collect(engine, prompts, params, input_ids, generation_config, streamer)

    return decode


class Engines(dict[Any, tuple[Engine, Any, Any, Any]]):
    """Of one model, with what they were asked for. They go with it, but neither into its files nor into its copies."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Engines, ()


def _key(asked: Any) -> Any:
    """What tells one wish from another: names and numbers by their value, objects by who they are."""
    if isinstance(asked, Mapping):
        return tuple((name, _key(value)) for name, value in asked.items())
    return asked if isinstance(asked, str | int | float | None) else id(asked)


def _engine_of(model: Any, drafter: Any, policy: Any, words: Mapping[str, Any]) -> Engine:
    """The engine for these words of `load`; those used last are kept, since making one takes a while."""
    engines: Engines = model.__dict__.setdefault("_windfall_engines", Engines())
    key = _key(drafter), _key(policy), _key(words)
    kept = engines.pop(key, None)
    if kept is None:
        own = copy.copy(drafter) if isinstance(drafter, Drafter) else drafter
        kept = load(Target(model), own, policy, **words), drafter, policy, words
    engines[key] = kept
    while len(engines) > KEPT:
        del engines[next(iter(engines))]
    return kept[0]


def _callers_streamer() -> Any:
    """transformers (5.17–5.22) drops `streamer` on the way to a callable; it is still there in `generate` itself."""
    caller = sys._getframe(2)
    return caller.f_locals.get("streamer") if caller.f_code.co_name == "generate" else None


def _refuse(input_ids: Tensor, processors: Any, config: Any, more: dict[str, Any], context: int | None) -> None:
    """Say what this loop does not do, rather than leave it out in silence."""
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise InputError(f"windfall's loop does not keep what {name} asks for; leave it off")
    if (config.num_beams or 1) > 1:
        raise InputError("windfall decodes greedily or by sampling; num_beams must be 1")
    if unknown := [name for name, value in more.items() if name not in UNDERSTOOD and value is not None]:
        raise InputError(f"windfall's loop does not know what to do with {', '.join(unknown)}")
    if not input_ids.numel():
        raise InputError("windfall's loop needs input_ids")
    if context is not None and config.max_length > context:
        raise InputError(f"the model takes {context} tokens, and max_length (prompt and answer) is {config.max_length}")
    if len(input_ids) > 1 and any(isinstance(p, PrefixConstrainedLogitsProcessor) for p in processors or ()):
        raise InputError("prefix_allowed_tokens_fn works with one prompt at a time here")


def _padding(input_ids: Tensor, mask: Tensor | None) -> list[int]:
    """How many padding tokens stand to the left of each prompt."""
    if mask is None:
        return [0] * len(input_ids)
    if mask.shape != input_ids.shape or bool((mask.int().diff(dim=1) < 0).any()) or not bool(mask[:, -1].all()):
        raise InputError("windfall's loop takes prompts padded on the left: a mask of zeros, then ones")
    return [int(row.int().argmax()) for row in mask]


def _params(ids: Tensor, start: int, row: int, processors: Any, criteria: Any, config: Any) -> SamplingParams:
    """One row's sampling; processors and criteria see its padding as they would in transformers' own loop."""
    pad = ids[:start]

    def padded(ask: Callable[..., Any]) -> Callable[..., Any]:
        return lambda prefix, scores: ask(torch.cat([pad.expand(len(prefix), -1), prefix.to(pad.device)], 1), scores)

    return SamplingParams(
        max_new_tokens=config.max_length - len(ids),
        temperature=1.0 if config.do_sample else 0.0,  # the warpers are among the processors
        eos=(),  # so is the end of text among the criteria
        seed=int(torch.randint(2**62, ())) + row if config.do_sample else 0,
        processors=tuple(map(padded, processors or ())),
        criteria=tuple(map(padded, criteria or ())),
    )


def _collect(
    engine: Engine,
    prompts: list[list[int]],
    params: list[SamplingParams],
    input_ids: Tensor,
    config: Any,
    streamer: Any,
) -> Any:
    new: list[list[int]] = [[] for _ in prompts]
    for steps in engine.run(prompts, params):
        for i, step in steps.items():
            new[i].extend(step.tokens)
            for token in step.tokens if streamer is not None else ():
                streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()
    pad = config.pad_token_id if config.pad_token_id is not None else 0
    width = max(map(len, new))
    tail = torch.tensor([row + [pad] * (width - len(row)) for row in new], device=input_ids.device)
    sequences = torch.cat([input_ids, tail], 1)
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences)
