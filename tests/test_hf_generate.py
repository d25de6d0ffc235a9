"""windfall as the loop inside `model.generate`."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from transformers import MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

import windfall
from tiny import prompt, tiny
from windfall.hf_generate import KEPT
from windfall.records import InputError


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


def both(model: Any, inputs: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> tuple[Any, Any]:
    options = {"attention_mask": torch.ones_like(inputs) if mask is None else mask, "max_new_tokens": 20} | options
    loop = windfall.custom_generate(drafter="lm", policy="beam")
    theirs = model.generate(inputs, **options)
    return theirs, model.generate(inputs, custom_generate=loop, **options)


def test_greedy_is_the_same(model: Any) -> None:
    theirs, ours = both(model, torch.tensor([prompt()]), do_sample=False)
    assert torch.equal(theirs, ours)


def test_processors_of_the_config_are_honoured(model: Any) -> None:
    theirs, ours = both(
        model,
        torch.tensor([prompt()]),
        do_sample=False,
        repetition_penalty=1.4,
        no_repeat_ngram_size=2,
        min_new_tokens=5,
    )
    assert torch.equal(theirs, ours)


def test_left_padded_batch(model: Any) -> None:
    prompts = [prompt(4, 1), prompt(9, 2), prompt(7, 3)]
    inputs = torch.tensor([[0] * (9 - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (9 - len(p)) + [1] * len(p) for p in prompts])
    eos = int(model.generate(inputs, attention_mask=mask, do_sample=False, max_new_tokens=20)[1, 14])
    theirs, ours = both(model, inputs, mask, do_sample=False, eos_token_id=eos, pad_token_id=0)
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


def test_constraints_by_prefix_work_for_one_prompt(model: Any) -> None:
    inputs = torch.tensor([prompt()])

    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        return [1 + (int(ids[-1]) * 7 + i) % 60 for i in range(5)]

    theirs, ours = both(model, inputs, do_sample=False, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(theirs, ours)
    with pytest.raises(InputError, match="one prompt at a time"):
        both(model, inputs.repeat(2, 1), do_sample=False, prefix_allowed_tokens_fn=allowed)


def test_the_engine_goes_with_the_model() -> None:
    made = tiny()
    inputs = torch.tensor([prompt()])
    loop = windfall.custom_generate(drafter="lm", policy="beam")
    made.generate(
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=3, custom_generate=loop
    )
    seen = weakref.ref(made)
    del made
    gc.collect()
    assert seen() is None


def test_a_loop_made_anew_each_time_is_the_same_engine() -> None:
    made, inputs = tiny(), torch.tensor([prompt()])
    options = {"attention_mask": torch.ones_like(inputs), "do_sample": False, "max_new_tokens": 3}
    for _ in range(3):
        made.generate(inputs, custom_generate=windfall.custom_generate("ngram", "beam"), **options)
    assert len(made._windfall_engines) == 1
    for depth in range(1, 8):
        policy = windfall.registry.policy("chain", depth=depth)
        made.generate(inputs, custom_generate=windfall.custom_generate("ngram", policy), **options)
    assert len(made._windfall_engines) == KEPT
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


def test_dict_output(model: Any) -> None:
    theirs, ours = both(model, torch.tensor([prompt()]), do_sample=False, return_dict_in_generate=True)
    assert torch.equal(theirs.sequences, ours.sequences)


@pytest.mark.parametrize("option", [{"num_beams": 2}, {"output_scores": True, "return_dict_in_generate": True}])
def test_what_the_loop_cannot_do_is_refused(model: Any, option: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(option))):
        both(model, torch.tensor([prompt()]), do_sample=False, **option)
