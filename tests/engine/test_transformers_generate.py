"""windfall as the loop inside `model.generate`."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

import windfall
from helpers.tiny import VOCABULARY, prompt, tiny
from windfall.core.types import InputError
from windfall.engine.transformers_generate import MAX_ENGINES_PER_MODEL
from windfall.engine.transformers_options import HARMLESS, HONOURED, REFUSED, REFUSED_ARGUMENTS, refuse_options

PROMPTS = [prompt(4, 1), prompt(9, 2), prompt(7, 3)]
PADDED = torch.tensor([[0] * (9 - len(p)) + p for p in PROMPTS])
MASK = torch.tensor([[0] * (9 - len(p)) + [1] * len(p) for p in PROMPTS])
BATCHES = {"one": slice(1, 2), "three": slice(0, 3)}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny(num_hidden_layers=2)


@pytest.fixture(scope="module")
def eager() -> Any:
    """A model that can return its attentions."""
    return tiny(num_hidden_layers=1, attn_implementation="eager")


@pytest.fixture(scope="module")
def near(model: Any) -> Any:
    """A drafter that is often right, but not always."""
    made = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.15)
    return made


@pytest.fixture(scope="module")
def eos(model: Any) -> int:
    """A token at which the second prompt's text ends early."""
    return int(model.generate(PADDED, attention_mask=MASK, do_sample=False, max_new_tokens=20)[1, 14])


def both(
    model: Any, inputs: torch.Tensor, mask: torch.Tensor | None = None, drafter: Any = "lm", **options: Any
) -> tuple[Any, Any]:
    """What transformers' loop and ours give."""
    options = {"attention_mask": torch.ones_like(inputs) if mask is None else mask, "max_new_tokens": 20} | options
    loop = windfall.custom_generate(drafter=drafter, policy="beam")
    theirs = model.generate(inputs, **options)
    return theirs, model.generate(inputs, custom_generate=loop, **options)


def test_greedy_is_the_same(model: Any) -> None:
    theirs, ours = both(model, torch.tensor([prompt()]), do_sample=False)
    assert torch.equal(theirs, ours)


def test_sampling_is_seeded_by_torch_and_exact(model: Any) -> None:
    inputs = torch.tensor([prompt()])
    options = {"do_sample": True, "temperature": 0.9, "top_k": 20, "max_new_tokens": 20, "top_p": 0.95}
    texts = []
    for policy in ("none", "beam", "beam"):
        torch.manual_seed(5)
        loop = windfall.custom_generate(drafter="lm", policy=policy)
        texts.append(model.generate(inputs, attention_mask=torch.ones_like(inputs), custom_generate=loop, **options))
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[1], texts[2])
    several = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), custom_generate=loop, num_return_sequences=3, **options
    )
    assert len({tuple(row) for row in several.tolist()}) == 3


@pytest.mark.parametrize(
    ("mask", "more", "message"),
    [
        ([[1, 1, 1, 0]], {}, "padded on the left"),
        ([[1, 0, 1, 1]], {}, "padded on the left"),
        ([[1, 1, 1, 1]], {"max_new_tokens": 300}, "takes 256 tokens"),
    ],
)
def test_inputs_that_would_go_wrong_are_refused(model: Any, mask: list, more: dict[str, Any], message: str) -> None:
    inputs = torch.tensor([prompt(4)])
    with pytest.raises(InputError, match=message):
        model.generate(
            inputs,
            attention_mask=torch.tensor(mask),
            do_sample=False,
            custom_generate=windfall.custom_generate(drafter="lm", policy="beam"),
            **{"max_new_tokens": 5, **more},
        )


OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "several ends, no pad token": lambda eos: {"eos_token_id": [eos, 5, 17], "pad_token_id": None},
    "a pad token": lambda eos: {"eos_token_id": eos, "pad_token_id": 3},
    "penalties": lambda eos: {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 8},
    "words": lambda eos: {"bad_words_ids": [[5], [6, 7]], "sequence_bias": [[[9], 3.0], [[6, 8], -4.0]]},
    "forced": lambda eos: {"forced_bos_token_id": 5, "forced_eos_token_id": 7, "eos_token_id": eos},
    "lengths": lambda eos: {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": eos, "min_length": 14},
    "suppressed": lambda eos: {"suppress_tokens": [3, 4], "begin_suppress_tokens": [7, 8], "renormalize_logits": True},
    "prompt penalties": lambda eos: {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    "guidance": lambda eos: {"guidance_scale": 1.5},
    "guidance with ends": lambda eos: {"guidance_scale": 1.5, "eos_token_id": [eos, 5]},
    "SynthID": lambda eos: {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[11, 22, 33])},
    "watermark": lambda eos: {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "allowed tokens": lambda eos: {
        "prefix_allowed_tokens_fn": lambda row, ids: [1 + (int(ids[-1]) * 7 + i + row) % 60 for i in range(5)]
    },
    "sampling from one": lambda eos: {"do_sample": True, "top_k": 1, "temperature": 0.7},
    "no cache": lambda eos: {"use_cache": False},
    "static cache": lambda eos: {"cache_implementation": "static", "disable_compile": True},
    "prefill in chunks": lambda eos: {"prefill_chunk_size": 3},
    "the whole length": lambda eos: {"max_length": 18, "max_new_tokens": None},
    "the default length": lambda eos: {"max_new_tokens": None},
}


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_give_the_text_of_transformers(model: Any, near: Any, eos: int, name: str, rows: str) -> None:
    where = BATCHES[rows]
    options = {"do_sample": False, "max_new_tokens": 14, **OPTIONS[name](eos)}
    theirs, ours = both(model, PADDED[where], MASK[where], near, **options)
    assert torch.equal(theirs, ours)


def test_guidance_with_negative_prompts(model: Any, near: Any) -> None:
    options = {"guidance_scale": 1.7, "negative_prompt_ids": torch.tensor([prompt(3, 7), prompt(3, 8), prompt(3, 9)])}
    theirs, ours = both(model, PADDED, MASK, near, do_sample=False, **options)
    assert torch.equal(theirs, ours)


class Counting(LogitsProcessor):
    """Prefers another token at each call, and writes down how it was called."""

    def __init__(self, log: list[Any]):
        self.log, self.calls = log, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.log.append(("process", input_ids.tolist(), scores.clone()))
        scores[:, self.calls * 7 % VOCABULARY] += 6  # in place, which transformers allows
        return scores


class Mixing(LogitsProcessor):
    """Scores of a row depend on the row before it."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 2 * scores.roll(1, 0) - scores.mean(0)


class StopsAtTurns(StoppingCriteria):
    """Ends a row at a token that changes with each call."""

    def __init__(self, log: list[Any], every: int = 7):
        self.log, self.calls, self.every = log, 0, every

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.calls += 1
        self.log.append(("stop", input_ids.tolist(), None))
        return (input_ids[:, -1] + self.calls) % self.every == 0


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("every", [5, 1000])
def test_stateful_processors_and_criteria_are_called_as_in_transformers_loop(
    model: Any, near: Any, eos: int, rows: str, ends: bool, every: int
) -> None:
    """Same calls in the same order, with the same tokens and scores: none after the end, none for rejected drafts."""
    where, logs, texts = BATCHES[rows], [], []
    for loop in (None, *(windfall.custom_generate(drafter=near, policy=policy) for policy in ("beam", "none"))):
        logs.append([])
        texts.append(
            model.generate(
                PADDED[where],
                attention_mask=MASK[where],
                logits_processor=LogitsProcessorList([Counting(logs[-1])]),
                stopping_criteria=StoppingCriteriaList([StopsAtTurns(logs[-1], every), StopsAtTurns(logs[-1], 1000)]),
                eos_token_id=[eos, 5] if ends else None,
                do_sample=False,
                max_new_tokens=16,
                custom_generate=loop,
            )
        )
    theirs, *ours = logs
    for text, log in zip(texts[1:], ours, strict=True):
        assert torch.equal(texts[0], text)
        assert [call[:2] for call in theirs] == [call[:2] for call in log]
        for (_, _, expected), (_, _, given) in zip(theirs, log, strict=True):
            if expected is not None and not ends:  # else those of rows that have ended are zeros
                assert torch.allclose(expected, given, atol=1e-3)


def test_processors_that_mix_rows_see_the_whole_batch(model: Any, near: Any) -> None:
    theirs, ours = both(model, PADDED, MASK, near, do_sample=False, logits_processor=LogitsProcessorList([Mixing()]))
    assert torch.equal(theirs, ours)


def test_sampling_with_stateful_processors_is_the_same_for_every_policy(model: Any, near: Any, eos: int) -> None:
    texts = []
    for policy in ("none", "beam", "chain"):
        torch.manual_seed(3)
        texts.append(
            model.generate(
                PADDED,
                attention_mask=MASK,
                do_sample=True,
                temperature=0.8,
                eos_token_id=eos,
                max_new_tokens=20,
                logits_processor=LogitsProcessorList([Counting([])]),
                custom_generate=windfall.custom_generate(drafter=near, policy=policy),
            )
        )
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


def test_speculation_goes_on_where_rows_go_together(model: Any) -> None:
    """With a drafter that is always right, three rows of 12 tokens take few passes, not 12."""
    passes: list[int] = []
    loop = windfall.custom_generate(drafter=copy.deepcopy(model), policy="beam")
    options = {"attention_mask": MASK, "do_sample": False, "max_new_tokens": 12, "custom_generate": loop}
    model.generate(PADDED, **options)  # makes the engine
    hook = model.register_forward_hook(lambda *_: passes.append(1))
    model.generate(PADDED, stopping_criteria=StoppingCriteriaList([StopsAtTurns([], 1000)]), **options)
    hook.remove()
    assert len(passes) <= 4


def test_finished_rows_continue_if_there_is_no_end_of_text_token(model: Any, near: Any) -> None:
    options = {"do_sample": False, "pad_token_id": None}
    logs: list[list[Any]] = [[], []]
    theirs, ours = (
        model.generate(
            PADDED,
            attention_mask=MASK,
            max_new_tokens=30,
            stopping_criteria=StoppingCriteriaList([StopsAtTurns(log)]),
            custom_generate=loop,
            **options,
        )
        for log, loop in zip(logs, (None, windfall.custom_generate(near, "beam")), strict=True)
    )
    assert torch.equal(theirs, ours)
    assert theirs.shape[1] < 39  # they ended by the criterion


def test_a_longer_limit_of_the_caller_is_kept(model: Any, near: Any) -> None:
    criteria = StoppingCriteriaList([MaxLengthCriteria(30)])
    theirs, ours = both(model, PADDED, MASK, near, do_sample=False, max_new_tokens=5, stopping_criteria=criteria)
    assert torch.equal(theirs, ours)
    assert ours.shape[1] == 30


def test_a_model_with_an_engine_can_be_freed() -> None:
    made = tiny(num_hidden_layers=1)
    inputs = torch.tensor([prompt()])
    loop = windfall.custom_generate(drafter="lm", policy="beam")
    made.generate(
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=3, custom_generate=loop
    )
    seen = weakref.ref(made)
    del made
    gc.collect()
    assert seen() is None


def test_equal_custom_generate_calls_share_one_engine() -> None:
    made, inputs = tiny(num_hidden_layers=1), torch.tensor([prompt()])
    options = {"attention_mask": torch.ones_like(inputs), "do_sample": False, "max_new_tokens": 3}
    for _ in range(3):
        made.generate(inputs, custom_generate=windfall.custom_generate("ngram", "beam"), **options)
    assert len(made._windfall_engines) == 1
    for depth in range(1, 8):
        policy = windfall.registry.policy("chain", depth=depth)
        made.generate(inputs, custom_generate=windfall.custom_generate("ngram", policy), **options)
    assert len(made._windfall_engines) == MAX_ENGINES_PER_MODEL
    kept = io.BytesIO()
    torch.save(made, kept)  # what is kept, and a copy, have no engines
    kept.seek(0)
    for other in (copy.deepcopy(made), torch.load(kept, weights_only=False)):
        assert len(other._windfall_engines) == 0
        theirs, ours = both(other, inputs, do_sample=False)
        assert torch.equal(theirs, ours)


class StopAt(StoppingCriteria):
    """Ends a text at a token, and remembers how it was asked."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


def test_stopping_criteria_are_honoured(model: Any) -> None:
    inputs = torch.tensor([prompt()])
    plain = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=20)
    for criteria in (StopAt(int(plain[0, 15])), MaxLengthCriteria(max_length=14)):
        theirs, ours = both(model, inputs, do_sample=False, stopping_criteria=StoppingCriteriaList([criteria]))
        assert torch.equal(theirs, ours)
        assert ours.shape[1] < plain.shape[1]


