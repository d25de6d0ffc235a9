"""windfall as the decoding loop of `model.generate`. transformers prepares inputs, processors, criteria, streamers."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import torch
import transformers.generation.logits_process as hf_processors
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from windfall.core.types import InputError, SamplingParams
from windfall.drafters.base import Drafter
from windfall.engine.engine import Engine
from windfall.engine.loading import load
from windfall.engine.lockstep import Lockstep
from windfall.engine.transformers_options import refuse_inputs, refuse_options
from windfall.model.kv_cache import KVCache
from windfall.model.target import Target

MAX_ENGINES_PER_MODEL = 4

# transformers' processors that keep no state and treat each row by itself; the others must see the whole batch.
NAMES_ROW_BY_ROW = [
    "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor", "ExponentialDecayLengthPenalty", "TemperatureLogitsWarper", "TopPLogitsWarper",
    "TopKLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper", "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "RepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor", "SuppressTokensLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor",
    "InfNanRemoveLogitsProcessor", "LogitNormalization",
]  # fmt: skip
ROW_BY_ROW = tuple(getattr(hf_processors, name) for name in NAMES_ROW_BY_ROW if hasattr(hf_processors, name))


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
    exact: bool = True,
    host_policies: bool = False,
) -> Callable[..., Any]:
    """A decoding loop for `model.generate(..., custom_generate=windfall.custom_generate(...))`.

    The arguments are those of `windfall.load`. Greedy and sampling, one prompt or a left-padded batch. Options of
    `generate` that the loop does not support are refused by name (docs/transformers.md lists them).
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
        arguments = _arguments_of_generate()
        arguments["synced_gpus"] = synced_gpus or arguments["synced_gpus"]
        refuse_options(generation_config, arguments, model_kwargs)
        engine = _engine_of(model, drafter, policy, words)
        request = Request(
            input_ids,
            LogitsProcessorList(logits_processor or ()),
            StoppingCriteriaList(stopping_criteria or ()),
            generation_config,
            model_kwargs,
        )
        refuse_inputs(input_ids, model_kwargs, request.longest, engine.target.context)
        return request.run(engine, streamer or arguments.get("streamer"))

    return decode


