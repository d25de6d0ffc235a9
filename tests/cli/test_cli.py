"""The command line, on a tiny random model with a tokenizer of single characters."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from helpers.cli import SHORT, character_tokenizer, refused, windfall
from helpers.tiny import tiny
from windfall import __version__, registry
from windfall.bench.inspect import doctor
from windfall.cli.measure import parse_policies
from windfall.cli.options import SamplingOptions
from windfall.core.types import InputError, SamplingParams
from windfall.engine import loading
from windfall.engine.engine import Engine, Stream
from windfall.render import console

STATS = {"tokens", "cycles", "target_passes", "draft_passes", "rows", "tau", "delta", "seconds"} | {
    "tokens_per_second",
    "ttft",
    "tpot",
    "time",
}


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a chat template."""
    place = tmp_path_factory.mktemp("models") / "bare"
    tiny().save_pretrained(place)
    character_tokenizer(None).save_pretrained(place)
    return place


# ---- generate


def test_generate_streams_the_text_and_says_how_fast(folder: Path) -> None:
    windfall("generate", "abc abc", "--target", folder, *SHORT)  # measures what passes cost
    result = windfall("generate", "abc abc", "--target", folder, *SHORT)
    told = windfall("generate", "abc abc", "--target", folder, "--json", *SHORT)
    assert result.exit_code == 0
    assert result.stdout == json.loads(told.stdout)["text"] + "\n"
    figures = r"20 tokens, [\d.]+ tokens/s, [\d.]+ tokens per pass; prompt: 10 tokens, [\d.]+ tokens/s\n"
    assert re.fullmatch(figures, result.stderr)


def test_what_is_loaded_is_left_out_of_the_garbage_collector_s_rounds(folder: Path) -> None:
    gc.unfreeze()
    assert windfall("generate", "a b", "--target", folder).exit_code == 0
    assert gc.get_freeze_count() > 10_000


def test_json_is_one_object_with_everything(folder: Path) -> None:
    options = ("--policy", "chain", "--set", "depth=3", "--drafter", "ngram", "--drafter-set", "min_match=1")
    result = windfall("generate", "abc", "--target", folder, "--json", "--seed", "7", *options, *SHORT)
    told = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert set(told) == {"text", "token_ids", "finish_reason", "stats", "target", "drafter", "policy", "seed"}
    assert set(told["stats"]) >= STATS
    assert (told["target"], told["drafter"], told["policy"], told["seed"]) == ("tiny", "ngram", "chain", 7)
    assert told["stats"]["seed"] == 7 and told["stats"]["prompt_tokens"] == 6
    assert told["finish_reason"] == "length"
    assert len(told["token_ids"]) == told["stats"]["tokens"] == 20


def test_every_sampling_option_reaches_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    params = Engine.params
    monkeypatch.setattr(Engine, "params", lambda self, **given: seen.update(given) or params(self, **given))
    flags = "--temperature .7 --top-k 9 --top-p .9 --min-p .01 --repetition-penalty 1.1 --presence-penalty .2"
    more = "--frequency-penalty .3 --logit-bias 5=-2 --logit-bias 6=1.5 --stop xyz --stop qq --seed 3"
    windfall("generate", "abc", "--target", folder, *flags.split(), *more.split(), *SHORT)
    assert seen == {
        "max_new_tokens": 20,
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
    assert {f.name for f in dataclasses.fields(library)} - set(given) == {"processors", "criteria"}


@pytest.mark.parametrize(
    ("arguments", "input"),
    [(["-"], "abc de\n"), ([], "abc de\n"), ([], "abc de"), ([], b"\xef\xbb\xbfabc de\r\n"), (["abc de"], None)],
)
def test_prompts_come_from_the_argument_or_standard_input(
    folder: Path, arguments: list[str], input: str | bytes | None
) -> None:
    told = windfall("generate", *arguments, "--target", folder, "--json", *SHORT, input=input)
    same = windfall("generate", "abc de", "--target", folder, "--json", *SHORT)
    assert json.loads(told.stdout)["token_ids"] == json.loads(same.stdout)["token_ids"]


def test_prompt_from_a_file_a_system_message_and_raw(folder: Path, tmp_path: Path, monkeypatch) -> None:
    prompts = []
    encode = Engine.encode
    monkeypatch.setattr(Engine, "encode", lambda self, p, raw=False: prompts.append((p, raw)) or encode(self, p, raw))
    (tmp_path / "prompt.txt").write_text("abc\n\n")
    windfall("generate", "--file", tmp_path / "prompt.txt", "--raw", "--target", folder, *SHORT)
    windfall("generate", "abc", "--system", "be kind", "--target", folder, *SHORT)
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "abc"}]
    assert prompts == [("abc\n", True), (messages, False)]


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_compare_finds_the_same_tokens(folder: Path, temperature: float) -> None:
    options = (
        "--compare",
        "--temperature",
        temperature,
        "--target",
        folder,
        "--drafter",
        "lm",
        "--policy",
        "beam",
        *SHORT,
    )
    result = windfall("generate", "abc", *options)
    assert result.exit_code == 0
    assert "Same 20 tokens" in result.stdout
    assert [line for line in result.stdout.splitlines() if line in ("plain", "beam")] == ["plain", "beam"]
    for column in ("tokens", "target passes", "tokens per pass", "seconds", "speed-up"):
        assert column in result.stdout
    told = json.loads(windfall("generate", "abc", "--json", *options).stdout)
    assert told["equal"] is True
    assert told["plain"]["token_ids"] == told["token_ids"]
    assert set(told["plain"]) == {"text", "token_ids", "finish_reason", "stats"}
    assert told["plain"]["stats"]["tau"] == 1 < told["stats"]["tau"]


