"""benchmarks/peers.py and peers_vllm.py: every way answers the same prompts, and one table compares them."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections import deque
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from helpers.bundled_heads import bundle_a_head
from helpers.cli import character_tokenizer, folder
from helpers.gguf import SHAPE, write_gguf
from helpers.tiny import tiny
from windfall.drafters.feature_head import FeatureHeadDrafter

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import peers  # noqa: E402
import peers_vllm  # noqa: E402
import table_renderers as renderers  # noqa: E402

__all__ = ["folder"]  # the fixture
TOKENS = 4


@pytest.fixture
def arguments(folder: Path, tmp_path: Path) -> list[str]:
    asked = ["--methods", "none,chain", "--requests", "1,2", "--limit", "4", "--alone", "3"]
    models = ["--target", str(folder), "--drafter", "ngram", "--tokens", str(TOKENS), "--device", "cpu", "--ignore-eos"]
    return ["peers.py", "builtin", *models, *asked, "--json", str(tmp_path / "peers.json")]


def run(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", arguments)
    peers.main()


def measured_here(way: str, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(peers.measure(argparse.Namespace(**{**vars(options), "way": way}))))
    return found


# ---- vLLM


class Engine:
    """Answers each request with its prompt's last token, after as many steps as this token says."""

    def __init__(self) -> None:
        self.running: dict[str, deque[int]] = {}
        self.most = 0

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        assert name not in self.running
        last = prompt["prompt_token_ids"][-1]
        self.running[name] = deque([last] * (1 + last % 3))
        self.most = max(self.most, len(self.running))

    def step(self) -> list[Any]:
        found = []
        for name, left in list(self.running.items()):
            token = left.popleft()
            if not left:
                del self.running[name]
            found.append(
                SimpleNamespace(finished=not left, request_id=name, outputs=[SimpleNamespace(token_ids=[token])])
            )
        return found


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A module in place of vLLM; returns what LLM was made with, and its engine."""
    made: dict[str, Any] = {}

    def llm(**given: Any) -> Any:
        made.update(given, engine=Engine())
        return SimpleNamespace(llm_engine=made["engine"])

    named = {"": {"LLM": llm, "SamplingParams": lambda **given: made.update(params=given)}}
    named[".platforms"] = {"current_platform": SimpleNamespace(get_device_name=lambda: "NVIDIA H200")}
    named[".sampling_params"] = {"RequestOutputKind": SimpleNamespace(FINAL_ONLY="final")}
    for name, members in named.items():
        module = ModuleType(f"vllm{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(peers_vllm.importlib.metadata, "version", lambda name: f"{name} 1.0")
    return made


def settings(folder: Path, **given: Any) -> argparse.Namespace:
    """The options of a process that measures vLLM."""
    defaults = {"model": None, "dtype": "float32", "kv_memory": 2, "setting": "plain", "head": None}
    return argparse.Namespace(**{**defaults, "lock": str(folder / "lock"), **given})


def test_prompts_of_vllm_are_answered_in_their_order(vllm: dict[str, Any], tmp_path: Path) -> None:
    ids = [[1, n] for n in range(7)]
    asked = {"ids": ids, "alone": 2, "tokens": 9, "temperature": 0.0, "eos": [5], "requests": [1, 2], "rounds": 2}
    result = peers_vllm.measure(settings(tmp_path, model="folder", setting="eagle3-3", head="head"), asked)
    assert [(row["requests"], len(row["texts"])) for row in result["rows"]] == [(1, 3), (2, 6)]
    assert result["rows"][1]["texts"] == [peers_vllm.hash_of([last]) for _, last in ids[:6]]
    assert vllm["engine"].most == 2 and vllm["max_num_seqs"] == 2 and vllm["model"] == "folder"
    assert vllm["speculative_config"] == {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}
    assert vllm["params"]["stop_token_ids"] == [5] and vllm["params"]["output_kind"] == "final"
    assert (result["gpu"], result["versions"]["vllm"]) == ("NVIDIA H200", "vllm 1.0")
    assert vllm["kv_cache_memory_bytes"] == 2_000_000_000


def test_settings_of_vllm_measure_one_after_the_other(tmp_path: Path) -> None:
    order: list[str] = []

    def measure() -> None:
        with peers_vllm.locked(str(tmp_path / "lock")):
            order.append("second")

    with peers_vllm.locked(str(tmp_path / "lock")):
        other = threading.Thread(target=measure)
        other.start()
        other.join(0.1)
        order.append("first")
    other.join()
    assert order == ["first", "second"]


def test_short_runs_are_repeated() -> None:
    assert len(peers_vllm.repeated(lambda: 0.01, float, 5)) == 5
    assert len(peers_vllm.repeated(lambda: peers_vllm.ENOUGH_SECONDS / 1.5, float, 5)) == 2
    assert len(peers_vllm.repeated(lambda: 60.0, float, 5)) == 1


def test_settings_of_vllm() -> None:
    assert peers_vllm.speculation("plain", None) == {}
    config = peers_vllm.speculation("ngram-5", None)["speculative_config"]
    assert (config["method"], config["num_speculative_tokens"]) == ("ngram", 5)


def test_a_setting_of_vllm_that_fails_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, out = tmp_path / "prompts.json", tmp_path / "vllm.json"
    asked.write_text(json.dumps({"prompts": "abc"}))
    monkeypatch.setattr(sys, "argv", ["peers_vllm.py", str(asked), "--settings", "plain,eagle3-3", "--json", str(out)])
    monkeypatch.setattr(peers_vllm, "__file__", str(tmp_path / "missing.py"))  # the process cannot start
    peers_vllm.main()
    result = json.loads(out.read_text())
    assert [each["way"] for each in result["skipped"]] == ["plain", "eagle3-3"] and result["prompts"] == "abc"
    assert "missing.py" in result["skipped"][0]["reason"] and result["skipped"][1]["reason"] == "no head was given"


# ---- all ways


def test_all_ways_answer_the_same_prompts(
    arguments: list[str], vllm: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, theirs = tmp_path / "prompts.json", tmp_path / "vllm.json"
    run(monkeypatch, [*arguments, "--write-prompts", str(prompts)])
    asked = json.loads(prompts.read_text())
    measured = {
        **peers_vllm.measure(settings(tmp_path), asked),
        "skipped": [],
        "prompts": asked["prompts"],
        "date": "2026-11-18",
    }
    theirs.write_text(json.dumps(measured))
    monkeypatch.setattr(peers, "in_own_process", measured_here)
    run(monkeypatch, [*arguments, "--vllm", str(theirs)])
    result = json.loads((tmp_path / "peers.json").read_text())
    found = {(row["engine"], row["way"], row["requests"]): row for row in result["rows"]}
    ours = [("windfall", way, count) for way in ("none", "chain") for count in (1, 2)]
    one = [("transformers", way, 1) for way in ("generate", "prompt lookup")]
    assert {*found} == {*ours, *one, ("transformers", "generate", 2), ("vLLM", "plain", 1), ("vLLM", "plain", 2)}
    for name, row in found.items():
        assert row["texts"] == (3 if name[2] == 1 else 4)
        if name[0] != "vLLM":
            assert row["same_texts"] == row["texts"] and row["tokens"] == TOKENS * row["texts"]
    assert {(each["way"], each["requests"]) for each in result["skipped"]} == {
        *(("assisted", 1), ("assisted", 2), ("prompt lookup", 2), ("generate_batch", 1), ("generate_batch", 2)),
    }
    lines, about = renderers.peers({"peers": result})
    assert "| windfall, `chain` | " in "\n".join(lines) and "For vLLM: measured on one NVIDIA H200" in about
    with pytest.raises(SystemExit, match="was measured on other prompts or with other settings"):
        run(monkeypatch, [*arguments, "--tokens", "5", "--vllm", str(theirs)])


def test_vllm_reads_the_converted_model_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, prompts = tmp_path / "tiny.gguf", tmp_path / "prompts.json"
    write_gguf(file, tiny(**{**SHAPE, "intermediate_size": 64}), lambda name: "F32" if "norm" in name else "Q8_0")
    run(
        monkeypatch,
        [
            "peers.py",
            "builtin",
            "--limit",
            "9",
            "--tokens",
            "4",
            "--target",
            str(file),
            "--write-prompts",
            str(prompts),
        ],
    )
    model = Path(json.loads(prompts.read_text())["model"])
    assert (model / "config.json").is_file() and list(model.glob("*.safetensors"))


def test_without_a_drafter_the_bundled_head_of_the_target_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, load, engines = bundle_a_head(tmp_path / "bundled", monkeypatch), peers.windfall.load, list[Any]()

    def kept(*given: Any, **named: Any) -> Any:
        engines.append(load(*given, **named))
        return engines[-1]

    monkeypatch.setattr(peers.windfall, "load", kept)
    model.save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    asked = ["--target", str(tmp_path / "model"), "--way", "windfall/chain", "--device", "cpu"]
    asked += ["--requests", "1", "--limit", "1", "--tokens", str(TOKENS), "--ignore-eos"]
    monkeypatch.setattr(sys, "argv", ["peers.py", "builtin", *asked])
    assert [row["way"] for row in peers.measure(peers.parsed())["rows"]] == ["chain"]
    assert isinstance(engines[0].drafter, FeatureHeadDrafter)


def test_a_way_that_fails_has_a_reason_and_a_finished_one_is_kept(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [*arguments, "--resume"])
    monkeypatch.setattr(peers, "__file__", str(tmp_path / "missing.py"))
    parts = tmp_path / "peers.json.parts"
    parts.mkdir()
    (parts / "windfall-none.json").write_text(json.dumps({"rows": [], "skipped": [], "target": "kept"}))
    options = peers.parsed()
    assert peers.in_own_process("windfall/none", options)["target"] == "kept"
    [skipped] = peers.in_own_process("transformers/prompt lookup", options)["skipped"]
    assert (skipped["engine"], skipped["way"]) == ("transformers", "prompt lookup")
    assert "missing.py" in skipped["reason"]


# ---- the table


def row(engine: str, way: str, requests: int, speed: float, same: int | None = 4) -> dict[str, Any]:
    about = {"engine": engine, "way": way, "requests": requests, "version": "1"}
    return {**about, "tokens_per_second": speed, "texts": 4, "same_texts": same}


def test_the_table_names_what_is_faster_than_auto() -> None:
    rows = [
        *(row("windfall", "none", 1, 100.0), row("windfall", "auto", 1, 250.0)),
        *(row("windfall", "none", 64, 1100.0), row("windfall", "auto", 64, 1000.0)),
        *(row("transformers", "generate", 1, 20.0, 3), row("vLLM", "eagle3-5", 64, 1250.0, 2)),
    ]
    settings = {"tasks": ["a", "b"], "alone": 12, "tokens": 128, "temperature": 0.0, "rounds": 5, "ignore_eos": False}
    late, reason = {"engine": "vLLM", "way": "plain", "requests": None, "reason": "no."}, "it takes one request at once"
    assisted = {"engine": "transformers", "way": "assisted", "reason": reason}
    skipped = [*({**assisted, "requests": count} for count in (8, 64)), late]
    result = {"rows": rows, "skipped": skipped, "settings": {**settings, "assistant": "small"}}
    lines, about = renderers.peers({"peers": {**result, "target": "model", "dtype": "bfloat16"}})
    assert lines == [
        "*model, bfloat16:*",
        "",
        "| tokens/s by requests | 1 | 64 |",
        "|---|---:|---:|",
        "| transformers, `generate` | 20.0 | |",
        "| vLLM, EAGLE-3 with windfall's head, 5 tokens | | 1,250 |",
        "| windfall, `none` | 100 | 1,100 |",
        "| windfall, `auto` | 250 | 1,000 |",
    ]
    sentences = [
        "model, bfloat16: With 64 requests, faster than `auto`: vLLM, EAGLE-3 with windfall's head, 5 tokens (1.25x)",
        "and windfall, `none` (1.10x). Setting: greedy, three prompts for each request at once, and at least 12, of",
        "2 tasks in turn, up to 128 new tokens, prefill included, medians of up to 5 rounds. 8 of 8 of windfall's",
        "texts are those of windfall's plain decoding. 5 of 8 of the other engines' texts are those of windfall's",
        "plain decoding. transformers, assisted generation with small was left out with 8 and 64 requests: it takes one",
        "request at once. vLLM, plain was left out: no.",
    ]
    assert about == " ".join(sentences)
    won, about = renderers.peers({"peers": {**result, "rows": rows[:2], "target": "model", "dtype": "bfloat16"}})
    assert len(won) == 6 and "Nothing in this table is faster than windfall's `auto`." in about