def test_streamers_get_every_token_in_order(model: Any) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.got: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.got += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    streamer = Streamer()
    inputs = torch.tensor([prompt()])
    loop = windfall.custom_generate(drafter="lm", policy="beam")
    out = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=15,
        streamer=streamer,
        custom_generate=loop,
    )
    assert streamer.got == out[0].tolist()
    assert streamer.ended


def test_streamers_of_a_batch_get_a_token_of_each_row(model: Any, near: Any, eos: int) -> None:
    class Columns:
        def __init__(self) -> None:
            self.got: list[torch.Tensor] = []

        def put(self, value: torch.Tensor) -> None:
            self.got.append(value)

        def end(self) -> None:
            self.got.append(torch.zeros(0))

    streamers = [Columns(), Columns()]
    for streamer, loop in zip(streamers, (None, windfall.custom_generate(near, "beam")), strict=True):
        model.generate(
            PADDED,
            attention_mask=MASK,
            do_sample=False,
            max_new_tokens=15,
            eos_token_id=eos,
            streamer=streamer,
            custom_generate=loop,
        )
    theirs, ours = (streamer.got for streamer in streamers)
    assert len(theirs) == len(ours)
    assert all(torch.equal(*pair) for pair in zip(theirs, ours, strict=True))


def assert_same_past(theirs: Any, ours: Any) -> None:
    assert type(theirs) is type(ours)
    assert int(theirs.get_seq_length()) == int(ours.get_seq_length())
    assert len(theirs.layers) == len(ours.layers)
    for one, other in zip(theirs.layers, ours.layers, strict=True):
        assert type(one) is type(other)
        assert not other.keys.is_inference()
        assert torch.allclose(one.keys, other.keys, atol=1e-3)
        assert torch.allclose(one.values, other.values, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "rows", "more"),
    [
        ("llama", slice(1, 2), {}),
        ("llama", slice(1, 2), {"eos": True}),
        ("llama", slice(0, 3), {}),
        ("llama", slice(0, 3), {"eos": True}),
        ("llama", slice(1, 2), {"cache_implementation": "static", "disable_compile": True}),
        ("mistral-window", slice(1, 2), {}),
        ("mistral-window", slice(0, 3), {}),
        ("gemma3", slice(1, 2), {}),
        ("gpt2", slice(0, 3), {}),
    ],
)
def test_the_cache_is_returned(eos: int, family: str, rows: slice, more: dict[str, Any]) -> None:
    made = tiny(family, num_hidden_layers=2)
    more = {"eos_token_id": eos} if more.pop("eos", False) else more
    options = {"do_sample": False, "return_dict_in_generate": True, "max_new_tokens": 12, **more}
    theirs, ours = both(made, PADDED[rows], MASK[rows], "ngram", **options)
    assert torch.equal(theirs.sequences, ours.sequences)
    assert int(ours.past_key_values.get_seq_length()) == ours.sequences.shape[1] - 1
    assert_same_past(theirs.past_key_values, ours.past_key_values)


