from __future__ import annotations

import json
from pathlib import Path

import pytest

from windfall import registry
from windfall.bench.methods import DrafterSpec, parse_method, parse_methods, parse_policies
from windfall.core.types import InputError
from windfall.policies.papers.ltd import SHIPPED


def test_policies_presets_and_settings() -> None:
    methods = parse_methods(["beam:depth=4:k=2,eagle-2", "eagle-2:k=3"])
    assert [method.label for method in methods] == ["none", "beam:depth=4:k=2", "eagle-2", "eagle-2:k=3"]
    assert methods[1].make() == registry.policy("beam", depth=4, k=2)
    assert methods[2].make() == registry.preset("eagle-2") and methods[2].policy == "beam"
    assert methods[3].make() == registry.preset("eagle-2", k=3)
    assert [method.plain for method in methods] == [True, False, False, False]


def test_a_drafter_goes_before_a_slash() -> None:
    method = parse_method("self:skip=3+5/beam:depth=4")
    assert method.drafter == DrafterSpec("self", {"skip": "3,5"})
    assert (method.label, method.policy) == ("self:skip=3+5/beam:depth=4", "beam")
    assert method.drafter.make().skip == "3,5"
    assert parse_method("specinfer:widths=2+1").make() == registry.policy("specinfer", widths="2,1")
    both = parse_method("medusa/medusa")  # a preset and a drafter
    assert both.drafter == DrafterSpec("medusa") and both.make() == registry.preset("medusa")
    assert not parse_method("self/none").plain  # plain decoding beside a drafter that costs something


def test_a_model_that_drafts_is_named_without_its_folders() -> None:
    method = parse_method("/models/small/chain:depth=3")
    assert method.drafter is not None and method.drafter.name == "/models/small"
    assert method.label == "small/chain:depth=3"
    assert parse_method("org/small/chain").label == "org/small/chain"


def test_a_preset_file_is_a_method(tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    file.write_text(json.dumps({"policy": "beam", "settings": {"depth": 5, "k": 3}}))
    methods = parse_methods([f"{file},{file}:k=2"])
    assert [method.label for method in methods] == ["none", "tuned.json", "tuned.json:k=2"]
    assert methods[1].make() == registry.policy("beam", depth=5, k=3) and methods[1].policy == "beam"
    assert methods[2].make() == registry.policy("beam", depth=5, k=2)
    with pytest.raises(InputError, match=r"cannot read '/nowhere/tuned\.json'"):
        parse_method("/nowhere/tuned.json")


def test_labels_have_no_absolute_paths() -> None:
    method = parse_method(f"ltd:path={SHIPPED.resolve()}")
    assert "/" not in method.label.replace("src/windfall/weights/ltd", "") and method.make()


def test_all_is_every_policy() -> None:
    names = {method.label for method in parse_methods(["all"])}
    assert names == set(registry.policies()) == set(parse_policies("all"))
    with_drafter = {method.label for method in parse_methods(["self/all"])}
    assert with_drafter == {"none", *(f"self/{name}" for name in registry.policies())}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chain,,beam", "write --methods as names separated by commas"),
        ("nonsense", "there is no policy 'nonsense'; choose from auto"),
        ("ngram/nonsense", "there is no policy 'nonsense'"),
        ("self:skip=3/nonsense", "there is no policy 'nonsense'"),
        ("beam:depth", "write settings as name=value, not 'depth'"),
        ("beam:depth=x", "policy beam: depth takes a whole number, not 'x'"),
        ("/one/small/beam,/two/small/beam", "two methods would be called 'small/beam'"),
        ("ngram:depth=3/beam", "drafter ngram has no option 'depth'"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_methods([text])


def test_policies_alone_take_no_drafter() -> None:
    with pytest.raises(InputError, match="--policies takes policies; the drafter of 'self/beam' goes into --drafter"):
        parse_policies("chain,self/beam")
