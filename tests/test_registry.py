from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import windfall.drafters
import windfall.policies
from windfall import registry
from windfall.core import options
from windfall.core.types import InputError
from windfall.drafters.base import Drafter
from windfall.policies.base import TreePolicy


def files(package: object) -> set[str]:
    folder = Path(package.__file__).parent  # type: ignore[attr-defined]
    return {path.stem for path in folder.glob("*.py")} - {"__init__", "base"}


def test_every_file_is_registered_and_every_name_loads() -> None:
    policies = {registry.policy_class(name) for name in registry.policies()}
    drafters = {registry.drafter_class(name) for name in registry.drafters()}
    assert all(issubclass(cls, TreePolicy) for cls in policies)
    assert all(issubclass(cls, Drafter) for cls in drafters)
    assert {cls.__module__.rsplit(".", 1)[1] for cls in policies} == files(windfall.policies)
    assert {cls.__module__.rsplit(".", 1)[1] for cls in drafters} == files(windfall.drafters)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("baem", {}, "no policy 'baem'; choose from auto, none"),
        ("beam", {"width": 3}, "policy beam has no option 'width'; it has: depth, k, nodes"),
        ("beam", {"depth": "deep"}, "policy beam: depth takes int, not 'deep'"),
        ("beam", {"depth": 0}, "depth must be at least 1, not 0"),
        ("fixed-tree", {"tau": "1.5"}, "tau must be at least 0 and at most 1, not 1.5"),
    ],
)
def test_mistakes_are_named(name: str, settings: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        registry.policy(name, **settings)


def test_textual_settings_take_their_types() -> None:
    assert registry.policy("fixed-tree", depth="4", tau="0.25") == registry.policy("fixed-tree", depth=4, tau=0.25)
    assert options.split_settings(["depth=4", " tau = .5"]) == {"depth": "4", "tau": ".5"}
    with pytest.raises(InputError, match="name=value, not 'depth'"):
        options.split_settings(["depth"])


def test_unknown_drafters_are_named() -> None:
    with pytest.raises(InputError, match=r"no drafter 'x'; choose from ngram"):
        registry.drafter("x")


def test_third_parties_register_through_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = EntryPoint("theirs", "windfall.policies.chain:Chain", registry.GROUPS["policy"])
    monkeypatch.setattr(registry, "entry_points", lambda group: [theirs] if group == theirs.group else [])
    monkeypatch.setattr(registry, "_entry_points", registry._entry_points.__wrapped__)
    assert "theirs" in registry.policies()
    assert "theirs" not in registry.drafters()
    assert type(registry.policy("theirs", depth=2)).__name__ == "Chain"


def test_no_number_is_no_option() -> None:
    with pytest.raises(InputError, match="threshold must be a number, not nan"):
        registry.policy("ddd", threshold=float("nan"))
