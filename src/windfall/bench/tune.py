"""Searches for a policy's fastest options: a full grid, or successive halving of random settings."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import json
import math
import random
import time
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from windfall import registry
from windfall.bench.methods import DrafterSpec
from windfall.bench.paths import shorten
from windfall.core.files import replace_text
from windfall.core.options import options_of
from windfall.core.types import InputError

Settings = dict[str, Any]
Measure = Callable[[Settings, int], float]  # (settings, number of prompts) -> tokens per second
Progress = Callable[[float], None]

GRID = {"depth": tuple(range(4, 13)), "nodes": tuple(range(40, 241, 20))}  # LTD's grid search over EAGLE-3's tree
SEARCH_FACTOR = 8.0  # a number is searched from its default divided by this to its default times this


@dataclass
class Search:
    """The measurements so far, saved after every one, so that an interrupted search can be continued."""

    file: Path
    about: dict[str, Any]  # policy, target, drafter, prompts and sampling, which must be the same to continue
    measured: dict[str, float] = field(default_factory=dict)  # of (settings, prompts)

    @classmethod
    def open(cls, file: Path, about: Mapping[str, Any]) -> Search:
        """Open the search in a file, or a new one; a search with other settings is refused."""
        wanted: dict[str, Any] = json.loads(json.dumps(dict(about)))
        if not file.is_file():
            return cls(file, wanted)
        try:
            kept = json.loads(file.read_text("utf-8"))
            found, measured = kept["about"], {str(key): float(value) for key, value in kept["measured"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"'{file}' is not the file of a search; give another name, or remove it") from error
        if found != wanted:
            other = ", ".join(key for key in wanted if found.get(key) != wanted[key]) or "settings"
            raise InputError(f"'{file}' holds a search with another {other}; give another name, or remove it")
        return cls(file, wanted, measured)

    def measure(self, settings: Settings, prompts: int, measure: Measure) -> float:
        key = json.dumps([settings, prompts], sort_keys=True)
        if key not in self.measured:
            self.measured[key] = measure(settings, prompts)
            replace_text(self.file, json.dumps({"about": self.about, "measured": self.measured}, indent=1))
        return self.measured[key]


@dataclass(frozen=True)
class Result:
    """Settings, their measured speed, and the number of prompts it was measured on."""

    settings: Settings
    speed: float
    prompts: int


def candidates(
    policy: str,
    search: str,
    names: tuple[str, ...],
    count: int,
    seed: int,
    fixed: Mapping[str, Any],
    values: Mapping[str, Sequence[Any]] | None = None,
) -> list[Settings]:
    """The settings to measure: for `grid` every depth with every size, or all combinations of the given values; for
    `halving` random settings. Fixed options keep their value."""
    registry.policy(policy, **fixed)  # raises an error for invalid options
    if values:
        return _given_grid(policy, search, names, fixed, values)
    if both := next((name for name in names if name in fixed), None):
        raise InputError(f"'{both}' cannot both stay as it is (--set) and be searched over (--vary)")
    if search == "halving":
        free = names or tuple(name for name in numbers(policy) if name not in fixed)
        return random_settings(policy, free, count, seed, fixed)
    if search != "grid":
        raise InputError(f"there is no search '{search}'; choose from grid, halving")
    axes = names or tuple(name for name in GRID if name not in fixed)
    known = numbers(policy)
    lacking = [name for name in axes if name not in GRID or name not in known]
    if lacking:
        raise InputError(
            f"the grid is over depth and nodes, and {policy} has no such '{lacking[0]}'; use --search halving"
        )
    return grid({name: GRID[name] for name in axes})


def _given_grid(
    policy: str, search: str, names: tuple[str, ...], fixed: Mapping[str, Any], values: Mapping[str, Sequence[Any]]
) -> list[Settings]:
    if search != "grid" or names:
        raise InputError("values are those of a grid: give them with --search grid and without --vary")
    if both := next((name for name in values if name in fixed), None):
        raise InputError(f"'{both}' cannot both stay as it is (--set) and have several values")
    found = grid(values)
    for settings in found:
        registry.policy(policy, **{**fixed, **settings})  # raises an error for invalid options
    return found


def parse_values(texts: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Parse the values of options, such as `depth=6,8`; numbers become numbers."""
    found = {}
    for text in texts:
        name, _, listed = text.partition("=")
        items = [item.strip() for item in listed.split(",")]
        if not all([name, *items]):
            raise InputError(f"write values as NAME=A,B,C, for example depth=6,8,10, not '{text}'")
        if name in found:
            raise InputError(f"give the values of '{name}' at once, for example {name}=6,8,10")
        found[name] = tuple(map(_as_number, dict.fromkeys(items)))
    return found