@pytest.mark.parametrize("policy", ["none", "beam"])
def test_the_cache_of_a_batch_without_padding(model: Any, policy: str) -> None:
    """Rows of one length that end in one cycle (with no drafts) or in several: then only some are still there."""
    inputs = torch.tensor([prompt(9, seed) for seed in range(3)])
    options = {"attention_mask": torch.ones_like(inputs), "do_sample": False, "return_dict_in_generate": True}
    theirs = model.generate(inputs, **options)
    ours = model.generate(inputs, custom_generate=windfall.custom_generate("ngram", policy), **options)
    assert_same_past(theirs.past_key_values, ours.past_key_values)


def test_the_cache_is_taken_from_the_engine_without_another_pass(model: Any) -> None:
    inputs = torch.tensor([prompt()])
    loop, counts = windfall.custom_generate("ngram", "none"), []
    for wanted in (False, False, True):  # the first call makes the engine
        passes: list[int] = []
        hook = model.base_model.register_forward_hook(lambda *_, seen=passes: seen.append(1))
        options = {"do_sample": False, "max_new_tokens": 8, "return_dict_in_generate": wanted}
        model.generate(inputs, attention_mask=torch.ones_like(inputs), custom_generate=loop, **options)
        hook.remove()
        counts.append(len(passes))
    assert counts[1] == counts[2]