class Engines(dict[Any, tuple[Engine, Any, Any, Any]]):
    """The engines of one model, which owns them, with the arguments that they were made of.

    Saved and copied models have none.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return Engines, ()


def _key(asked: Any) -> Any:
    """A key for arguments: names and numbers by value, other objects by identity."""
    if isinstance(asked, Mapping):
        return tuple((name, _key(value)) for name, value in asked.items())
    return asked if isinstance(asked, str | int | float | None) else id(asked)


def _engine_of(model: Any, drafter: Any, policy: Any, words: Mapping[str, Any]) -> Engine:
    """The engine for these arguments of `load`. The engines used last are kept, since making one takes a while."""
    engines: Engines = model.__dict__.setdefault("_windfall_engines", Engines())
    key = _key(drafter), _key(policy), _key(words)
    kept = engines.pop(key, None)
    if kept is None:
        own = copy.copy(drafter) if isinstance(drafter, Drafter) else drafter
        kept = load(Target(model), own, policy, **words), drafter, policy, words
    engines[key] = kept
    while len(engines) > MAX_ENGINES_PER_MODEL:
        del engines[next(iter(engines))]
    return kept[0]


def _arguments_of_generate() -> dict[str, Any]:
    """The arguments of the `generate` call that called the loop, read from its frame.

    There is no other way: transformers (5.17 to 5.23) passes neither `streamer` nor `assistant_model` nor `synced_gpus`
    to a callable (`GenerationMixin._extract_generation_mode_kwargs` drops them).
    """
    caller = sys._getframe(2)
    known = caller.f_locals if caller.f_code.co_name == "generate" else {}
    return {name: known.get(name) for name in ("streamer", "assistant_model", "synced_gpus")}


class Request:
    """One call of `generate`: prompts [B, L], and what transformers prepared for them."""

    def __init__(
        self,
        ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: Any,
        model_kwargs: dict[str, Any],
    ):
        self.ids, self.processors, self.criteria, self.config = ids, processors, criteria, config
        self.mask: Tensor | None = model_kwargs.get("attention_mask")
        self.past: Any = model_kwargs.get("past_key_values")
        self.longest: int = config.max_length if criteria.max_length is None else criteria.max_length
        self.pads = any(hasattr(each, "eos_token_id") for each in criteria)  # as transformers decides it
        self.pad = self._pad_token()

    def _pad_token(self) -> int:
        """The token that fills a row after its end; transformers takes an end-of-text id if there is no pad token."""
        pad = getattr(self.config, "_pad_token_tensor", None)
        pad = self.config.pad_token_id if pad is None else pad
        if pad is None and self.pads and len(self.ids) > 1:
            raise InputError("a criterion has an eos_token_id, so rows of a batch are padded: give a pad_token_id")
        return 0 if pad is None else int(pad)

    def run(self, engine: Engine, streamer: Any) -> Any:
        """The result of `generate`: the padded texts, or an object with them and the cache."""
        starts = [0] * len(self.ids) if self.mask is None else [int(row.int().argmax()) for row in self.mask]
        before = engine.target.decoder.cache
        new = self._decode(engine, starts, streamer)
        width = max(map(len, new))
        tail = [row + [self.pad] * (width - len(row)) for row in new]
        sequences = torch.cat([self.ids, torch.tensor(tail, device=self.ids.device)], 1)
        if self.past is not None and (self.config.return_dict_in_generate or _is_the_callers(self.past)):
            rows = engine.target.decoder.cache  # a new one, unless the GPU runner decoded the text
            whole = rows is not before and not any(starts) and all(len(row) == width for row in new)
            self._fill_past(engine.target, sequences, rows if whole else None)
        if not self.config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(sequences=sequences, past_key_values=self.past)

    def _decode(self, engine: Engine, starts: list[int], streamer: Any) -> list[list[int]]:
        """The new tokens of each row. The streamer gets the tokens of all rows, step by step."""
        prompts = [ids[start:].tolist() for ids, start in zip(self.ids, starts, strict=True)]
        lockstep = self._lockstep()
        params = [self._params(row, start, lockstep is not None) for row, start in enumerate(starts)]
        new: list[list[int]] = [[] for _ in prompts]
        live, sent = set(range(len(prompts))), 0
        with closing(engine.run(prompts, params, lockstep)) as cycles:
            for steps in cycles:
                for row, step in steps.items():
                    new[row].extend(step.tokens)
                live -= {row for row, step in steps.items() if step.finish}
                ready = min((len(new[row]) for row in live), default=max(map(len, new)))
                for place in range(sent, ready) if streamer is not None else ():
                    streamer.put(torch.tensor([row[place] if place < len(row) else self.pad for row in new]))
                sent = ready
        if streamer is not None:
            streamer.end()
        return new

    def _lockstep(self) -> Lockstep | None:
        """A Lockstep if processors or criteria must see the whole batch at every step."""
        known = (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria, StopStringCriteria)[: 4 if self.pads else 1]
        alone = all(type(each) in ROW_BY_ROW for each in self.processors)
        if len(self.ids) == 1 or (alone and all(type(each) in known for each in self.criteria)):
            return None
        return Lockstep(self.ids, _outside_inference(self.processors), self._ends, self.pad if self.pads else None)

    def _ends(self, ids: Tensor) -> Tensor:
        """Which rows end here. All criteria are called."""
        ended: Tensor = _outside_inference(self.criteria)(ids, None)
        return ended

    def _params(self, row: int, start: int, together: bool) -> SamplingParams:
        """One row's sampling. Its processors and criteria see its padding, as in transformers' own loop."""
        padding = self.ids[row : row + 1, :start]
        processors = _for_row(self.processors, row)

        def padded(ask: Callable[..., Any]) -> Callable[..., Any]:
            ask = _outside_inference(ask)
            return lambda ids, scores: ask(torch.cat([padding, ids.to(padding.device)], 1), scores)

        simple = all(type(each) in (MaxLengthCriteria, EosTokenCriteria) for each in self.criteria)
        ends = [each.eos_token_id.tolist() for each in self.criteria if type(each) is EosTokenCriteria]
        return SamplingParams(
            max_new_tokens=max(self.longest - self.ids.shape[1], 1),
            temperature=1.0 if self.config.do_sample else 0.0,  # the warpers are among the processors
            eos=tuple(token for tokens in ends for token in tokens) if simple and not together else (),
            seed=int(torch.randint(2**62, ())) + row if self.config.do_sample else 0,
            processors=(padded(processors),) if processors and not together else (),
            criteria=() if simple or together else (padded(self.criteria),),
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def _fill_past(self, target: Target, sequences: Tensor, rows: KVCache | None) -> None:
        """Put the keys and values of all tokens but the last into the cache that `generate` made or was given.

        They are copied from the engine's cache `rows`. Without it, the model reads the text again.
        """
        length = sequences.shape[1] - 1
        if rows is not None and len(rows.lengths) == len(sequences) and min(rows.lengths) >= length:
            for index, layer in enumerate(rows.layers):
                if layer.is_initialized:
                    self.past.update(layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone(), index)
            return
        ids = sequences[:, :length].to(target.device)
        mask = torch.ones_like(ids)
        if self.mask is not None:
            mask[:, : self.mask.shape[1]] = self.mask.to(mask)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        target.model.base_model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.past,
            use_cache=True,
        )


def _for_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """The processors for one row of the batch. Since transformers 5.23 one of them holds each row's padding length."""
    own = LogitsProcessorList(processors)
    for index, each in enumerate(own):
        lengths = getattr(each, "prompt_ignore_length", None)
        if isinstance(lengths, Tensor):
            own[index] = copy.copy(each)
            own[index].prompt_ignore_length = int(lengths[row])
    return own


def _is_the_callers(cache: Any) -> bool:
    """Whether the caller of `generate` gave this cache, and so expects to find it filled."""
    return bool(getattr(cache, "_is_user_defined", False))


def _outside_inference(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Call processors or criteria as `generate` does: without gradients, on ordinary tensors, where the ids are."""

    def call(ids: Tensor, scores: Tensor | None) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return ask(ids.clone(), None if scores is None else scores.to(ids.device, torch.float32, copy=True))

    return call
