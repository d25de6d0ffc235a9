"""A bandit over policies: it uses the one with the most tokens per second so far. See docs/learned.md."""

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
WARM_UP_TURNS = 4  # of every arm, unless it is clearly slower
CLEARLY_SLOWER = 3.0  # standard errors below the fastest arm
BONUS_FACTOR = 0.75  # on the bonus of MOSS, √(2 ln(share / turns)) standard errors
PRIOR_TURNS = 4.0  # weight of PRIOR_DEVIATION
PRIOR_DEVIATION = 0.35  # of a turn's tokens, as a share of their mean
RECENT_TURNS = 12.0  # compared with earlier turns to detect a change
CHANGE_THRESHOLD = 4.0  # standard errors between recent and earlier turns
MAX_CYCLE_RATIO = 5.0  # a cycle's seconds are clipped to this multiple of the mean


@dataclass
class Evidence:
    """Decaying sums over an arm's turns: their number, tokens, seconds, and the products that a variance needs."""

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
        """The standard deviation of a turn's tokens given its seconds, as a share of a mean turn's tokens."""
        rate, usual = self.rate, self.tokens / self.turns
        residue = max(self.squares - 2 * rate * self.products + rate * rate * self.times, 0.0)
        return math.sqrt(
            (residue / (usual * usual) + PRIOR_TURNS * PRIOR_DEVIATION * PRIOR_DEVIATION) / (self.turns + PRIOR_TURNS)
        )

    def error(self, rate: float) -> float:
        """The standard error of this arm's rate if the rate were this."""
        return rate * self.deviation / math.sqrt(self.turns) if self.turns and self.tokens else math.inf


