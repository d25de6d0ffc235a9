from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

import windfall.drafters
import windfall.policies
from windfall import registry
from windfall.core import options
from windfall.core.types import InputError
from windfall.drafters.base import Drafter
from windfall.policies.base import TreePolicy


def defined_in(package: ModuleType, base: type) -> set[type]:
    """The subclasses of `base` with a public name that the modules of a package define."""
    names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    modules = {name: importlib.import_module(name) for name in names if not name.endswith(".base")}
    return {
        cls
        for name, module in modules.items()
        for key, cls in vars(module).items()
        if isinstance(cls, type) and issubclass(cls, base) and cls.__module__ == name and not key.startswith("_")
    }


def test_every_class_is_registered_and_every_name_loads() -> None:
    policies = {registry.policy_class(name) for name in registry.policies()}
    drafters = {registry.drafter_class(name) for name in registry.drafters()}
    for registered, found in (
        (policies, defined_in(windfall.policies, TreePolicy)),
        (drafters, defined_in(windfall.drafters, Drafter)),
    ):
        assert registered <= found
        assert all(cls.__subclasses__() for cls in found - registered), "only base classes have no name"


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("baem", {}, "no policy 'baem'; choose from auto, none"),
        ("beam", {"width": 3}, "policy beam has no option 'width'; it has: depth, k, nodes"),
        ("beam", {"depth": "deep"}, "policy beam: depth takes a whole number, not 'deep'"),
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


def test_nan_is_refused_as_an_option() -> None:
    with pytest.raises(InputError, match="threshold must be a number, not nan"):
        registry.policy("ddd", threshold=float("nan"))
