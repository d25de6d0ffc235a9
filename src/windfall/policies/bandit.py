"""A bandit over policies: it plays the one that has lately made most tokens per second here. See docs/learned.md."""

from __future__ import annotations

import copy
import json
import math
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from windfall.core.errors import InputError
from windfall.core.files import make_folder, read_text, replace_text
from windfall.core.options import option, split_settings
from windfall.core.tree import DraftTree
from windfall.core.types import Grow, Step
from windfall.policies.base import TreePolicy
from windfall.policies.context import Context

PLAIN = "none"
ARMS = "none+chain:depth=4+beam:depth=4:k=4:nodes=16+eagle-3+auto"
WARM_UP = 4  # turns of every arm to begin with, unless it is hopeless
HOPELESS = 3.0  # standard errors that it then lies below the fastest
OPTIMISM = 0.75  # times the bonus of MOSS, √(2 ln(share / turns)) standard errors
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
    def deviation(self) -> float:
        """How far a turn's tokens lie from those expected of its seconds, as a share of a usual turn's."""
        rate, usual = self.rate, self.tokens / self.turns
        residue = max(self.squares - 2 * rate * self.products + rate * rate * self.times, 0.0)
        return math.sqrt((residue / (usual * usual) + PRIOR * SPREAD * SPREAD) / (self.turns + PRIOR))

    def error(self, rate: float) -> float:
        """The standard error of this arm's rate, if it were this one."""
        return rate * self.deviation / math.sqrt(self.turns) if self.turns and self.tokens else math.inf