@dataclass
class Chooser:
    """Chooses the arm of each turn; a turn is `block` cycles.

    It chooses the fastest arm so far, or another arm whose upper confidence bound is higher (MOSS). The time lost in
    such trials is measured and limited to a share `explore` of the time. Old evidence decays. If an arm's recent turns
    contradict earlier ones, all arms are measured again. docs/learned.md says what this guarantees.
    """

    arms: int
    block: int = 4
    explore: float = 0.0125
    memory: float = 2000.0
    arm: int = 0  # of the current turn
    turns: int = 0
    lost: float = 0.0  # seconds lost in trials
    played: float = 0.0  # seconds of all turns
    known: list[Evidence] = field(default_factory=list)  # of each arm
    recent: list[Evidence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._cycles: list[tuple[float, float]] = []  # tokens and seconds of this turn
        self._rival = 0.0  # in a trial, the rate of the fastest arm; 0: this turn is not a trial
        if not self.known:
            self._begin()

    def _begin(self) -> None:
        self.known, self.recent = ([Evidence() for _ in range(self.arms)] for _ in range(2))
        self.arm, self.turns, self.lost, self.played = 0, 0, 0.0, 0.0

    def observe(self, arm: int, tokens: float, seconds: float) -> None:
        """Add a cycle's tokens and seconds; the turn ends after `block` cycles."""
        if arm != self.arm or seconds <= 0:  # another sequence of the batch began this cycle in an earlier turn
            return
        self._cycles.append((tokens, seconds))
        if len(self._cycles) >= self.block:
            self._end_turn()

    def _end_turn(self) -> None:
        tokens, seconds = self._turn_totals()
        self._add_trial_loss(tokens, seconds)
        fading = math.exp(-self.block / self.memory)
        for evidence in self.known:
            evidence.fade(fading)
        lately = self.recent[self.arm]
        lately.fade(1 - 1 / RECENT_TURNS)
        for evidence in (self.known[self.arm], lately):
            evidence.add(tokens, seconds)
        self.lost, self.played = self.lost * fading, self.played * fading + seconds
        self.turns += 1
        if self._changed():
            contradicting = self.arm
            self._begin()
            self.known[contradicting] = lately  # the only evidence since the change
        self.arm = self._next()

    def _turn_totals(self) -> tuple[float, float]:
        """The turn's tokens and seconds; the seconds of outliers are clipped."""
        known, times = self.known[self.arm], sorted(seconds for _, seconds in self._cycles)
        usual = known.seconds / known.turns / self.block if known.turns else times[(len(times) - 1) // 2]
        tokens = sum(tokens for tokens, _ in self._cycles)
        self._cycles = []
        return tokens, sum(min(seconds, MAX_CYCLE_RATIO * usual) for seconds in times)

    def _add_trial_loss(self, tokens: float, seconds: float) -> None:
        if not self.played:  # the first turn: start with a full memory of such turns
            self.played = seconds * self.memory / self.block
        if self._rival:  # a trial that gained time allows others, within limits
            self.lost = max(self.lost + seconds - tokens / self._rival, -self.explore * self.played)

    def _changed(self) -> bool:
        known, lately = self.known[self.arm], self.recent[self.arm]
        if known.turns < 2 * RECENT_TURNS or lately.turns < RECENT_TURNS / 2:
            return False
        return abs(lately.rate - known.rate) > CHANGE_THRESHOLD * math.hypot(
            lately.error(lately.rate), known.error(known.rate)
        )

    def _next(self) -> int:
        leader = max(range(self.arms), key=lambda arm: self.known[arm].rate)
        top, self._rival = self.known[leader].rate, 0.0
        warm = self.turns >= WARM_UP_TURNS * self.arms
        if not warm and (new := self._warming_up(top)):
            return min(new, key=lambda arm: self.known[arm].turns)
        hopeful = max(range(self.arms), key=lambda arm: self._upper_bound(arm, top))
        if hopeful == leader or self.lost + self._expected_loss(hopeful, top) > self.explore * self.played:
            return leader
        self._rival = top if warm else 0.0
        return hopeful

    def _warming_up(self, top: float) -> list[int]:
        """Arms that have not finished the warm-up and are not clearly slower."""
        bounds = [own.rate + CLEARLY_SLOWER * own.error(top) for own in self.known]
        return [arm for arm, own in enumerate(self.known) if own.turns < WARM_UP_TURNS - 0.5 and bounds[arm] >= top]

    def _upper_bound(self, arm: int, top: float) -> float:
        """The upper confidence bound of this arm's rate, with the noise of the fastest arm.

        An arm with a few unlucky turns would otherwise seem slow with little noise.
        """
        known = self.known[arm]
        if not known.turns:
            return math.inf
        share = self.memory / self.block / self.arms  # turns
        return known.rate + BONUS_FACTOR * math.sqrt(2 * max(math.log(share / known.turns), 0.0)) * known.error(top)

    def _expected_loss(self, arm: int, top: float) -> float:
        """The seconds that a turn of this arm will probably lose."""
        known = self.known[arm]
        return (1 - known.rate / top) * known.seconds / known.turns if known.turns else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The learnt state as plain data."""
        found: dict[str, Any] = {name: getattr(self, name) for name in ("arm", "turns", "lost", "played")}
        return found | {name: [asdict(own) for own in getattr(self, name)] for name in ("known", "recent")}

    def recall(self, kept: dict[str, Any]) -> None:
        """Restore a state from `as_dict`; damaged data is a KeyError, TypeError, ValueError or OverflowError."""
        self.arm, self.turns = int(kept["arm"]), int(kept["turns"])
        self.lost, self.played = float(kept["lost"]), float(kept["played"])
        self.known, self.recent = ([Evidence(**own) for own in kept[name]] for name in ("known", "recent"))
        sums = [value + 0.0 for own in self.known + self.recent for value in vars(own).values()]
        if not len(self.known) == len(self.recent) == self.arms > self.arm >= 0:
            raise ValueError("it is about other arms")
        if not all(0 <= value < math.inf for value in (*sums, self.turns, self.played)) or not math.isfinite(self.lost):
            raise ValueError("some of its numbers are negative or not finite")


@dataclass
class Bandit(TreePolicy):
    """Uses several policies in turns of a few cycles and learns which makes the most tokens per second.

    It is not from a paper. Plain decoding is always one of the arms. The learnt state is kept between texts, and with
    `state` between runs.
    """

    uses_costs: ClassVar[bool] = True  # `auto` may be an arm

    arms: str | None = option(None, f"policies and presets separated by +, with settings after : or @; default: {ARMS}")
    block: int = option(4, "cycles of a turn", low=1)
    explore: float = option(0.0125, "maximum share of the time that trials of slower arms may cost", low=0, high=1)
    memory: float = option(2000.0, "cycles over which old evidence decays", low=10)
    state: str | None = option(None, "file that keeps the learnt state between runs; default: none")

    def __post_init__(self) -> None:
        super().__post_init__()
        made = parse_arms(self.arms or ARMS)
        self.labels, self._arms = list(made), list(made.values())
        self.chooser = Chooser(len(made), self.block, self.explore, self.memory)
        self._load()
        self._playing = self.chooser.arm
        self._opened = False  # whether this text has had a draft

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
        warm = self._opened or not step.draft_passes  # the first draft also reads the prompt
        if warm and not step.recorded:
            self.chooser.observe(self._playing, step.accepted + 1, step.seconds.total)
        self._opened = self._opened or bool(step.draft_passes)
        if step.finish:
            self._save()

    def _load(self) -> None:
        """Load the state of an earlier run."""
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
            raise InputError(f"'{file}' is not the state file of a bandit; give another name, or remove it") from error
        if labels != self.labels:
            raise InputError(f"'{file}' is about the arms {'+'.join(labels)}; use these, or give another name")

    def _save(self) -> None:
        if self.state is None:
            return
        kept = {"arms": self.labels, **self.chooser.as_dict()}
        with suppress(InputError):  # a text must not fail because its state cannot be saved
            replace_text(Path(self.state), json.dumps(kept, indent=1))


def parse_arms(text: str) -> dict[str, TreePolicy]:
    """`"none+beam:depth=4+eagle-2"` → policies by these names, with plain decoding added."""
    from windfall import registry

    labels = [label.strip() for label in re.split(r"[+,]", text)]
    if not all(labels):
        raise InputError(f"separate arms with +, for example {ARMS}, not {text!r}")
    known, made = registry.policies(), dict[str, TreePolicy]()
    for label in dict.fromkeys([PLAIN, *labels]):
        name, settings = registry.split_name(re.split("[:@]", label))
        if name == "bandit":
            raise InputError("a bandit cannot be an arm of a bandit")
        is_preset = name not in known and (name in registry.presets() or name.endswith(".json"))
        make = registry.preset if is_preset else registry.policy
        made[label] = make(name, **split_settings(settings))
    return made
