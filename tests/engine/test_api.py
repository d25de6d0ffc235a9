"""The Python API: the arguments of `load`, the repr of an engine, callbacks, streamers and asyncio."""

from __future__ import annotations

import asyncio
import inspect
import threading
from functools import cache
from typing import Any

import pytest
import torch
from transformers import TextStreamer

import windfall
from helpers.cli import character_tokenizer
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.cli.options import BatchOptions, ModelOptions, PolicyOptions
from windfall.core.types import GpuOptions, InputError, Step
from windfall.engine import loading
from windfall.engine.engine import Engine
from windfall.policies.beam import Beam

GREEDY = {"max_new_tokens": 40, "eos": ()}


@cache
def engine() -> Engine:
    return windfall.load((tiny(), character_tokenizer()), "lm", "chain", policy_options={"depth": 2})


# ---- arguments of load


def test_options_reach_drafter_policy_and_gpu() -> None:
    made = windfall.load(
        tiny(),
        drafter="ngram",
        drafter_options={"min_match": 3},
        policy="beam",
        policy_options={"depth": 4, "k": 3},
        coupled=False,
        graphs=False,
        compile=True,
        exact=False,
        host_policies=True,
    )
    assert made.drafter.min_match == 3
    assert isinstance(made.policy, Beam) and (made.policy.depth, made.policy.k) == (4, 3)
    assert made.gpu_options == GpuOptions(graphs=False, compiled=True, exact=False, plans=False)
    assert not made.coupled


def test_a_preset_is_a_policy_whose_options_can_be_overridden() -> None:
    made = windfall.load(tiny(), preset="eagle-3", policy_options={"nodes": 20})
    assert made.policy == registry.policy("beam", depth=8, k=10, nodes=20)


