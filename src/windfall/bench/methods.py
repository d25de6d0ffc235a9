"""Methods as text: a policy with settings, and optionally a drafter, written in one word.

Examples: `beam:depth=4:k=4`; a preset such as `eagle-2`, or a file that `windfall tune` wrote; `self:skip=3+5/beam`, a
drafter and a policy separated by a slash. Settings follow after colons, and a plus stands for a comma inside a value. A
policy or drafter can also be a class in a file: `my.py:Mine:least=0.2`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windfall.bench.paths import shorten
from windfall.core.errors import InputError

if TYPE_CHECKING:
    from windfall.drafters.base import Drafter
    from windfall.policies.base import TreePolicy

PLAIN = "none"
EVERY_POLICY = "all"
PRESET_SUFFIX = ".json"


@dataclass(frozen=True)
class DrafterSpec:
    """The name of a drafter, or of a model that drafts, with settings as they were typed."""

    name: str
    settings: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> DrafterSpec:
        """Parse a drafter with settings, such as `self:skip=3+5`."""
        return cls(*_settings(text))

    @property
    def label(self) -> str:
        """The text of this drafter in a method, without the folders of a model's path."""
        settings = [f"{key}={value.replace(',', '+')}" for key, value in self.public_settings.items()]
        return ":".join([self.short_name, *settings])

    @property
    def short_name(self) -> str:
        return Path(self.name).name if Path(self.name).is_absolute() else self.name

    @property
    def public_settings(self) -> dict[str, str]:
        """The settings, without the folders of paths."""
        return {key: shorten(value) for key, value in self.settings.items()}

    def check(self) -> None:
        """Check the settings of a registered drafter; heads and models are only looked for when they are loaded."""
        from windfall import registry

        if registry.is_drafter(self.name):
            registry.drafter(self.name, **self.settings)

    def make(self, trust_remote_code: bool = False) -> Drafter:
        from windfall.drafters.lm import LMDrafter
        from windfall.engine import loading

        made = loading.as_drafter(self.name, **self.settings)
        if trust_remote_code and isinstance(made, LMDrafter):
            made.trust_remote_code = True
        return made


@dataclass(frozen=True)
class Method:
    """A policy with settings; `drafter` is None for the drafter of the run."""

    label: str
    policy: str  # its name in the registry
    settings: dict[str, Any]
    drafter: DrafterSpec | None = None

    def make(self) -> TreePolicy:
        from windfall.engine import loading

        return loading.as_policy(self.policy, **self.settings)

    @property
    def plain(self) -> bool:
        """Whether this is plain decoding without a drafter."""
        return self.policy == PLAIN and self.drafter is None


def parse_methods(texts: Sequence[str], option: str = "--methods") -> list[Method]:
    """Parse lists of methods separated by commas; plain decoding is added as the first, `all` is every policy."""
    items = [item.strip() for text in texts for item in text.split(",")]
    if not all(items):
        raise InputError(f"write {option} as names separated by commas, for example chain,beam:depth=4")
    names = [name for item in items for name in _expand(item)]
    methods = [parse_method(name) for name in dict.fromkeys([PLAIN, *names])]
    labels = [method.label for method in methods]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise InputError(f"two methods would be called '{twice}'; their drafters need different names")
    return methods


def parse_policies(text: str, option: str = "--policies") -> dict[str, TreePolicy]:
    """Parse `all` or `beam:depth=4:k=4,salf` into policies by name, `none` first."""
    methods = parse_methods([text], option)
    if own := next((method for method in methods if method.drafter), None):
        raise InputError(f"{option} takes policies; the drafter of '{own.label}' goes into --drafter")
    return {method.label: method.make() for method in methods}


def parse_method(item: str) -> Method:
    """Parse one method; its names and settings are checked without loading a model."""
    from windfall import registry

    drafter, policy_text = _split(item)
    name, given = _settings(policy_text)
    policy, settings = name, dict[str, Any](given)
    if name.endswith(PRESET_SUFFIX):
        policy, found = registry.read_preset(name)
        settings = {**found, **given}
    elif name not in registry.policies() and name in registry.presets():
        policy, published, _ = registry.PRESETS[name]
        settings = {**published, **given}
    shown = shorten(policy_text)
    method = Method(shown if drafter is None else f"{drafter.label}/{shown}", policy, settings, drafter)
    method.make()
    if drafter is not None:
        drafter.check()
    return method


def _expand(item: str) -> list[str]:
    """Expand `all`, also after a drafter, into the names of every policy."""
    from windfall import registry

    drafter, slash, last = item.rpartition("/")
    return [f"{drafter}{slash}{name}" for name in registry.policies()] if last == EVERY_POLICY else [item]


def _split(item: str) -> tuple[DrafterSpec | None, str]:
    """Split into drafter and policy; the policy begins after the first slash that a known name follows."""
    from windfall import registry

    if item.partition(":")[0].endswith(PRESET_SUFFIX):
        return None, item
    known = {*registry.policies(), *registry.presets()}
    starts = [*(place + 1 for place, character in enumerate(item) if character == "/"), 0]
    start = next((start for start in starts if item[start:].partition(":")[0] in known), None)
    if start is None:
        start = _start_of_class(item, sorted(starts))
    return (DrafterSpec.parse(item[: start - 1]) if start else None), item[start:]


def _start_of_class(item: str, starts: Sequence[int]) -> int:
    """Where `FILE.py:CLASS` or `MODULE:CLASS` begins, or else the unknown name, for the error message."""
    from windfall import registry
    from windfall.plugins import is_reference

    classes = [start for start in starts if is_reference(":".join(item[start:].split(":")[:2]))]
    files = [start for start in classes if Path(item[start:].partition(":")[0]).expanduser().is_file()]
    drafted = classes[1:] if item.partition("/")[0] in registry.drafters() else []
    return next(iter((*files, *drafted, *classes)), item.rfind("/") + 1)


def _settings(text: str) -> tuple[str, dict[str, str]]:
    from windfall import registry
    from windfall.core.options import split_settings

    name, settings = registry.split_name(text.split(":"))
    return name, {key: value.replace("+", ",") for key, value in split_settings(settings).items()}
