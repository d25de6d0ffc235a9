"""Texts of a batch are those of single requests, in any company, with pages that are shared and given back."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.cli import character_tokenizer
from helpers.fused import model
from helpers.gpu import LENGTH, LONG, PRECISE, engine
from helpers.tiny import prompt
from windfall.core.types import GpuOptions, SamplingParams
from windfall.engine.engine import Engine
from windfall.engine.gpu.batch.drafters import drafter_forward
from windfall.engine.gpu.batch.paged_cache import PagedCache
from windfall.engine.gpu.batch.prefill import MAX_WAITS, SHARED_ROWS
from windfall.engine.gpu.batch.round import MAX_ROUND_ROWS
from windfall.engine.gpu.batch.runner import GpuBatchRunner, Limits
from windfall.engine.gpu.batch.target import Kind
from windfall.engine.gpu.drafters import drafter_form
from windfall.engine.gpu.graphs import GraphCache
from windfall.engine.gpu.target import GpuTarget
from windfall.engine.sequence import Sequence
from windfall.model.target import Target
from windfall.policies.base import TreePolicy
from windfall.policies.budget import Budget, Load, Sizes

SMALL = Limits(seats=4, pages=40, longest=256, passes=3, width=3, k=3)
TREES = Sizes(passes=3, width=3, k=3, rows=24)
PLAIN = Sizes(passes=0, width=1, k=1, rows=0)


class Always(Budget):
    """The same sizes in every round."""

    def __init__(self, given: Sizes):
        self.given = given

    def sizes(self, load: Load) -> Sizes:
        return self.given


class Given(TreePolicy):
    """A policy with this budget."""

    def __init__(self, budget: Budget):
        self._budget = budget

    def budget(self) -> Budget:
        return self._budget


class Batch:
    """A runner of an engine's models."""

    def __init__(self, made: Engine, sizes: Sizes, limits: Limits = SMALL, exact: bool = True):
        self.engine = made
        options = GpuOptions(False, exact=exact)
        gpu_target = GpuTarget(made.target.model, made.drafter.taps, GraphCache(made.target.device), options)
        form = drafter_form(made.drafter, made.target.device)
        assert not isinstance(form, str)
        policy = Given(Always(sizes))
        cache = PagedCache(gpu_target, limits.pages, MAX_ROUND_ROWS)
        given = cache, form, drafter_forward(form), policy, policy.budget(), made.online_costs, limits
        self.runner = GpuBatchRunner(*given)

    def text(self, tokens: list[int], **sampling: Any) -> Sequence:
        params = SamplingParams(**{"max_new_tokens": LENGTH, "eos": (), **sampling}).seeded()
        made = self.engine
        return Sequence(tokens, params, made.policy.fresh(), made.target, made.coupled, made.calibrators)

    def run(self, *arrivals: list[Sequence]) -> None:
        """Run until all texts have ended; a further list of texts joins after each round."""
        waiting = list(arrivals)
        while waiting or self.runner.busy:
            if waiting:
                self.runner.join(waiting.pop(0))
            self.runner.round()
            self.runner.leave([text for text in self.runner.texts if text.finish])


@pytest.mark.parametrize(
    ("kind", "sizes", "sampling"),
    [
        ("eagle3", TREES, {}),
        ("eagle3", TREES, {"temperature": 1.0, "seed": 3}),
        ("eagle", TREES, {"temperature": 1.0, "seed": 3}),
        ("lm", TREES, {}),
        ("lm", TREES, {"temperature": 1.0, "seed": 3}),
        ("eagle3", PLAIN, {"temperature": 1.0, "seed": 3}),
        ("lm", PLAIN, {}),
    ],
)
def test_the_texts_are_those_of_single_requests(kind: str, sizes: Sizes, sampling: dict[str, Any]) -> None:
    made = engine("llama", kind, "beam", graphs=False)
    batch = Batch(made, sizes)
    texts = [batch.text(prompt(length, seed=length), **sampling) for length in (9, 2, 70, 33)]
    batch.run(texts[:2], [], texts[2:3], texts[3:])
    for text in texts:
        asked = text.tokens[: len(text.tokens) - LENGTH]
        assert made.generate(asked, max_new_tokens=LENGTH, eos=(), **sampling).token_ids == text.tokens[len(asked) :]
    assert batch.runner.pool.available == SMALL.pages - 1


