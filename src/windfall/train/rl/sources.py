"""Where the cycles of a training come from: recorded texts or an engine, in three parts that share no prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from windfall.core.errors import InputError
from windfall.costs.curves import Costs
from windfall.train.rl.backend import Backend
from windfall.train.rl.config import Config
from windfall.train.rl.live import Live
from windfall.train.rl.playing import REPLAYED
from windfall.train.rl.recording import Recording
from windfall.train.rl.replay import Replay, positions

if TYPE_CHECKING:
    from windfall.engine.engine import Engine

T = TypeVar("T")
PARTS = ("train", "validation", "test")


class Source(Protocol):
    """Backends to learn on, to choose checkpoints by, and to report on."""

    environments: int  # that can step together
    about: dict[str, Any]  # for the record
    seconds: float | None  # of a decision; None: measured

    def endless(self, seed: int) -> Backend:
        """The training texts, in random order."""

    def once(self, part: str) -> Backend:
        """The texts of a part, each once."""


class Recorded:
    """Replays of a recording under a cost profile."""

    def __init__(self, recording: Recording, costs: Costs, config: Config, name: str = "the recording"):
        about = recording.about
        if about["depth"] < config.max_depth or about["k"] != config.k:
            raise InputError(
                f"{name} holds beams of depth {about['depth']} and width {about['k']}; "
                f"record with --depth {config.max_depth} --k {config.k}"
            )
        self.environments = config.environments
        self.seconds: float | None = REPLAYED if config.decision_ms is None else config.decision_ms / 1000
        self.about = {"costs": costs.as_dict(), "target": about["target"], "sampling": about["sampling"]}
        self._costs, self._depth = costs, int(about["depth"])
        self._texts = parted(positions(recording))

    def endless(self, seed: int) -> Replay:
        return Replay(self._texts["train"], self._costs, self._depth, seed)

    def once(self, part: str) -> Replay:
        return Replay(self._texts[part], self._costs, self._depth)


class Engines:
    """Cycles of a real engine, timed as they happen."""

    environments = 1

    def __init__(self, engine: Engine, prompts: Sequence[Any], config: Config, raw: bool = False, **sampling: Any):
        self.seconds: float | None = None if config.decision_ms is None else config.decision_ms / 1000
        self.about = {"target": engine.target.name, "sampling": sampling}
        self._engine, self._parts = engine, parted(list(prompts))
        self._how: dict[str, Any] = {"k": config.k, "entropy": "E" in config.parts, "raw": raw, **sampling}

    def endless(self, seed: int) -> Live:
        return Live(self._engine, self._parts["train"], seed=seed, **self._how)

    def once(self, part: str) -> Live:
        return Live(self._engine, self._parts[part], **self._how)


def parted(texts: list[T]) -> dict[str, list[T]]:
    """Of every five texts the fourth is for validation and the fifth for the report; fewer than three do not do."""
    if len(texts) < 3:
        raise InputError(f"{len(texts)} texts are too few to learn from, to choose by and to report on; give more")
    parts: dict[str, list[T]] = {part: [] for part in PARTS}
    for place, text in enumerate(texts):
        parts[PARTS[max(place % 5 - 2, 0)] if len(texts) >= 5 else PARTS[place % 3]].append(text)
    return parts


def open_recording(file: Path, costs: Costs, config: Config) -> Recorded:
    return Recorded(Recording.load(file), costs, config, f"'{file}'")
