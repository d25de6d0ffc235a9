"""Differences from plain decoding are found where they are, with the gap that they hung on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.cli import folder, refused, windfall
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.bench.inspect import audit as auditing
from windfall.bench.inspect.audit import Audit, Comparison, Divergence, Outcome
from windfall.bench.runner import Case
from windfall.bench.tasks import Prompt
from windfall.cli.audit import RESULT_KEYS
from windfall.core.stats import first_difference
from windfall.core.tree import DraftTree
from windfall.core.types import SamplingParams, Scores
from windfall.engine.dispatch import Dispatcher
from windfall.engine.engine import Engine
from windfall.engine.gpu.forward import Unsupported
from windfall.model.target import Target

__all__ = ["folder"]  # the fixture
LENGTH = 16


def engine(dtype: torch.dtype = torch.float32) -> Engine:
    policy = registry.policy("chain", depth=3)
    return Engine(Target(tiny(dtype=dtype)), registry.drafter("ngram", min_match=1), policy)


def cases(count: int = 5, **sampling: Any) -> list[Case]:
    params = SamplingParams(max_new_tokens=LENGTH, **sampling)
    return [Case(Prompt("letters", "", str(i), ()), prompt(5 + 2 * i, seed=i), params) for i in range(count)]


def swapped_at(place: int, score: Callable[..., list[Scores]]) -> Callable[..., list[Scores]]:
    """A target's scores with the two likeliest tokens exchanged wherever the token at this place is chosen."""

    def swap(self: Target, trees: list[DraftTree]) -> list[Scores]:
        lengths, found = list(self.decoder.lengths), score(self, trees)
        for tree, scores, length in zip(trees, found, lengths, strict=True):
            for node in torch.nonzero(length + tree.depth == place - 1).flatten().tolist():
                best = scores.logits[node].topk(2).indices
                scores.logits[node, best] = scores.logits[node, best.flip(0)].clone()
        return found

    return swap


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_in_float32_nothing_differs(temperature: float) -> None:
    work, told = Audit(engine(), batch=3), []
    work.run(cases(temperature=temperature, seed=4), told.append)
    found = work.speculative
    assert [each.id for each in found.outcomes] == list("01234")
    assert (found.diverging, found.tokens, found.token_rate, found.conversation_rate) == ([], 5 * LENGTH, 0, 0)
    assert work.exact and not work.exact_passes and not work.failed
    assert told == pytest.approx([done / 20 for done in range(1, 21)])
    assert len(work.batched.outcomes) == 5 and not work.batched.diverging
    assert len(work.others.outcomes) == (0 if temperature else 5) and not work.others.diverging


def test_a_flipped_choice_is_found_with_its_place_and_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    [case], place = cases(1), 9
    work = Audit(engine(), batch=1)
    flip = swapped_at(len(case.ids) + place, Target.score)
    monkeypatch.setattr(work.engine.target, "score", lambda trees: flip(work.engine.target, trees))
    work.run([case])
    [outcome] = work.speculative.diverging
    assert outcome.divergence is not None and work.failed
    found, plain = outcome.divergence, work.plain.decode([case.ids], [case.params])[0].token_ids
    assert (found.place, found.token, outcome.tokens) == (place, plain[place], place + 1)
    with torch.inference_mode():
        logits = work.reference.model(torch.tensor([case.ids + plain[:place]])).logits[0, -1]
    best, second = logits.topk(2).indices.tolist()
    assert (found.token, found.other) == (best, second)
    assert found.gap == pytest.approx(float(logits[best] - logits[second]), rel=1e-4)
    assert work.speculative.token_rate == 1 / (place + 1)


def test_at_temperature_above_0_the_noise_is_in_the_gap() -> None:
    params = SamplingParams(temperature=4.0, seed=6, max_new_tokens=1)
    target, committed = Target(tiny()), prompt(8)
    [made] = Engine(target, registry.drafter("ngram"), registry.policy("none")).decode([committed], [params])
    [drawn] = made.token_ids
    gaps = [auditing.logit_gap(target, committed, drawn, other, params) for other in range(target.vocab_size)]
    assert min(gaps) == gaps[drawn] == 0  # nothing beats the draw
    greedy = SamplingParams(max_new_tokens=1)
    likeliest = [auditing.logit_gap(target, committed, drawn, other, greedy) for other in range(target.vocab_size)]
    assert min(likeliest) < 0  # the noise has decided here, not the logits