@pytest.mark.parametrize(("kind", "sizes"), [("eagle3", TREES), ("lm", TREES), ("eagle3", PLAIN)])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_prompts_share_verify_passes(family: str, kind: str, sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of texts that join while others run, unless they are long; the texts stay the same."""
    made = engine(family, kind, "beam", graphs=False)
    batch, rows = Batch(made, sizes), list[int]()
    score = batch.runner.target.score
    monkeypatch.setattr(batch.runner.target, "score", lambda *given: rows.append(given[3]) or score(*given))
    texts = [batch.text(prompt(length, seed=length)) for length in (40, 9, 130, 2)]
    batch.run(texts[:1], [], texts[1:3], texts[3:])
    assert [count for count in rows if count] == [128, 128]  # 8 + 120 of 129 tokens, and the rest with 1
    for text, length in zip(texts, (40, 9, 130, 2), strict=True):
        alone = made.generate(prompt(length, seed=length), max_new_tokens=LENGTH, eos=())
        assert alone.token_ids == text.tokens[length:]


@pytest.mark.parametrize("name", ["qwen3-moe", "olmo2", "cohere2", "granite", "starcoder2"])
def test_families(name: str) -> None:
    """One of each kind of norms, rotations, residuals and MLPs; prompts are longer than windows."""
    made = engine("llama", "lm", "beam", graphs=False, target=Target(model(name, PRECISE), character_tokenizer()))
    batch = Batch(made, TREES)
    texts = [batch.text(prompt(length, seed=length), max_new_tokens=6) for length in (9, 40)]
    batch.run(texts[:1], [], texts[1:])
    for text, length in zip(texts, (9, 40), strict=True):
        alone = made.generate(prompt(length, seed=length), max_new_tokens=6, eos=())
        assert alone.token_ids == text.tokens[length:]


def test_use_is_that_of_pages_and_of_the_shared_budget() -> None:
    batch = Batch(engine("llama", "eagle3", "beam", graphs=False), TREES)
    assert batch.runner.use == (0, None)
    texts = [batch.text(prompt(length, seed=length)) for length in (9, 70)]
    batch.runner.join(texts)
    while not batch.runner.round():
        pass
    held = sum(len(batch.runner._pages[text]) for text in texts)
    assert batch.runner.use.memory == pytest.approx(held / (SMALL.pages - 1))
    assert batch.runner.use.budget == TREES
    batch.run()
    assert batch.runner.use.memory == 0


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_a_perfect_drafter_is_always_right(sampling: dict[str, Any]) -> None:
    batch = Batch(engine("llama", "itself", "beam", graphs=False), TREES._replace(rows=72))
    texts = [batch.text(prompt(length, seed=length), max_new_tokens=LONG, **sampling) for length in (9, 40, 65)]
    batch.runner.join(texts)
    for _ in range(4):
        steps = batch.runner.round()
        assert [len(steps[text].tokens) for text in texts] == [TREES.passes + 1] * 3


@pytest.mark.parametrize("kind", ["itself", "eagle3"])
def test_drafting_pauses_and_goes_on(kind: str) -> None:
    """While nothing is drafted, tokens wait for the drafter, more of them than it can take in at once."""
    made = engine("llama", kind, "beam", graphs=False)
    batch = Batch(made, TREES._replace(rows=72))
    budget = batch.runner.budget
    assert isinstance(budget, Always)
    texts = [batch.text(prompt(length, seed=length), max_new_tokens=64) for length in (9, 40)]
    batch.runner.join(texts)
    for number in range(48):
        budget.given = TREES._replace(rows=72) if number < 2 or number >= 41 else PLAIN
        steps = batch.runner.round()
        for step in steps.values() if kind == "itself" else ():
            assert step.finish or len(step.tokens) == (4 if step.draft_passes else 1)
        batch.runner.leave([text for text in batch.runner.texts if text.finish])
    for text, length in zip(texts, (9, 40), strict=True):
        alone = made.generate(prompt(length, seed=length), max_new_tokens=64, eos=()).token_ids
        assert text.tokens[length:] == alone[: len(text.tokens) - length]


def test_each_request_has_its_own_sampling() -> None:
    made = engine("llama", "itself", "beam", graphs=False)
    batch = Batch(made, TREES)
    samplings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7, "seed": 5},
        {"temperature": 1.2, "seed": 6, "top_p": 0.8, "top_k": 9},
        {"temperature": 1.0, "seed": 7, "min_p": 0.2},
    ]
    texts = [batch.text(prompt(20 + place), **sampling) for place, sampling in enumerate(samplings)]
    batch.run(texts)
    for place, (text, sampling) in enumerate(zip(texts, samplings, strict=True)):
        alone = made.generate(prompt(20 + place), max_new_tokens=LENGTH, eos=(), **sampling)
        assert alone.token_ids == text.tokens[20 + place :]


def test_a_known_beginning_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine("llama", "eagle3", "beam", graphs=False)
    batch, tokens = Batch(made, TREES), prompt(150)
    first, second = batch.text(tokens), batch.text([*tokens[:140], 5, 6, 7])
    batch.run([first])
    rows, prefill = [], batch.runner.target.prefill
    monkeypatch.setattr(batch.runner.target, "prefill", lambda chunk: rows.append(chunk.rows) or prefill(chunk))
    batch.run([second])
    assert rows == [142 - 127]  # of 143 tokens two pages are known; the last token is left to the first round
    assert made.generate([*tokens[:140], 5, 6, 7], max_new_tokens=LENGTH, eos=()).token_ids == second.tokens[143:]


@pytest.mark.parametrize("at_once", [False, True])
def test_a_text_is_removed_and_goes_on_later(at_once: bool) -> None:
    """If it comes back at once, rounds of its first stay are still in flight."""
    made = engine("llama", "eagle3", "beam", graphs=False)
    batch = Batch(made, TREES)
    texts = [batch.text(prompt(length, seed=length), temperature=1.0, seed=1) for length in (9, 40, 65)]
    batch.runner.join(texts)
    for _ in range(3):
        batch.runner.round()
    batch.runner.leave(texts[:1])
    if not at_once:
        batch.runner.round()
    batch.run(texts[:1])
    for text, length in zip(texts, (9, 40, 65), strict=True):
        alone = made.generate(prompt(length, seed=length), max_new_tokens=LENGTH, eos=(), temperature=1.0, seed=1)
        assert alone.token_ids == text.tokens[length:]
    assert batch.runner.pool.available == SMALL.pages - 1


def test_pages_are_granted_early_and_taken_back_when_others_need_them() -> None:
    """While more than half of the pages are free, a text gets those for its end at once; later, what it needs."""
    made = engine("llama", "eagle3", "beam", graphs=False)
    batch = Batch(made, TREES, SMALL._replace(pages=7))
    texts = [batch.text(prompt(length, seed=length), max_new_tokens=150) for length in (9, 100, 101)]
    batch.runner.join(texts[:1])
    batch.runner.round()
    held = batch.runner._pages[texts[0]]
    assert len(held) == batch.runner._needed(texts[0].end) == 3 > batch.runner._needed(len(texts[0].tokens))
    batch.runner.join(texts[1:2])
    assert len(held) == 3 and len(batch.runner._pages[texts[1]]) == 2 and batch.runner.pool.free == 1
    batch.runner.join(texts[2:])
    assert len(held) == batch.runner._needed(len(texts[0].tokens)) == 1 and batch.runner.pool.free == 1
    batch.runner.leave(texts[1:])
    while len(held) == 1:  # until it needs the second page
        batch.runner.round()
    tokens = texts[0].tokens[9:]
    assert made.generate(prompt(9, seed=9), max_new_tokens=len(tokens), eos=()).token_ids == tokens
    batch.runner.leave(texts[:1])
    assert batch.runner.pool.available == 6


@pytest.mark.parametrize(("pages", "rounds"), [(40, True), (7, False)])
def test_a_runner_has_room_only_if_its_texts_fit(pages: int, rounds: bool) -> None:
    """With few pages, it must be asked with the lengths of the texts in some rounds."""
    batch = Batch(engine("llama", "eagle3", "beam", graphs=False), TREES, SMALL._replace(pages=pages))
    texts, found = [batch.text(prompt(length, seed=length), max_new_tokens=80) for length in (9, 70)], set[bool]()
    batch.runner.join(texts)
    while all(len(text.tokens) < text.end - 40 for text in texts):
        batch.runner.round()
        found.add(batch.runner.has_room)
        assert not batch.runner.has_room or batch.runner.fits({text: len(text.tokens) for text in texts})
    assert (False not in found) == rounds and True in found


def test_the_kind_of_a_round_is_that_of_the_texts_that_run() -> None:
    batch = Batch(engine("llama", "eagle3", "beam", graphs=False), TREES)
    greedy, drawn = batch.text(prompt(9)), batch.text(prompt(12), temperature=1.0, seed=1, top_p=0.9)
    batch.runner.join([greedy, drawn])
    batch.runner.prefill_all()
    assert batch.runner._graphs(2)._kind == Kind(greedy=False, coupled=True, filtered=True)
    batch.runner.leave([drawn])
    assert batch.runner._graphs(1)._kind == Kind()
    batch.runner.leave([greedy])


def test_a_text_that_waits_for_its_prefill_is_drafted_with_its_own_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(engine("llama", "eagle3", "beam", graphs=False), TREES)
    texts = [batch.text(prompt(length, seed=length), max_new_tokens=LONG) for length in (9, 120)]
    texts[0].calibrator.weights[0] = 0.75
    batch.runner.learns, take = False, batch.runner.prefill.prompts.take
    monkeypatch.setattr(batch.runner.prefill.prompts, "take", lambda most=16: take(16))
    batch.runner.join(texts)
    while len(batch.runner.texts) < 2:
        batch.runner.round()
    batch.runner.round()
    assert batch.runner.state.settings.host["weights"][:2, 0].tolist() == [0.75, 0.75]


def test_a_text_that_leaves_early_is_forgotten() -> None:
    """Also one that still waits for its prefill, or whose settings were not sent."""
    batch = Batch(engine("llama", "eagle3", "beam", graphs=False), TREES, SMALL._replace(longest=4096, pages=80))
    long, short = batch.text(prompt(2200)), batch.text(prompt(9))
    batch.runner.join([short, long])
    batch.runner.round()
    assert batch.runner.state.span > 32
    batch.runner.leave([long])
    assert batch.runner.state.span == 32
    batch.run()
    assert not batch.runner._changed and not batch.runner.prefill.started


def test_a_round_reports_the_passes_over_prompts_before_it() -> None:
    """Also the drafter's part of those that shared the verify pass of the round before."""
    batch = Batch(engine("llama", "eagle3", "beam", graphs=False), TREES)
    texts = [batch.text(prompt(length, seed=length), max_new_tokens=LONG) for length in (40, 9)]
    batch.runner.join(texts[:1])
    found = [batch.runner.round()]
    batch.runner.join(texts[1:])
    found += [batch.runner.round() for _ in range(4 + MAX_WAITS)]
    seconds = [next(iter(each.values())).seconds for each in found if each]  # type: ignore[union-attr]
    later = next(place for place, each in enumerate(found) if texts[1] in each)
    assert [each.prompts > 0 for each in seconds] == [place in (0, later) for place in range(len(found))]
    assert all(each.passes == each.draft + each.verify + each.prompts for each in seconds)


def test_few_rows_of_prompts_wait_for_others_if_that_saves_time() -> None:
    batch = Batch(engine("llama", "eagle3", "beam", graphs=False), TREES)
    prefill = batch.runner.prefill
    batch.runner.join([batch.text(prompt(9))])
    dear, cheap = (lambda rows: float(rows)), (lambda rows: 1.0 + rows / 1000)
    assert not prefill._waits_for_more(TREES, 1, cheap)
    waits = [prefill._waits_for_more(TREES, 64, dear) for _ in range(MAX_WAITS + 1)]
    assert waits == [True] * MAX_WAITS + [False]
    assert prefill._waits_for_more(TREES, 64, dear) and not prefill._waits_for_more(TREES, 2, cheap)
    batch.runner.join([batch.text(prompt(SHARED_ROWS + 9))])
    assert not prefill._waits_for_more(TREES, 64, dear)  # they fill the shared rows


def test_a_prompt_without_rows_does_not_wait() -> None:
    batch = Batch(engine("llama", "eagle3", "beam", graphs=False), TREES)
    batch.runner.join([batch.text(prompt(1))])
    assert not batch.runner.prefill.prompts.left
    assert not batch.runner.prefill._waits_for_more(TREES, 64, float)


def test_sizes_are_not_prepared_for_texts_that_have_left() -> None:
    batch = Batch(engine("llama", "eagle3", "beam", graphs=False), TREES)
    text = batch.text(prompt(9))
    batch.runner.join([text])
    batch.runner.round()
    prepared = batch.runner._prepare_sizes()
    batch.runner.leave([text])
    assert list(prepared) == []