def test_no_cache_is_returned_where_none_is_used(model: Any) -> None:
    options = {"do_sample": False, "return_dict_in_generate": True, "use_cache": False}
    for out in both(model, torch.tensor([prompt()]), **options):
        assert out.past_key_values is None


def test_a_conversation_goes_on_from_the_returned_cache(model: Any) -> None:
    inputs = torch.tensor([prompt()])
    out = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=8,
        return_dict_in_generate=True,
        custom_generate=windfall.custom_generate("ngram", "beam"),
    )
    longer = torch.cat([out.sequences, torch.tensor([prompt(3, 5)])], 1)
    options = {"attention_mask": torch.ones_like(longer), "do_sample": False, "max_new_tokens": 8}
    again = model.generate(longer, past_key_values=out.past_key_values, **options)
    assert torch.equal(again, model.generate(longer, **options))


def test_a_given_cache_is_filled_if_it_is_empty_and_else_refused(model: Any) -> None:
    inputs = torch.tensor([prompt()])
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    options = {"attention_mask": torch.ones_like(inputs), "do_sample": False, "max_new_tokens": 8}
    loop = windfall.custom_generate("ngram", "beam")
    model.generate(inputs, past_key_values=caches[0], **options)
    text = model.generate(inputs, past_key_values=caches[1], custom_generate=loop, **options)
    assert_same_past(*caches)
    options["attention_mask"] = torch.ones_like(text)
    with pytest.raises(InputError, match="past_key_values must be empty"):
        model.generate(text, past_key_values=caches[1], custom_generate=loop, **options)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_positions_are_those_of_the_mask_or_refused(family: str) -> None:
    made = tiny(family, num_hidden_layers=1)
    right = (MASK.cumsum(-1) - 1).masked_fill(MASK == 0, 1)  # those of hidden tokens do not matter
    theirs, ours = both(made, PADDED, MASK, "ngram", do_sample=False, position_ids=right)
    assert torch.equal(theirs, ours)
    for wrong in (right + 3, right.flip(1), torch.arange(9).expand(3, -1)):
        with pytest.raises(InputError, match="position_ids"):
            both(made, PADDED, MASK, "ngram", do_sample=False, position_ids=wrong)
    inputs = torch.tensor([prompt()])
    with pytest.raises(InputError, match="position_ids"):
        both(made, inputs, drafter="ngram", do_sample=False, position_ids=torch.arange(9)[None] + 1)