def _as_number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def grid(axes: Mapping[str, Sequence[Any]]) -> list[Settings]:
    """Every combination."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def sweep(
    search: Search, candidates: Sequence[Settings], prompts: int, measure: Measure, progress: Progress
) -> list[Result]:
    """Measure every candidate on every prompt; the fastest comes first."""
    found = []
    for done, settings in enumerate(candidates, 1):
        found.append(Result(settings, search.measure(settings, prompts, measure), prompts))
        progress(done / len(candidates))
    return sorted(found, key=lambda result: -result.speed)


def halving(
    search: Search, candidates: Sequence[Settings], prompts: int, measure: Measure, progress: Progress
) -> list[Result]:
    """Measure all on a few prompts, the better half on twice as many, and so on; the last to remain come first."""
    rounds = list(plan(len(candidates), prompts))
    total, done = sum(count * size for count, size in rounds), 0
    alive, ranked = list(candidates), list[Result]()
    for count, size in rounds:
        found = []
        for settings in alive:
            found.append(Result(settings, search.measure(settings, size, measure), size))
            done += size
            progress(min(done / total, 1.0))
        found.sort(key=lambda result: -result.speed)
        ranked = [*found, *(result for result in ranked if result.settings not in alive)]
        alive = [result.settings for result in found[: max(count // 2, 1)]]
    return ranked


def plan(candidates: int, prompts: int) -> Iterator[tuple[int, int]]:
    """(candidates, prompts each) of every round; the last round has every prompt."""
    rounds = max(math.ceil(math.log2(max(candidates, 2))), 1)
    for step in range(rounds):
        yield max(candidates >> step, 1), max(math.ceil(prompts / 2 ** (rounds - 1 - step)), 1)


class Axis(NamedTuple):
    """The values an option is searched over: a range around its default, or a few values."""

    default: Any
    low: float = 0.0
    high: float = 0.0
    values: tuple[Any, ...] = ()

    def draw(self, chance: random.Random) -> Any:
        return chance.choice(self.values) if self.values else _draw(chance, self.default, self.low, self.high)


def random_settings(
    policy: str, names: Iterable[str] = (), count: int = 16, seed: int = 0, fixed: Mapping[str, Any] | None = None
) -> list[Settings]:
    """The defaults and random settings of a policy's numbers, or of the named options."""
    axes = axes_of(policy, tuple(names))
    chance = random.Random(seed)
    found = [{name: axis.default for name, axis in axes.items()}]
    for _ in range(50 * count):
        if len(found) == count:
            break
        drawn = {name: axis.draw(chance) for name, axis in axes.items()}
        if drawn not in found and _is_valid(policy, {**(fixed or {}), **drawn}):
            found.append(drawn)
    return found


def _is_valid(policy: str, settings: Settings) -> bool:
    try:
        registry.policy(policy, **settings)
    except InputError:
        return False
    return True


def numbers(policy: str) -> dict[str, Axis]:
    """A policy's numeric options that have a default."""
    found = {name: axis for name, axis in searchable(policy).items() if not axis.values}
    if not found:
        raise InputError(f"{policy} has no numbers to search for; choose another policy")
    return found


