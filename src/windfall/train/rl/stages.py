"""The turns in which policies learn."""

from __future__ import annotations

from dataclasses import dataclass

from windfall.train.rl.config import KINDS, Config


@dataclass(frozen=True)
class Stage:
    """One turn of one policy."""

    place: int
    kind: str
    alone: bool

    @property
    def name(self) -> str:
        return f"{self.place}-{self.kind}{'-alone' if self.alone else ''}"


def stages(config: Config) -> list[Stage]:
    alone = KINDS if config.train == "both" else (config.train,)
    kinds = [*((kind, True) for kind in alone), *((kind, False) for kind in config.turns)]
    return [Stage(place, kind, first) for place, (kind, first) in enumerate(kinds)]