ASKS: dict[str, Any] = {
    "num_beams": 2,
    "num_beam_groups": 2,
    "constraints": [1],
    "force_words_ids": [[3]],
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 2,
    "use_mtp": True,
    "speculation_type": "dflash",
    "is_assistant": True,
    "token_healing": True,
    "stop_strings": "x",
    "cache_implementation": "quantized",
    "output_scores": True,
    "output_logits": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "synced_gpus": True,
    "inputs_embeds": torch.zeros(1, 9, 32),
}


TRANSFORMERS_FIRST = {"token_healing", "stop_strings", "cache_implementation"}  # it misses a tokenizer, or a library


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_ARGUMENTS, "inputs_embeds"])
def test_what_the_loop_cannot_do_is_refused_by_name(eager: Any, name: str) -> None:
    inputs = torch.tensor([prompt()])
    asked = {name: eager if name == "assistant_model" else ASKS[name], "top_k": 4}
    if name in TRANSFORMERS_FIRST:
        with pytest.raises(InputError, match=f"{name} is not supported"):
            refuse_options(GenerationConfig(**asked), {}, {})
        return
    with pytest.raises(InputError, match=name):
        eager.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=5,
            return_dict_in_generate=True,
            custom_generate=windfall.custom_generate("ngram", "beam"),
            **asked,
        )


def test_every_option_of_transformers_is_honoured_refused_or_harmless() -> None:
    """A new version of transformers may add options that would be ignored silently."""
    known = [HONOURED, HARMLESS, set(REFUSED)]
    options = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert options <= set().union(*known)
    assert sum(map(len, known)) == len(set().union(*known))
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    listed = set().union(*known, REFUSED_ARGUMENTS) - {"transformers_version"}
    assert not [name for name in listed if f"`{name}`" not in page]


@pytest.mark.parametrize("name", ["penalty_alpha", "diversity_penalty", "low_memory"])
def test_options_of_other_methods_do_not_matter_where_transformers_ignores_them(model: Any, name: str) -> None:
    options = {"do_sample": True, "top_k": 1, name: {"low_memory": True}.get(name, 0.5)}
    theirs, ours = both(model, torch.tensor([prompt()]), **options)
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("implementation", ["flex_attention", "eager", "sdpa"])
def test_the_model_keeps_its_attention(implementation: str) -> None:
    made, inputs = tiny(num_hidden_layers=1), torch.tensor([prompt()])
    options = {"attention_mask": torch.ones_like(inputs), "do_sample": False, "max_new_tokens": 8}
    plain = made.generate(inputs, **options)
    made.set_attn_implementation(implementation)
    loop = windfall.custom_generate("ngram", "beam")
    assert torch.equal(made.generate(inputs, custom_generate=loop, **options), plain)
    assert made.config._attn_implementation == implementation
    engine = windfall.load(made, drafter="ngram", policy="beam")
    assert engine.generate(prompt(), max_new_tokens=8).token_ids == plain[0, 9:].tolist()
    assert made.config._attn_implementation == implementation


def test_attention_comes_back_when_a_streamer_fails() -> None:
    class Broken:
        def put(self, value: torch.Tensor) -> None:
            if value.dim() == 1:  # not the prompt
                raise RuntimeError("closed")

    made, inputs = tiny(), torch.tensor([prompt()])
    made.set_attn_implementation("flex_attention")
    loop = windfall.custom_generate("ngram", "beam")
    with pytest.raises(RuntimeError, match="closed") as failure:
        made.generate(inputs, attention_mask=torch.ones_like(inputs), streamer=Broken(), custom_generate=loop)
    assert made.config._attn_implementation == "flex_attention"
    del failure