def axes_of(policy: str, names: tuple[str, ...]) -> dict[str, Axis]:
    """The options that are searched: the named ones, or every number."""
    if not names:
        return numbers(policy)
    known = searchable(policy)
    if unknown := next((name for name in names if name not in known), None):
        choices = ", ".join(known) or "none"
        raise InputError(f"{policy} has no option '{unknown}' to search over; it has: {choices}")
    return {name: known[name] for name in names}


def searchable(policy: str) -> dict[str, Axis]:
    """A policy's options that are numbers, switches or choices."""
    cls = registry.policy_class(policy)
    hints, found = typing.get_type_hints(cls), dict[str, Axis]()
    for name, option in options_of(cls).items():
        if option.metadata["choices"]:
            found[name] = Axis(option.default, values=option.metadata["choices"])
        elif hints[name] is bool:
            found[name] = Axis(option.default, values=(False, True))
        elif option.default is not None and _is_number(hints[name]):
            found[name] = Axis(option.default, *_range(option))
    return found


def _is_number(kind: Any) -> bool:
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    return any(each in (int, float) for each in kinds)


def _range(option: dataclasses.Field[Any]) -> tuple[float, float]:
    """A range around the default within the allowed one; shares are searched from 0 to 1."""
    low, high = option.metadata["low"], option.metadata["high"]
    default: Any = option.default
    if (low, high) == (0, 1):
        return 0.0, 1.0
    least = default / SEARCH_FACTOR if default else 0.0
    most = default * SEARCH_FACTOR if default else 1.0
    return max(least, -math.inf if low is None else low), min(most, math.inf if high is None else high)


def _draw(chance: random.Random, default: Any, low: float, high: float) -> Any:
    """A random value: uniform for shares, else uniform in the logarithm."""
    if isinstance(default, int):
        return round(math.exp(chance.uniform(math.log(max(low, 1)), math.log(max(high, 1)))))
    if low <= 0 or (low, high) == (0.0, 1.0):
        return round(chance.uniform(low, high), 3)
    return float(f"{math.exp(chance.uniform(math.log(low), math.log(high))):.3g}")


def describe(engine: Any, drafter: DrafterSpec, prompts: Sequence[Any], sampling: Settings) -> dict[str, Any]:
    """What a measurement depends on besides the policy."""
    from windfall.bench.provenance import model_hash
    from windfall.engine.profiling import machine

    target = engine.target
    return {
        "target": shorten(target.name),
        "weights": model_hash(target.model),
        "drafter": drafter.label,
        "coupled": engine.coupled,
        "dtype": str(target.decoder.dtype).removeprefix("torch."),
        "machine": machine(target.device),
        "sampling": sampling,
        "prompts": digest(prompts),
    }


def timed(engine: Any, policy: str, fixed: Settings, prompts: Sequence[Any], sampling: Settings) -> Measure:
    """A function that measures an engine's tokens per second, after a short text that is not counted.

    Every measurement starts with the same calibrators.
    """
    known = copy.deepcopy(engine.calibrators)

    def measure(settings: Settings, count: int) -> float:
        engine.policy = registry.policy(policy, **{**fixed, **settings})
        engine.calibrators = copy.deepcopy(known)
        engine.generate(prompts[0], **{**sampling, "max_new_tokens": min(8, sampling["max_new_tokens"])})
        started, tokens = time.perf_counter(), 0
        for prompt in prompts[:count]:
            tokens += engine.generate(prompt, **sampling).stats.tokens
        return tokens / (time.perf_counter() - started)

    return measure


def write_preset(file: Path, policy: str, settings: Settings, result: Result, about: Mapping[str, Any]) -> None:
    """Write a file for `--preset FILE`."""
    best = {"policy": policy, "settings": {**settings, **result.settings}}
    replace_text(file, json.dumps({**best, "tokens_per_second": result.speed, "about": dict(about)}, indent=2) + "\n")


def digest(prompts: Sequence[Any]) -> str:
    """A short hash of these prompts."""
    return hashlib.sha256(json.dumps(list(prompts), sort_keys=True).encode()).hexdigest()[:12]