@dataclass
class Chooser:
    """Which arm to play, a turn of `block` cycles at a time.

    It plays the fastest arm so far, and another where that may be faster still (MOSS: the upper bound's width shrinks
    to nothing as the arm gets its share of what is remembered). What such turns have lost, or gained, is booked as it
    was measured, and no more than a small share of the time may be lost. Evidence fades; where an arm's last turns
    contradict those before, everything is learnt anew. What this can promise, and what it cannot: docs/learned.md.
    """

    arms: int
    block: int = 4
    explore: float = 0.0125
    memory: float = 2000.0
    arm: int = 0  # playing now
    turns: int = 0
    lost: float = 0.0  # seconds, by trying others
    played: float = 0.0  # seconds in all
    known: list[Evidence] = field(default_factory=list)  # of each arm
    recent: list[Evidence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._cycles: list[tuple[float, float]] = []  # tokens and seconds of this turn
        self._rival = 0.0  # the rate that this turn should have, or it loses; 0: it is not a trial
        if not self.known:
            self._begin()

    def _begin(self) -> None:
        self.known, self.recent = ([Evidence() for _ in range(self.arms)] for _ in range(2))
        self.arm, self.turns, self.lost, self.played = 0, 0, 0.0, 0.0

    def observe(self, arm: int, tokens: float, seconds: float) -> None:
        """A cycle's tokens and seconds; after enough of them, the next arm's turn comes."""
        if arm != self.arm or seconds <= 0:  # a batch mate's, begun in the turn before
            return
        self._cycles.append((tokens, seconds))
        if len(self._cycles) >= self.block:
            self._end_turn()

    def _end_turn(self) -> None:
        tokens, seconds = self._made()
        self._book(tokens, seconds)
        fading = math.exp(-self.block / self.memory)
        for evidence in self.known:
            evidence.fade(fading)
        lately = self.recent[self.arm]
        lately.fade(1 - 1 / LATELY)
        for evidence in (self.known[self.arm], lately):
            evidence.add(tokens, seconds)
        self.lost, self.played = self.lost * fading, self.played * fading + seconds
        self.turns += 1
        if self._contradicted():
            contradicting = self.arm
            self._begin()
            self.known[contradicting] = lately  # all that is known of how things are now
        self.arm = self._next()

    def _made(self) -> tuple[float, float]:
        """The turn's tokens and seconds, hiccups cut."""
        known, times = self.known[self.arm], sorted(seconds for _, seconds in self._cycles)
        usual = known.seconds / known.turns / self.block if known.turns else times[(len(times) - 1) // 2]
        tokens = sum(tokens for tokens, _ in self._cycles)
        self._cycles = []
        return tokens, sum(min(seconds, HICCUP * usual) for seconds in times)

    def _book(self, tokens: float, seconds: float) -> None:
        if not self.played:  # the first turn: as if this had gone on for long
            self.played = seconds * self.memory / self.block
        if self._rival:  # a trial that gained pays for others, within limits
            self.lost = max(self.lost + seconds - tokens / self._rival, -self.explore * self.played)

    def _contradicted(self) -> bool:
        known, lately = self.known[self.arm], self.recent[self.arm]
        if known.turns < 2 * LATELY or lately.turns < LATELY / 2:
            return False
        return abs(lately.rate - known.rate) > ALARM * math.hypot(lately.error(lately.rate), known.error(known.rate))

    def _next(self) -> int:
        leader = max(range(self.arms), key=lambda arm: self.known[arm].rate)
        top, self._rival = self.known[leader].rate, 0.0
        warm = self.turns >= WARM_UP * self.arms
        if not warm and (new := self._hardly_tried(top)):
            return min(new, key=lambda arm: self.known[arm].turns)
        hopeful = max(range(self.arms), key=lambda arm: self._hope(arm, top))
        if hopeful == leader or self.lost + self._price(hopeful, top) > self.explore * self.played:
            return leader
        self._rival = top if warm else 0.0
        return hopeful

    def _hardly_tried(self, top: float) -> list[int]:
        """Arms that have not had their turns of the warm-up, and are not hopeless yet."""
        bounds = [own.rate + HOPELESS * own.error(top) for own in self.known]
        return [arm for arm, own in enumerate(self.known) if own.turns < WARM_UP - 0.5 and bounds[arm] >= top]

    def _hope(self, arm: int, top: float) -> float:
        """How fast this arm may be. Its noise is taken to be a fast arm's: an unlucky one looks slow and calm."""
        known = self.known[arm]
        if not known.turns:
            return math.inf
        share = self.memory / self.block / self.arms  # turns
        return known.rate + OPTIMISM * math.sqrt(2 * max(math.log(share / known.turns), 0.0)) * known.error(top)

    def _price(self, arm: int, top: float) -> float:
        """The seconds that a turn of this arm will probably lose."""
        known = self.known[arm]
        return (1 - known.rate / top) * known.seconds / known.turns if known.turns else 0.0

    def as_dict(self) -> dict[str, Any]:
        """What was learnt, as plain data."""
        found: dict[str, Any] = {name: getattr(self, name) for name in ("arm", "turns", "lost", "played")}
        return found | {name: [asdict(own) for own in getattr(self, name)] for name in ("known", "recent")}

    def recall(self, kept: dict[str, Any]) -> None:
        """Take over what was learnt; KeyError, TypeError, ValueError or OverflowError if it is nothing of the kind."""
        self.arm, self.turns = int(kept["arm"]), int(kept["turns"])
        self.lost, self.played = float(kept["lost"]), float(kept["played"])
        self.known, self.recent = ([Evidence(**own) for own in kept[name]] for name in ("known", "recent"))
        sums = [value + 0.0 for own in self.known + self.recent for value in vars(own).values()]
        if not len(self.known) == len(self.recent) == self.arms > self.arm >= 0:
            raise ValueError("it is about other arms")
        if not all(0 <= value < math.inf for value in (*sums, self.turns, self.played)) or not math.isfinite(self.lost):
            raise ValueError("its numbers are none")


@dataclass
class Bandit(TreePolicy):
    """Plays several policies, a few cycles at a time, and learns which makes most tokens per second.

    Nothing here is from the papers. Plain decoding is always among the arms. What was learnt goes over from text to
    text, and with `state` from run to run.
    """

    uses_costs: ClassVar[bool] = True  # `auto` may be an arm

    arms: str | None = option(None, f"policies and presets with + between, settings after : (or @); none: {ARMS}")
    block: int = option(4, "cycles of a turn", low=1)
    explore: float = option(0.0125, "share of the time that may be lost by trying slower arms", low=0, high=1)
    memory: float = option(2000.0, "cycles after which evidence has faded", low=10)
    state: str | None = option(None, "file in which what was learnt is kept between runs; none: it is forgotten")

    def __post_init__(self) -> None:
        super().__post_init__()
        made = parse_arms(self.arms or ARMS)
        self.labels, self._arms = list(made), list(made.values())
        self.chooser = Chooser(len(made), self.block, self.explore, self.memory)
        self._recall()
        self._playing = self.chooser.arm
        self._opened = False  # whether this text has been drafted for

    def fresh(self) -> Bandit:
        other = copy.copy(self)  # shares the chooser
        other._arms = [arm.fresh() for arm in self._arms]
        other._opened = False
        return other

    def rehearsal(self) -> Bandit:
        other = super().rehearsal()
        other.state = None
        return other

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        if len(tree) == 1:
            self._playing = self.chooser.arm
        return self._arms[self._playing].grow(tree, ctx)

    def select(self, tree: DraftTree, ctx: Context) -> Tensor:
        return self._arms[self._playing].select(tree, ctx)

    def observe(self, step: Step) -> None:
        self._arms[self._playing].observe(step)
        warm = self._opened or not step.draft_passes  # the first draft takes in the prompt, which is no arm's fault
        if warm and not step.recorded:
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
        name, settings = registry.split_name(re.split("[:@]", label))
        if name == "bandit":
            raise InputError("a bandit cannot be an arm of a bandit")
        make = registry.policy if name in known or ":" in name else registry.preset
        made[label] = make(name, **split_settings(settings))
    return made
