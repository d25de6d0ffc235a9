"""A bandit over policies: it plays the one that has lately made most tokens per second here. See docs/learned.md."""

from __future__ import annotations

import copy
import json
import math
import random
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from windfall.context import Context
from windfall.errors import InputError
from windfall.files import make_folder, read_text, replace_text
from windfall.options import option, split_settings
from windfall.policies.base import TreePolicy
from windfall.records import Grow, Step
from windfall.tree import DraftTree

PLAIN = "none"
ARMS = "none+chain:depth=4+beam:depth=4:k=4:nodes=16+eagle-3+auto"
WARM_UP = 4  # turns of every arm to begin with, unless it is hopeless
OPTIMISM = {"ucb": 3.0, "thompson": 2.0}  # standard errors, or the width of what is drawn
PRIOR, SPREAD = 4.0, 0.35  # before it is known: turns that this deviation of a turn, as a share, is worth
LATELY = 12.0  # turns over which a change is looked for
ALARM = 4.0  # standard errors that the last turns may lie off
HICCUP = 5.0  # a cycle counts as this many times the usual one at the most


@dataclass
class Evidence:
    """Fading sums over an arm's turns: how many, their tokens and seconds, and what a variance needs."""

    turns: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0  # tokens²
    products: float = 0.0  # tokens · seconds
    times: float = 0.0  # seconds²

    def fade(self, share: float) -> None:
        for name, value in vars(self).items():
            setattr(self, name, value * share)

    def add(self, tokens: float, seconds: float) -> None:
        self.turns, self.tokens, self.seconds = self.turns + 1, self.tokens + tokens, self.seconds + seconds
        self.squares += tokens * tokens
        self.products += tokens * seconds
        self.times += seconds * seconds

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def error(self) -> float:
        """The standard error of that ratio."""
        if not self.seconds:
            return math.inf
        rate, usual = self.rate, SPREAD * self.tokens / self.turns
        residue = max(self.squares - 2 * rate * self.products + rate * rate * self.times, 0.0)
        return math.sqrt((residue + PRIOR * usual * usual) / (self.turns + PRIOR) * self.turns) / self.seconds