def test_in_bfloat16_a_difference_is_reported_but_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Audit(engine(torch.bfloat16), batch=1)
    flip = swapped_at(len(prompt(5)) + 2, Target.score)
    monkeypatch.setattr(work.engine.target, "score", lambda trees: flip(work.engine.target, trees))
    work.run(cases(1))
    assert work.speculative.diverging and not work.failed


def test_differences_of_batched_generate_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = auditing.hf_generate

    def changed(target: Target, asked: list[list[int]], params: SamplingParams) -> list[list[int]]:
        answers = whole(target, asked, params)
        if len(asked) > 1:
            answers[1][4] += 1 if answers[1][4] == 0 else -1
        return answers

    monkeypatch.setattr(auditing, "hf_generate", changed)
    work = Audit(engine(), batch=2)
    work.run(cases(3))
    [found] = work.batched.diverging
    assert len(work.batched.outcomes) == 2  # the third was alone in its batch
    assert (found.id, found.divergence and found.divergence.place) == ("1", 4)
    assert work.batched.median_gap == work.batched.largest_gap is not None
    assert not work.speculative.diverging and not work.failed


def test_generate_stops_at_the_same_end_of_text() -> None:
    work = Audit(engine(), batch=3)
    answers = [work.plain.decode([case.ids], [case.params])[0].token_ids for case in cases(3)]
    own = work.reference.model.generation_config
    own.do_sample, own.repetition_penalty = True, 3.0  # would change every text
    ends = cases(3, eos=(answers[0][7], answers[1][11]))
    work.run(ends)
    assert work.others.outcomes[0].tokens <= 8 and not work.others.diverging
    assert work.reference.model.generation_config is own


def test_rates_and_gaps_by_hand() -> None:
    gaps = [0.5, None, -0.25, 2.0]
    outcomes = [Outcome("t", str(i), 10, Divergence(9, 1, 2, gap)) for i, gap in enumerate(gaps)]
    found = Comparison("x", [*outcomes, Outcome("t", "same", 60, None)])
    told = found.as_dict()
    assert (told["conversations"], told["diverging"], told["conversation_rate"]) == (5, 4, 0.8)
    assert (told["tokens"], told["token_rate"]) == (100, 0.04)
    assert told["gap"] == {"median": 0.5, "max": 2.0}
    assert Comparison("empty").as_dict()["token_rate"] is None
    differing = [([1, 2], [1, 2]), ([1, 2], [1, 3]), ([1], [1, 2]), ([], [4])]
    assert [first_difference(*pair) for pair in differing] == [None, 1, 1, 0]


# ---- the command


def tasks(place: Path) -> Path:
    rows = [{"id": str(i), "turns": ["abc " * (i + 1)]} for i in range(3)] + [{"id": "raw", "text": "xyz xyz"}]
    file = place / "letters.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def flags(folder: Path, place: Path) -> list[object]:
    model = ["--target", folder, "--drafter", "ngram", "--policy", "chain", "--device", "cpu"]
    return ["audit", *model, "--tasks", tasks(place), "--max-new-tokens", "12", "--ignore-eos", "--batch", "2"]


def test_the_command_prints_and_saves_all_figures(folder: Path, tmp_path: Path) -> None:
    result = windfall(*flags(folder, tmp_path), "--json", "--out", tmp_path / "new" / "audit.json")
    told = json.loads(result.stdout)
    assert result.exit_code == 0 and told == json.loads((tmp_path / "new" / "audit.json").read_text())
    assert {*RESULT_KEYS} <= {*told}  # so that the next audit may replace the file
    assert told["finished"] and told["exact"] and not told["failed"]
    assert [each["conversations"] for each in told["comparisons"]] == [4, 4, 4]
    assert told["comparisons"][0]["tokens"] == 48
    assert told["provenance"]["target"]["name"] == "tiny" and str(tmp_path) not in result.stdout
    shown = windfall(*flags(folder, tmp_path), "--limit", "2")
    assert "Same text as plain decoding in all 2 conversations" in shown.stdout
    assert "chain vs plain" in shown.stdout and "HF batch of 2 vs single" in shown.stdout