def test_gpu_options_as_one_record() -> None:
    made = windfall.load(tiny(), gpu_options=windfall.GpuOptions(exact=False))
    assert made.gpu_options == GpuOptions(exact=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"policy_options": {"deep": 3}, "policy": "beam"}, "policy beam has no option 'deep'; it has: depth, k"),
        ({"policy_options": {"depth": 0}, "policy": "beam"}, "depth must be at least 1, not 0"),
        ({"policy_options": {"depth": None}, "policy": "beam"}, "depth takes a whole number, not None"),
        ({"policy_options": {"depth": [3]}, "policy": "beam"}, r"depth takes a whole number, not \[3\]"),
        ({"policy_options": {"widths": 5}, "policy": "specinfer"}, "widths takes text, not 5"),
        ({"policy_options": ["depth"], "policy": "beam"}, "policy_options takes options by name"),
        ({"policy_options": {"depth": 3}, "policy": Beam()}, "this policy is a ready Beam; give its options where"),
        ({"drafter_options": {"depth": 3}, "drafter": "ngram"}, "drafter ngram has no option 'depth'"),
        ({"drafter_options": {"model": 3}, "drafter": "lm"}, "a drafter is .*, not 3"),
        ({"drafter_options": {"model": "x"}, "drafter": "a/b"}, "give the model once"),
        ({"preset": "eagle-9"}, "there is no preset 'eagle-9'; choose from"),
        ({"preset": 3}, "a preset is a name or a JSON file, not 3"),
        ({"preset": "eagle-2", "policy": "beam"}, "give a preset or a policy, not both"),
        ({"policy": 3}, "a policy is a name or a TreePolicy, not 3"),
        ({"exact": "yes"}, "exact must be True or False, not 'yes'"),
        ({"compile": 1}, "compile must be True or False, not 1"),
        ({"graphs": "no"}, "graphs must be True, False or None, not 'no'"),
        ({"host_policies": None}, "host_policies must be True or False, not None"),
        ({"coupled": 0}, "coupled must be True or False, not 0"),
        ({"gpu_options": GpuOptions(), "exact": False}, "give gpu_options, or graphs, compile, exact and host_polic"),
        ({"gpu_options": True}, "gpu_options takes a windfall.GpuOptions, not True"),
        ({"max_requests": 0}, "max_requests must be a whole number of at least 1, not 0"),
        ({"kv_memory": "much"}, "kv_memory takes a size such as 4GB or a number of bytes, not 'much'"),
    ],
)
def test_wrong_arguments_are_refused_with_one_line(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as refusal:
        windfall.load(tiny(), **words)
    assert "\n" not in str(refusal.value)


def test_the_command_line_has_every_parameter_of_load() -> None:
    """Every parameter of `load` is an option of the command line, under its name or the opposite's."""
    ours = {*inspect.signature(windfall.load).parameters} - {"gpu_options"}
    renamed = {
        "drafter_settings": "drafter_options",
        "settings": "policy_options",
        "uncoupled": "coupled",
        "no_graphs": "graphs",
        "fast": "exact",
    }
    records = ModelOptions, PolicyOptions, BatchOptions
    flags = {name for record in records for name in record.__dataclass_fields__}
    assert {renamed.get(flag, flag) for flag in flags} == ours


def test_the_command_line_goes_through_load(monkeypatch: pytest.MonkeyPatch) -> None:
    signature, seen = inspect.signature(windfall.load), dict[str, Any]()

    def load(*given: Any, **named: Any) -> Any:
        seen.update(signature.bind(*given, **named).arguments)
        raise InputError("seen")

    monkeypatch.setattr(loading, "load", load)
    options = ModelOptions(
        target="t", drafter="ngram", drafter_settings=["min_match=3"], device="cpu", no_graphs=True, fast=True
    )
    with pytest.raises(InputError, match="seen"):
        options.load("beam")
    wanted = {"target": "t", "drafter": "ngram", "drafter_options": {"min_match": "3"}, "policy": "beam"}
    assert seen.items() >= (wanted | {"device": "cpu", "graphs": False, "exact": False, "coupled": True}).items()


def test_the_repr_names_target_drafter_and_policy() -> None:
    made = windfall.load(tiny(), preset="eagle-2", drafter=tiny(seed=1), policy_options={"nodes": 9})
    assert repr(made) == (
        "Engine('LlamaForCausalLM', float32, cpu, drafter=LMDrafter(model=<LlamaForCausalLM>, "
        "trust_remote_code=False, weights='auto'), policy=Beam(depth=6, k=10, nodes=9))"
    )


@pytest.mark.parametrize("words", [{}, {"policy": "beam", "policy_options": {"depth": 2}}, {"preset": "eagle-2"}])
def test_custom_generate_takes_the_arguments_of_load(words: dict[str, Any]) -> None:
    model, ids = tiny(), torch.tensor([prompt()])
    plain = model.generate(ids, do_sample=False, max_new_tokens=12)
    found = model.generate(
        ids, do_sample=False, max_new_tokens=12, custom_generate=windfall.custom_generate(exact=False, **words)
    )
    assert torch.equal(plain, found)
    [(made, *_)] = model.__dict__["_windfall_engines"].values()
    assert not made.gpu_options.exact
    if words:
        assert made.policy.depth == (2 if "policy" in words else 6)
    model.generate(ids, max_new_tokens=2, custom_generate=windfall.custom_generate(exact=False, **words))
    model.generate(ids, max_new_tokens=2, custom_generate=windfall.custom_generate(**words))
    assert len(model.__dict__["_windfall_engines"]) == 2


def test_custom_generate_has_the_parameters_of_load() -> None:
    ours, theirs = (inspect.signature(each).parameters for each in (windfall.custom_generate, windfall.load))
    many = {"max_requests", "kv_memory", "weights"}  # of `submit`, `generate_batch` and loading
    assert {*theirs} - {*ours} == {"target", "device", "dtype", "trust_remote_code", "gpu_options", *many}
    assert all(ours[name].default == theirs[name].default for name in ours)


# ---- callbacks and streamers


def test_on_step_sees_every_step_as_it_happens() -> None:
    seen: list[Step] = []
    made = engine().generate(prompt(), on_step=seen.append, **GREEDY)
    assert len(seen) > 1 and [id(step) for step in seen] == [id(step) for step in made.steps]


def test_an_error_in_on_step_ends_the_text() -> None:
    calls = []

    def fail(step: Step) -> None:
        calls.append(step)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine().generate(prompt(), on_step=fail, **GREEDY)
    assert len(calls) == 1
    assert len(engine().generate(prompt(), **GREEDY).token_ids) == 40  # and the engine still works


def test_a_streamer_of_transformers_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = engine().target.tokenizer
    for skip in (True, False):
        made = engine().generate("abc", raw=True, streamer=TextStreamer(tokenizer, skip_prompt=skip), **GREEDY)
        assert capsys.readouterr().out == ("" if skip else "abc") + tokenizer.decode(made.token_ids) + "\n"


def test_a_streamer_ends_even_if_decoding_fails() -> None:
    class Streamer:
        ended = False

        def put(self, value: torch.Tensor) -> None:
            if value.dim() == 1:
                raise OSError("no room")

        def end(self) -> None:
            self.ended = True

    streamer = Streamer()
    with pytest.raises(OSError, match="no room"):
        engine().generate(prompt(), streamer=streamer, **GREEDY)
    assert streamer.ended


# ---- asyncio


def test_agenerate_and_astream_give_what_the_others_give() -> None:
    async def both() -> tuple[list[int], list[int]]:
        whole = await engine().agenerate(prompt(), temperature=1.0, seed=3, **GREEDY)
        steps = [step async for step in engine().astream(prompt(), temperature=1.0, seed=3, **GREEDY)]
        return whole.token_ids, [token for step in steps for token in step.tokens]

    wanted = engine().generate(prompt(), temperature=1.0, seed=3, **GREEDY).token_ids
    assert asyncio.run(both()) == (wanted, wanted)


def test_concurrent_calls_wait_for_each_other() -> None:
    """Tasks of one loop, a second engine on the same target, and another thread, all at once."""
    other = Engine(engine().target, registry.drafter("ngram"), registry.policy("none"))
    prompts = [prompt(seed=seed) for seed in range(6)]
    wanted = [engine().generate(each, **GREEDY).token_ids for each in prompts]

    async def stream(ids: list[int]) -> list[int]:
        return [token async for step in engine().astream(ids, **GREEDY) for token in step.tokens]

    async def whole(maker: Engine, ids: list[int]) -> list[int]:
        return (await maker.agenerate(ids, **GREEDY)).token_ids

    async def all_at_once() -> list[list[int]]:
        blocking = asyncio.to_thread(lambda: engine().generate(prompts[5], **GREEDY).token_ids)
        tasks = [whole(engine(), prompts[0]), stream(prompts[1]), whole(engine(), prompts[2])]
        return await asyncio.gather(*tasks, whole(other, prompts[3]), stream(prompts[4]), blocking)

    assert asyncio.run(all_at_once()) == wanted


def test_the_event_loop_is_free_meanwhile() -> None:
    """A step waits for the loop, which could not answer if it were blocked."""
    answered = threading.Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def ask(step: Step) -> None:
            loop.call_soon_threadsafe(answered.set)
            assert answered.wait(30)

        await engine().agenerate(prompt(), on_step=ask, max_new_tokens=2, eos=())

    asyncio.run(main())
    assert answered.is_set()


def test_a_cancelled_call_stops_at_its_next_step_and_a_waiting_one_never_starts() -> None:
    steps: list[Step] = []
    begun, go_on = threading.Event(), threading.Event()

    def watch(step: Step) -> None:
        steps.append(step)
        begun.set()
        assert go_on.wait(30)

    async def main() -> list[int]:
        first = asyncio.create_task(engine().agenerate(prompt(), on_step=watch, **GREEDY))
        second = asyncio.create_task(engine().agenerate(prompt(), on_step=steps.append, **GREEDY))
        await asyncio.to_thread(begun.wait, 30)
        for task in (second, first):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        go_on.set()
        return (await engine().agenerate(prompt(), **GREEDY)).token_ids

    assert asyncio.run(main()) == engine().generate(prompt(), **GREEDY).token_ids
    assert len(steps) == 1


def test_leaving_a_stream_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cycles, run = [], Engine.run
    seen = threading.Event()

    def watched(self: Engine, *given: Any) -> Any:
        for place, steps in enumerate(run(self, *given)):
            cycles.append(steps)
            yield steps
            assert place or seen.wait(30)  # the second cycle waits until the first was seen

    monkeypatch.setattr(Engine, "run", watched)

    async def main() -> None:
        stream = engine().astream(prompt(), **GREEDY)
        async for _ in stream:
            break
        closing = asyncio.ensure_future(stream.aclose())
        await asyncio.sleep(0)
        seen.set()
        await closing
        monkeypatch.undo()
        await engine().agenerate(prompt(), max_new_tokens=2)  # comes after it, in the same thread

    asyncio.run(main())
    assert 1 <= len(cycles) <= 2


def test_bad_input_is_refused_in_the_caller() -> None:
    async def stream() -> None:
        async for _ in engine().astream("", max_new_tokens=2):
            pass

    async def wrong() -> None:
        with pytest.raises(InputError, match="the prompt is empty"):
            await stream()
        with pytest.raises(InputError, match="there is no sampling option 'heat'"):
            await engine().agenerate(prompt(), heat=1)

    asyncio.run(wrong())