@dataclass
class Chooser:
    """Which arm to play, a turn of `block` cycles at a time.

    It plays the fastest arm so far, and another where that may be faster still: by its upper confidence bound, or by a
    draw from what is known of it (Thompson). What such turns are expected to lose is paid from a budget, a small share
    of the tokens made. Evidence fades; where an arm's last turns contradict those before, everything is learnt anew.
    """

    arms: int
    method: str = "ucb"
    block: int = 4
    explore: float = 0.01
    memory: float = 2000.0
    arm: int = 0  # playing now
    turns: int = 0
    spent: float = 0.0  # tokens that trying others is thought to have cost
    earned: float = 0.0
    known: list[Evidence] = field(default_factory=list)  # of each arm
    recent: list[Evidence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = random.Random(0)
        self._cycles, self._tokens, self._seconds = 0, 0.0, 0.0  # of this turn
        if not self.known:
            self._begin()

    def _begin(self) -> None:
        self.known, self.recent = ([Evidence() for _ in range(self.arms)] for _ in range(2))
        self.arm, self.turns, self.spent, self.earned = 0, 0, 0.0, 0.0

    def observe(self, arm: int, tokens: float, seconds: float) -> None:
        """A cycle's tokens and seconds; after enough of them, the next arm's turn comes."""
        if arm != self.arm or seconds <= 0:  # a batch mate's, begun in the turn before
            return
        known = self.known[arm]
        if known.turns:
            seconds = min(seconds, HICCUP * known.seconds / known.turns / self.block)
        self._cycles, self._tokens, self._seconds = self._cycles + 1, self._tokens + tokens, self._seconds + seconds
        if self._cycles >= self.block:
            self._end_turn()

    def _end_turn(self) -> None:
        fading = math.exp(-self.block / self.memory)
        if not self.earned:  # the first turn: as if this had gone on for long
            self.earned = self._tokens * self.memory / self.block
        for evidence in self.known:
            evidence.fade(fading)
        self.spent, self.earned = self.spent * fading, self.earned * fading + self._tokens
        lately = self.recent[self.arm]
        lately.fade(1 - 1 / LATELY)
        for evidence in (self.known[self.arm], lately):
            evidence.add(self._tokens, self._seconds)
        self._cycles, self._tokens, self._seconds = 0, 0.0, 0.0
        self.turns += 1
        if self._contradicted():
            contradicting = self.arm
            self._begin()
            self.known[contradicting] = lately  # all that is known of how things are now
        self.arm = self._next()

    def _contradicted(self) -> bool:
        known, lately = self.known[self.arm], self.recent[self.arm]
        if known.turns < 2 * LATELY or lately.turns < LATELY / 2:
            return False
        return abs(lately.rate - known.rate) > ALARM * math.hypot(lately.error, known.error)

    def _next(self) -> int:
        leader = max(range(self.arms), key=lambda arm: self.known[arm].rate)
        if self.turns < WARM_UP * self.arms and (new := self._hardly_tried(self.known[leader].rate)):
            return min(new, key=lambda arm: self.known[arm].turns)
        hopeful = max(range(self.arms), key=self._hope)
        price = self._price(hopeful, leader)
        if self.spent + price > self.explore * self.earned:
            return leader
        self.spent += price
        return hopeful

    def _hardly_tried(self, least: float) -> list[int]:
        """Arms that have not had their turns of the warm-up, and are not hopeless yet."""
        bounds = {arm: own.rate + OPTIMISM["ucb"] * own.error for arm, own in enumerate(self.known)}
        return [arm for arm, own in enumerate(self.known) if own.turns < WARM_UP - 0.5 and bounds[arm] >= least]

    def _hope(self, arm: int) -> float:
        """How fast this arm may be."""
        luck = 1.0 if self.method == "ucb" else self._chance.gauss(0, 1)
        return self.known[arm].rate + OPTIMISM[self.method] * luck * self.known[arm].error

    def _price(self, arm: int, leader: int) -> float:
        """The tokens that a turn of this arm will probably lose."""
        known = self.known[arm]
        return (self.known[leader].rate - known.rate) * known.seconds / known.turns if known.turns else 0.0

    def as_dict(self) -> dict[str, Any]:
        """What was learnt, as plain data."""
        found: dict[str, Any] = {name: getattr(self, name) for name in ("arm", "turns", "spent", "earned")}
        return found | {name: [asdict(own) for own in getattr(self, name)] for name in ("known", "recent")}

    def recall(self, kept: dict[str, Any]) -> None:
        """Take over what was learnt; KeyError, TypeError, ValueError or OverflowError if it is nothing of the kind."""
        self.arm, self.turns = int(kept["arm"]), int(kept["turns"])
        self.spent, self.earned = float(kept["spent"]), float(kept["earned"])
        self.known, self.recent = ([Evidence(**own) for own in kept[name]] for name in ("known", "recent"))
        sums = [value + 0.0 for own in self.known + self.recent for value in vars(own).values()]
        if not len(self.known) == len(self.recent) == self.arms > self.arm >= 0:
            raise ValueError("it is about other arms")
        if not all(0 <= value < math.inf for value in (*sums, self.turns, self.spent, self.earned)):
            raise ValueError("its numbers are none")


@dataclass
class Bandit(TreePolicy):
    """Plays several policies, a few cycles at a time, and learns which makes most tokens per second.

    Nothing here is from the papers. Plain decoding is always among the arms. What was learnt goes over from text to
    text, and with `state` from run to run.
    """

    uses_costs: ClassVar[bool] = True  # `auto` may be an arm

    arms: str | None = option(None, f"policies and presets with + between, settings after : (or @); none: {ARMS}")
    method: str = option("ucb", "how uncertain arms are tried: upper bounds or draws", choices=("ucb", "thompson"))
    block: int = option(4, "cycles of a turn", low=1)
    explore: float = option(0.01, "share of the tokens that may be lost by trying slower arms", low=0, high=1)
    memory: float = option(2000.0, "cycles after which evidence has faded", low=10)
    state: str | None = option(None, "file in which what was learnt is kept between runs; none: it is forgotten")

    def __post_init__(self) -> None:
        super().__post_init__()
        made = parse_arms(self.arms or ARMS)
        self.labels, self._arms = list(made), list(made.values())
        self.chooser = Chooser(len(made), self.method, self.block, self.explore, self.memory)
        self._recall()
        self._playing = self.chooser.arm
        self._opened = False  # whether this text has been drafted for

    def fresh(self) -> Bandit:
        other = copy.copy(self)  # shares the chooser
        other._arms = [arm.fresh() for arm in self._arms]
        other._opened = False
        return other

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        if len(tree) == 1:
            self._playing = self.chooser.arm
        return self._arms[self._playing].grow(tree, ctx)

    def select(self, tree: DraftTree, ctx: Context) -> Tensor:
        return self._arms[self._playing].select(tree, ctx)

    def observe(self, step: Step) -> None:
        self._arms[self._playing].observe(step)
        if self._opened or not step.draft_passes:  # the first draft takes in the whole prompt, which is no arm's fault
            self.chooser.observe(self._playing, step.accepted + 1, step.seconds.total)
        self._opened = self._opened or bool(step.draft_passes)
        if step.finish:
            self._remember()

    def _recall(self) -> None:
        """Go on from what an earlier run learnt."""
        if self.state is None:
            return
        file = Path(self.state)
        if not file.exists():
            make_folder(file.parent)
            return
        text = read_text(file)
        try:
            kept = json.loads(text)
            labels = list(map(str, kept["arms"]))
            if labels == self.labels:
                self.chooser.recall(kept)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise InputError(f"'{file}' is not what a bandit has learnt; give another name, or remove it") from error
        if labels != self.labels:
            raise InputError(f"'{file}' is about the arms {'+'.join(labels)}; use these, or give another name")

    def _remember(self) -> None:
        if self.state is None:
            return
        kept = {"arms": self.labels, **self.chooser.as_dict()}
        with suppress(InputError):  # a text is worth more than what was learnt from it
            replace_text(Path(self.state), json.dumps(kept, indent=1))


def parse_arms(text: str) -> dict[str, TreePolicy]:
    """`"none+beam:depth=4+eagle-2"` → policies under these names, plain decoding among them."""
    from windfall import registry

    labels = [label.strip() for label in re.split(r"[+,]", text)]
    if not all(labels):
        raise InputError(f"write arms with + between, for example {ARMS}, not {text!r}")
    known, made = registry.policies(), dict[str, TreePolicy]()
    for label in dict.fromkeys([PLAIN, *labels]):
        name, *settings = re.split("[:@]", label)
        if name == "bandit":
            raise InputError("a bandit cannot be an arm of a bandit")
        make = registry.policy if name in known else registry.preset
        made[label] = make(name, **split_settings(settings))
    return made