def test_compare_says_where_texts_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    load_model = loading.load_model
    monkeypatch.setattr(loading, "load_model", lambda *given, **how: loads.append(given) or load_model(*given, **how))
    windfall("generate", "abc", "--compare", "--target", folder, *SHORT)
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
    options = ("--drafter", "lm", "--policy", "beam", "--target", folder, "--json", *sampling)
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
    assert legend == "drafted and accepted: 15, the target's own: 5"


def interrupted_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Engine.stream

    def cut(whole: Stream):
        for place, step in enumerate(whole):
            if place == steps:
                raise KeyboardInterrupt
            yield step

    def short(self: Engine, prompt: object, **options: object) -> Stream:
        whole = stream(self, prompt, **options)
        return Stream(cut(whole), whole.prompt_tokens, whole.seed)

    monkeypatch.setattr(Engine, "stream", short)


@pytest.mark.parametrize("steps", [0, 2])
def test_control_c_keeps_what_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
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


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--temperature -1", "temperature must be 0 (greedy) or more, not -1.0"),
        ("--temperature nan", "temperature must be 0 (greedy) or more, not nan"),
        ("--temperature warm", "Invalid value for '--temperature': "),
        ("--top-p 0", "top_p must be above 0 and at most 1, not 0.0"),
        ("--top-k -2", "top_k must be 0 (off) or more, not -2"),
        ("--min-p 2", "min_p must be between 0 and 1, not 2.0"),
        ("--repetition-penalty 0", "repetition_penalty must be above 0, not 0.0"),
        ("--max-new-tokens 0", "max_new_tokens must be at least 1, not 0"),
        ("--max-new-tokens many", "Invalid value for '--max-new-tokens': "),
        ("--logit-bias garbage", "write --logit-bias as ID=VALUE, for example 42=-100, not 'garbage'"),
        ("--logit-bias 999=1", "logit_bias takes token ids between 0 and 60"),
        ("--stop=", "a stop string must not be empty"),
        ("--policy nonsense", "there is no policy 'nonsense'; choose from auto, none"),
        ("--preset nonsense", "there is no preset 'nonsense'; choose from eagle-1"),
        (
            "--preset eagle-2 --policy beam",
            "a preset names a policy and its options; give a preset or a policy",
        ),
        ("--preset eagle-2 --set colour=red", "policy beam has no option 'colour'; it has: depth, k, nodes"),
        ("--policy chain --set depth=x", "policy chain: depth takes int, not 'x'"),
        ("--policy chain --set depth=0", "depth must be at least 1, not 0"),
        ("--set depth", "write settings as name=value, not 'depth'"),
        ("--policy chain --set colour=red", "policy chain has no option 'colour'; it has: depth"),
        ("--drafter-set colour=red", "drafter ngram has no option 'colour'; it has: method"),
        ("--drafter /no/such/model", "there is no file or folder '/no/such/model'"),
        ("--device nonsense", "there is no device 'nonsense'; choose from cpu"),
        ("--dtype nonsense", "there is no dtype 'nonsense'; choose from float32"),
        ("--file /no/such/file", "give a prompt or --file, not both"),
        ("--raw --system kind", "--system needs the chat template, which --raw leaves out; choose one"),
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


def test_a_terminal_without_a_prompt_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    with pytest.raises(InputError, match="there is no prompt; give one as an argument, with --file, or on standard"):
        console.read_prompt(None, None)


