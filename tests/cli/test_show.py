"""`windfall tree`, `policies` and `doctor`."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from helpers.cli import SHORT, refused, windfall
from windfall import registry
from windfall.bench.inspect import doctor
from windfall.engine.engine import Engine


def test_policies_lists_the_whole_registry() -> None:
    shown = windfall("policies").stdout
    told = json.loads(windfall("policies", "--json").stdout)
    assert [entry["name"] for entry in told["policies"]] == registry.policies()
    assert [entry["name"] for entry in told["drafters"]] == registry.drafters()
    for entry in told["policies"] + told["drafters"]:
        assert entry["name"] in shown and entry["summary"] in shown
        assert entry["summary"].endswith("."), "the summary is not a whole sentence"
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


def test_doctor_passes_on_this_machine() -> None:
    result = windfall("doctor", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["ok"]
    names = [check["name"] for check in found["checks"]]
    assert {"python", "windfall", "torch", "transformers", "devices", "threads", "cache", "same text", "hub"} <= {
        *names
    }


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
    assert "does not end in .svg" in refused("tree", "abc", *options, "--svg", tmp_path / "tree.png")
    plain = windfall("tree", "the cat", "--target", folder, "--policy", "none", "--svg", file, *SHORT)
    assert plain.exit_code == 0 and "1 token from one pass" in file.read_text()
