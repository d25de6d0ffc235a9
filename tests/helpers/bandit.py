"""Worlds with known rewards for the bandit."""

from __future__ import annotations

import random
from typing import Any

from windfall.policies.bandit import Chooser

CHANCES = (0.0, 0.55, 0.67, 0.71, 0.74)  # of one more token, by arm


WARM_UP, STRETCH = 1500, 4000  # cycles


class World:
    """Cycles of arms with known speeds: how many tokens come is a matter of luck, and a little the time they take."""

    def __init__(self, seed: int, chances: tuple[float, ...] = CHANCES, longest: int = 7, hiccups: float = 0.0) -> None:
        self.chance, self.chances, self.longest, self.hiccups = random.Random(seed), chances, longest, hiccups
        self.usual = [sum(chance**more for more in range(longest)) for chance in chances]  # tokens

    def cycle(self, arm: int, speed: float) -> tuple[int, float]:
        tokens, chance = 1, self.chances[arm]
        while tokens < self.longest and self.chance.random() < chance:
            tokens += 1
        slowness = self.chance.lognormvariate(0, 0.1)
        if self.hiccups and self.chance.random() < self.hiccups:
            slowness += 5 * self.chance.paretovariate(1.5)  # of infinite variance
        return tokens, self.usual[arm] / speed * slowness

    def speed(self, chooser: Chooser, speeds: list[float], warm_up: int, cycles: int) -> float:
        """Tokens per second as expected of the arms that were played, after a warm-up."""
        made = taken = 0.0
        for cycle in range(cycles):
            arm = chooser.arm
            chooser.observe(arm, *self.cycle(arm, speeds[arm]))
            if cycle >= warm_up:
                made, taken = made + self.usual[arm], taken + self.usual[arm] / speeds[arm]
        return made / taken

    def loss(self, chooser: Chooser, speeds: list[float]) -> float:
        """Share by which a stretch stays below the best arm."""
        periods = chooser.memory / 2000
        return 1 - self.speed(chooser, speeds, int(WARM_UP * periods), int(STRETCH * periods)) / max(speeds)

    @property
    def luck(self) -> float:
        """The largest deviation of an arm's tokens per cycle, as a share of their mean."""
        found = []
        for chance, mean in zip(self.chances, self.usual, strict=True):
            squares = sum((2 * more + 1) * chance**more for more in range(self.longest))
            found.append((squares - mean * mean) ** 0.5 / mean)
        return max(found)


WORLDS = {  # speeds of the arms, the first is plain decoding; then those after a change
    "one is best": [[50, 60, 80, 100, 90]],
    "several are good": [[50, 90, 100, 92, 60]],
    "plain is best": [[50, 45, 30, 40, 20]],
    "all are alike": [[50, 97, 100, 98, 97]],
    "the best gets slow": [[50, 60, 100, 80, 80], [50, 100, 60, 80, 80], [100, 60, 50, 80, 80]],
    "another gets fast": [[50, 60, 80, 70, 40], [50, 60, 80, 110, 40]],
}


def bound(world: World, chooser: Chooser) -> float:
    """What can be promised of a stretch: what may be spent, and what luck hides. See docs/learned.md."""
    return chooser.explore + 2.5 * world.luck * (chooser.arms / chooser.memory) ** 0.5


def known_worlds(seeds: range, **options: Any) -> list[tuple[float, float]]:
    """Loss and bound of every stretch of the worlds above."""
    found = []
    for stretches in WORLDS.values():
        for seed in seeds:
            chooser, world = Chooser(len(CHANCES), **options), World(seed)
            found += [(world.loss(chooser, [*map(float, speeds)]), bound(world, chooser)) for speeds in stretches]
    return found


def random_worlds(seeds: range, change: str = "slow", **options: Any) -> list[tuple[float, float]]:
    """The same for two stretches of each of many worlds: 2-6 arms, near or far apart, more or less luck, hiccups.

    Then the best arm gets `slow`, or another gets `fast`, which nobody sees who does not play it.
    """
    found = []
    for seed in seeds:
        chance = random.Random(f"world {seed}")
        arms, furthest = chance.randint(2, 6), chance.choice((0.04, 0.15, 0.7))
        speeds = [100 * (1 - chance.uniform(0, furthest)) for _ in range(arms - 1)] + [100.0]
        chance.shuffle(speeds)
        chances = (0.0, *(chance.uniform(0.4, 0.85) for _ in range(arms - 1)))
        world = World(seed, chances, chance.randint(4, 16), chance.choice((0.0, 0.002, 0.01)))
        chooser = Chooser(arms, **options)
        found.append((world.loss(chooser, speeds), bound(world, chooser)))
        best = speeds.index(100.0)
        if change == "slow":
            speeds[best] *= chance.uniform(0.3, 0.9)
        else:
            speeds[chance.choice([arm for arm in range(arms) if arm != best])] = 100 * chance.uniform(1.1, 1.8)
        found.append((world.loss(chooser, speeds), bound(world, chooser)))
    return found