@pytest.fixture
def on_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines on a CPU decode as on a GPU."""
    monkeypatch.setattr(Dispatcher, "wants_graphs", property(lambda self: True))


@pytest.mark.usefixtures("on_buffers")
@pytest.mark.parametrize(
    ("flags_of_passes", "dtype", "says"),
    [
        ([], "bfloat16", "Passes were exact: every text must equal plain decoding"),
        ([], "float32", "Passes were exact: every text must equal plain decoding"),
        (["--fast"], "bfloat16", "Passes were not exact: in bfloat16 a text may differ where two tokens are almost"),
        (["--fast"], "float32", "Passes were not exact, but in float32 every text must equal plain decoding"),
    ],
)
def test_the_report_says_whether_passes_were_exact(
    folder: Path, tmp_path: Path, flags_of_passes: list[str], dtype: str, says: str
) -> None:
    out = tmp_path / "audit.json"
    given = [*flags(folder, tmp_path), "--dtype", dtype, *flags_of_passes, "--batch", "1", "--out", out]
    shown, told = windfall(*given), json.loads(out.read_text())
    assert says in " ".join(shown.stdout.split())
    assert told["exact_passes"] is told["provenance"]["target"]["exact"] is (not flags_of_passes)
    assert told["exact"] is (not flags_of_passes or dtype == "float32")
    [found] = told["comparisons"]
    assert f"{found['diverging']} of {found['tokens']} compared tokens differ" in shown.stdout


@pytest.mark.usefixtures("on_buffers")
def test_a_difference_is_a_failure_with_exact_passes() -> None:
    work = Audit(engine(torch.bfloat16), batch=1)
    work.speculative.outcomes.append(Outcome("t", "0", 3, Divergence(2, 1, 2, 0.0)))
    assert work.exact_passes and work.failed


@pytest.mark.usefixtures("on_buffers")
def test_the_command_says_once_why_passes_are_not_exact(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both engines of an audit warn, but only one note is printed."""

    def unsupported(model: Any) -> Any:
        raise Unsupported("its layers are odd")

    monkeypatch.setattr("windfall.engine.gpu.target.exact_forward", unsupported)
    result = windfall(*flags(folder, tmp_path), "--dtype", "bfloat16", "--batch", "1")
    assert result.exit_code == 0 and result.stderr.count("does not run in exact passes (its layers are odd)") == 1
    assert "Passes were not exact" in result.stdout


def test_the_command_fails_if_a_text_differs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip, honest = swapped_at(14, Target.score), Target.score
    init = Audit.__init__

    def perturbed(self: Audit, *given: Any) -> None:
        init(self, *given)
        reference = self.reference
        monkeypatch.setattr(Target, "score", lambda own, trees: (honest if own is reference else flip)(own, trees))

    monkeypatch.setattr(Audit, "__init__", perturbed)
    result = windfall(*flags(folder, tmp_path))
    assert result.exit_code == 1
    assert "conversations differ from plain decoding" in result.stdout and "logit gap" in result.stdout
    assert "FAILED: in float32 every text must equal plain decoding" in result.stdout
    coarse = windfall(*flags(folder, tmp_path), "--dtype", "bfloat16")
    assert coarse.exit_code == 0 and "FAILED" not in coarse.stdout


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Somebody who stops an audit at its sixth text, or at another that is put in here."""
    decode, calls, last = Engine.decode, [], [6]

    def stopping(self: Engine, *given: Any) -> Any:
        calls.append(1)
        if len(calls) == last[0]:
            raise KeyboardInterrupt
        return decode(self, *given)

    monkeypatch.setattr(Engine, "decode", stopping)
    return last


def test_an_audit_without_a_finished_text_writes_nothing(folder: Path, tmp_path: Path, impatient: list[int]) -> None:
    impatient[0] = 1
    result = windfall(*flags(folder, tmp_path), "--out", tmp_path / "audit.json")
    assert result.exit_code == 130 and "stopped; 0 of 4 conversations are finished" in result.stderr
    assert result.stdout == "" and not (tmp_path / "audit.json").exists()


def test_an_interrupted_audit_shows_what_is_finished(folder: Path, tmp_path: Path, impatient: list[int]) -> None:
    result = windfall(*flags(folder, tmp_path), "--out", tmp_path / "audit.json")
    assert result.exit_code == 130 and "stopped; 2 of 4 conversations are finished" in result.stderr
    told = json.loads((tmp_path / "audit.json").read_text())
    assert not told["finished"] and told["comparisons"][0]["conversations"] == 2


def test_wrong_input_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    assert "there is no task 'nothing'" in refused("audit", "--tasks", "nothing")
    assert "no prompt fits" in refused(*flags(folder, tmp_path), "--max-new-tokens", "400")