def test_models_that_cannot_be_used_are_refused_in_one_line(bare: Path, tmp_path: Path) -> None:
    assert refused("generate", "abc", "--target", "/no/such/model") == "there is no file or folder '/no/such/model'"
    assert "has no config.json" in refused("generate", "abc", "--target", tmp_path)
    assert refused("chat", "--policy", "none", "--target", bare).startswith("bare has no chat template")
    assert refused("generate", "abc", "--policy", "none", "--system", "kind", "--target", bare).startswith(
        "bare has no chat template"
    )
    assert windfall("generate", "abc", "--target", bare, *SHORT).exit_code == 0


def test_unknown_options_and_commands_exit_with_2() -> None:
    assert windfall("generate", "--nonsense").exit_code == 2
    assert windfall("nonsense").exit_code == 2


def test_messages_are_not_markup(folder: Path) -> None:
    assert "'[/red]'" in refused("generate", "abc", "--policy", "[/red]")


def test_bugs_are_not_hidden(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("windfall.engine.loading.load", broken)
    with pytest.raises(ValueError, match="a bug"):
        windfall("generate", "abc", "--target", folder)


# ---- chat


def test_chat_keeps_the_conversation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = []
    encode = Engine.encode
    monkeypatch.setattr(Engine, "encode", lambda self, p, raw=False: prompts.append(p) or encode(self, p, raw))
    lines = "hello\n\n/stats\nagain\n/clear\nnew\n/what\n/exit\nnever\n"
    result = windfall("chat", "--system", "be kind", "--target", folder, "--max-new-tokens", "8", input=lines)
    assert result.exit_code == 0
    roles = [[message["role"] for message in prompt] for prompt in prompts]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    assert prompts[1][2]["content"] in result.stdout
    assert prompts[2][1]["content"] == "new"
    assert "answer 1" in result.stdout
    assert (
        "there is no /what; there are /help, /set, /system, /save, /load, /retry, /clear, /stats, /exit"
        in result.stderr
    )


def test_chat_survives_control_c_and_a_full_context(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted_after(2, monkeypatch)
    lines = f"hello\n{'a' * 300}\nagain\n"
    result = windfall("chat", "--policy", "none", "--target", folder, *SHORT, input=lines)
    assert result.exit_code == 0
    assert result.stderr.count("2 tokens, ") == 2
    assert "takes 255 at most (/clear starts anew)" in result.stderr


def test_chat_colours_drafts_and_refuses_other_encodings(folder: Path) -> None:
    result = windfall("chat", "--show-drafts", "--target", folder, *SHORT, input="hello\n")
    assert "drafted and accepted" in result.stderr
    assert refused("chat", "--target", folder, input=b"\xff\n") == "standard input is not UTF-8 text (byte 0)"


# ---- profile, compare


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WINDFALL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_profile_shows_costs_and_keeps_them(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = windfall("profile", "--target", folder, "--drafter", "lm")
    assert shown.exit_code == 0
    for part in ("tiny", "draft pass, LMDrafter", "verify pass, context 64", "overhead of a cycle", "c = "):
        assert part in shown.stdout
    monkeypatch.setattr("windfall.engine.profiling.measure", None)  # it is not measured again
    told = windfall("profile", "--target", folder, "--drafter", "lm", "--json")
    assert set(json.loads(told.stdout)) == {"costs", "about", "full", "rounds", "seconds", "steady", "c"}
    assert len(list((cache / "profiles").iterdir())) == 1


def test_profile_plots(folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = ("profile", "--target", folder)
    assert refused(*at, "--plot", tmp_path / "costs.gif").startswith("a plot is a .png, .svg, .pdf file, not")
    assert refused(*at, "--plot", tmp_path / "no" / "costs.png").startswith("cannot write '")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert refused(*at, "--plot", tmp_path / "costs.png") == "plots need matplotlib; run: pip install windfall[plot]"
    monkeypatch.undo()
    monkeypatch.setenv("WINDFALL_CACHE", str(cache))
    pytest.importorskip("matplotlib")
    assert windfall(*at, "--plot", tmp_path / "costs.svg").exit_code == 0
    assert "<svg" in (tmp_path / "costs.svg").read_text()


def test_policies_are_compared(folder: Path) -> None:
    options = ("--policies", "chain, beam:depth=2:k=2,eagle-2", "--rounds", "2", "--drafter", "lm", "--target", folder)
    shown = windfall("compare", "abc", *options, "--temperature", ".8", *SHORT)
    assert shown.exit_code == 0
    for part in ("none", "chain", "eagle-2", "tau", "delta", "verify", "tokens/s", "speed-up", "Same 20 tokens"):
        assert part in shown.stdout
    told = json.loads(windfall("compare", "abc", *options, "--json", *SHORT).stdout)
    assert list(told["policies"]) == ["none", "chain", "beam:depth=2:k=2", "eagle-2"]
    assert told["equal"] and told["rounds"] == 2 and len(told["token_ids"]) == 20
    for name, row in told["policies"].items():
        assert set(row) >= STATS | {"mean_rows", "speedup", "equal"}
        assert row["speedup"] == 1 if name == "none" else row["tau"] > 1
    assert told["policies"]["beam:depth=2:k=2"]["mean_rows"] <= 7


def test_rounds_take_turns_after_a_warm_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []
    generate = Engine.generate

    def noted(self: Engine, prompt: object, **options: object):
        turns.append((type(self.policy).__name__, options["max_new_tokens"]))
        return generate(self, prompt, **options)

    monkeypatch.setattr(Engine, "generate", noted)
    windfall("compare", "abc", "--policies", "chain,none", "--rounds", "2", "--target", folder, *SHORT)
    assert turns == [("NoSpeculation", 8), ("Chain", 8), *[("NoSpeculation", 20), ("Chain", 20)] * 2]


def test_compare_finds_a_wrong_policy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = Engine.generate

    def wrong(self: Engine, prompt: object, **options: object):
        made = generate(self, prompt, **options)
        return dataclasses.replace(made, token_ids=[9]) if type(self.policy).__name__ == "Chain" else made

    monkeypatch.setattr(Engine, "generate", wrong)
    options = ("compare", "abc", "--policies", "chain", "--rounds", "1", "--target", folder, *SHORT)
    shown = windfall(*options)
    assert shown.exit_code == 1
    assert re.search(r"Different from token \d on: none has .*, chain has ", shown.stdout)
    told = windfall(*options, "--json")
    assert told.exit_code == 1 and json.loads(told.stdout)["equal"] is False


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ("chain,,beam", "write --policies as names separated by commas"),
        ("nonsense", "there is no policy 'nonsense'; choose from auto"),
        ("beam:depth", "write settings as name=value, not 'depth'"),
        ("beam:depth=x", "policy beam: depth takes int, not 'x'"),
    ],
)
def test_bad_contenders_are_refused_in_one_line(folder: Path, policies: str, message: str) -> None:
    assert refused("compare", "abc", "--policies", policies, "--target", folder).startswith(message)


def test_all_policies_can_be_compared() -> None:
    assert set(parse_policies("all")) == set(registry.policies())


# ---- policies, doctor, version


def test_policies_lists_the_whole_registry() -> None:
    shown = windfall("policies").stdout
    told = json.loads(windfall("policies", "--json").stdout)
    assert [entry["name"] for entry in told["policies"]] == registry.policies()
    assert [entry["name"] for entry in told["drafters"]] == registry.drafters()
    for entry in told["policies"] + told["drafters"]:
        assert entry["name"] in shown and entry["summary"] in shown
        for option in entry["options"]:
            assert set(option) >= {"name", "type", "default", "help"}
            assert option["name"] in shown


def test_policies_by_name() -> None:
    assert "depth" in windfall("policies", "chain").stdout
    assert [e["name"] for e in json.loads(windfall("policies", "ngram", "--json").stdout)["drafters"]] == ["ngram"]
    assert "Policies" not in windfall("policies", "--drafters").stdout
    assert refused("policies", "nonsense").startswith(
        "there is no policy, drafter or preset 'nonsense'; choose from auto"
    )


def test_doctor_finds_this_machine_sound() -> None:
    told = windfall("doctor", "--json")
    found = json.loads(told.stdout)
    assert told.exit_code == 0 and found["ok"]
    names = [check["name"] for check in found["checks"]]
    assert {"python", "windfall", "torch", "transformers", "devices", "threads", "cache", "same text", "hub"} <= {
        *names
    }
    assert "✓ same text" in windfall("doctor").stdout


def test_doctor_finds_a_wrong_text(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = Engine.generate

    def wrong(self: Engine, prompt: object, **options: object):
        made = generate(self, prompt, **options)
        return made if self.policy == registry.policy("none") else dataclasses.replace(made, token_ids=[1])

    monkeypatch.setattr(Engine, "generate", wrong)
    result = windfall("doctor")
    assert result.exit_code == 1
    assert "✗ same text      speculative and plain decoding differ" in result.stdout


def test_doctor_checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WINDFALL_CACHE", str(tmp_path))
    assert doctor.cache() == str(tmp_path)
    monkeypatch.setenv("WINDFALL_CACHE", str(tmp_path / "file" / "below"))
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match="cannot be written to"):
        doctor.cache()
    monkeypatch.setattr("windfall.checkpoints.find.EMBEDDED_PACKAGE", "no_such_package")
    with pytest.raises(RuntimeError, match="not installed"):
        doctor.embedded_model()
    monkeypatch.setattr("torch.__version__", "0.0.1")
    with pytest.raises(RuntimeError, match=r"0\.0\.1 is installed, but windfall needs >="):
        doctor.version("torch")


def test_version() -> None:
    assert windfall("--version").stdout == f"windfall {__version__}\n"


# ---- as a process


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, windfall.cli\ntry: windfall.cli.main()\n"
    code += "finally: assert not {'torch', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout


@pytest.mark.skipif(os.name != "posix", reason="pipes")
def test_a_closed_pipe_is_quiet(folder: Path) -> None:
    command = [sys.executable, "-m", "windfall.cli", "generate", "abc", "--target", str(folder), "--policy", "none"]
    process = subprocess.Popen(
        [*command, "--ignore-eos", "--max-new-tokens", "250"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_output_that_cannot_be_written_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "windfall.cli", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "windfall: cannot write to standard output: No space left on device\n",
    )


def test_a_tree_is_drawn(folder: Path) -> None:
    drawn = windfall(
        "tree", "the cat", "--target", folder, "--drafter", "lm", "--policy", "beam", "--set", "k=2", *SHORT
    )
    assert "└── " in drawn.stdout
    assert all(mark in drawn.stdout for mark in ("  ← accepted", "  ← the target's own next token"))
    first = windfall("tree", "the cat", "--target", folder, "--policy", "none", "--cycle", "1", *SHORT)
    assert "0 drafted in 0 passes, 0 verified, 0 accepted: 1 token from" in " ".join(first.stdout.split())
    few = ("tree", "the cat", "--target", folder, "--policy", "none", "--max-new-tokens", 3, "--ignore-eos")
    assert refused(*few, "--cycle", "4") == "the text has 3 cycles; there is no cycle 4"


def test_a_tree_is_drawn_as_svg(folder: Path, tmp_path: Path) -> None:
    options = ("--target", folder, "--drafter", "lm", "--policy", "beam", "--set", "k=2", "--set", "nodes=6", *SHORT)
    file = tmp_path / "tree.svg"
    assert windfall("tree", "the <&> cat", *options, "--svg", file).exit_code == 0
    drawn = ElementTree.parse(file).getroot()
    texts = [element.text or "" for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"accepted", "the target's own token", "verified, not accepted", "drafted, not verified"} <= {*texts}
    assert sum(bool(re.search(r" [01]\.\d\d$", text)) for text in texts) == int(texts[-1].split()[0])
    width, height = float(drawn.attrib["width"]), float(drawn.attrib["height"])
    boxes = [element.attrib for element in drawn.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert all(float(b["x"]) + float(b["width"]) <= width and float(b["y"]) + 20 <= height for b in boxes)
    assert len({(b["x"], b["y"]) for b in boxes}) == len(boxes)
    (tmp_path / "folder.svg").mkdir()
    assert refused("tree", "abc", *options, "--svg", tmp_path / "folder.svg").endswith("folder.svg': Is a directory")
    assert "is named otherwise" in refused("tree", "abc", *options, "--svg", tmp_path / "tree.png")
    plain = windfall("tree", "the cat", "--target", folder, "--policy", "none", "--svg", file, *SHORT)
    assert plain.exit_code == 0 and "1 token from one pass" in file.read_text()


def test_calibrate_shows_reliability_before_and_after(folder: Path, tmp_path: Path) -> None:
    options = ("--target", folder, "--drafter", "lm", *SHORT)
    shown = windfall("calibrate", "abc", "cab", *options)
    assert shown.exit_code == 0
    assert shown.stdout.count("ECE") == 2
    told = json.loads(windfall("calibrate", "abc", "--json", *options).stdout)
    assert told["nodes"] > 0
    assert 0 <= told["ece_after"] <= 1
    assert sum(count for _, _, count in told["bins"]["before"]) == told["nodes"]
    silent = windfall("calibrate", "abc", "--target", folder, "--drafter", "ngram", "--max-new-tokens", "1")
    assert silent.exit_code == 2
    assert "nothing was drafted" in silent.stderr
