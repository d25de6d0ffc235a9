"""Names that the shell completes; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable


def policies(incomplete: str) -> list[str]:
    from windfall import registry

    return _beginning(registry.policies(), incomplete)


def drafters(incomplete: str) -> list[str]:
    from windfall import registry

    return _beginning(registry.drafters(), incomplete)


def presets(incomplete: str) -> list[str]:
    from windfall import registry

    return _beginning(registry.presets(), incomplete)


def everything(incomplete: str) -> list[str]:
    """Policies, drafters and presets, each name once."""
    return list(dict.fromkeys([*policies(incomplete), *drafters(incomplete), *presets(incomplete)]))


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
