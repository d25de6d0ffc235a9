"""A policy's tree, described once. The host interprets a Plan node by node; the GPU runs it in fixed buffers.

A Plan has four sizes, the rule by which the nodes of a draft pass are chosen, and a decision after each pass. The
decision sees the tree through a TreeView and keeps no state between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from windfall.core.tree import Floats
from windfall.policies.context import Context
from windfall.policies.shape import Shape

ORDERS = ("level", "best")
SIZES = (4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320)  # rows of verify passes, where any number may be wanted
WATCHABLE = ("summary", "score", "logq", "expanded", "entropy", "length")
WATCHABLE_IN_SELECTIVE = ("summary", "length")  # the other arrays have no fixed layout where nodes leave the tree


class NotWatched(LookupError):
    """A decision reads something that its plan does not watch."""

    def __init__(self, name: str):
        super().__init__(f"a decision reads {name!r}, which its plan does not watch: add it to Plan(watches=...)")


class Decision(NamedTuple):
    """What follows a draft pass."""

    go_on: bool  # draft another pass
    rows: int  # rows to verify if drafting ends here, the root counted
    levels: int | None = None  # only nodes of the first `levels` passes are verified; None: of all


class Opening(NamedTuple):
    """How a cycle begins."""

    passes: int  # draft passes that run without a decision
    rows: int  # rows to verify if no decision follows


class Summary(NamedTuple):
    """The tree after a draft pass, in six numbers. A node's key is its path log-probability, or what the Plan says."""

    best: float  # the highest key among the nodes of the next pass; -inf: there are none
    total: float  # the log of their summed path probabilities
    gain: float  # calibrated plans: expected tokens from the next pass, less the price of the pass and of its rows
    worth: float  # calibrated plans: drafted nodes whose chance of acceptance exceeds the price of a row
    nodes: float  # nodes in the tree, the root counted
    mass: float  # plans with `top`: the summed path probability of the best `top` nodes


class TreeView(Protocol):
    """What a decision may look at: the tree on the host, or the part that the device reports.

    A level is a draft pass: level 1 holds the children of the root. Only what the plan watches is available.
    """

    @property
    def length(self) -> int:
        """Committed tokens, the root included (watch "length")."""

    def summary(self, level: int) -> Summary:
        """The tree after this pass (watch "summary")."""

    def scores(self, level: int) -> Floats:
        """Path log-probabilities of the nodes that this pass drafted (watch "score")."""

    def all_scores(self, level: int) -> Floats:
        """The same for all drafted nodes up to this pass."""

    def parent_score(self, level: int) -> float:
        """The path log-probability of the likeliest node that this pass expanded (watch "score" and "expanded")."""

    def logq(self, level: int) -> Floats:
        """Log-probabilities of the children of that node (watch "logq")."""

    def entropies(self, level: int) -> Floats:
        """The drafter's entropy in nats after each node that this pass expanded, likeliest first (watch "entropy")."""


class LayerGate(NamedTuple):
    """TALON's rule: a candidate of the newest level stays if it is likely enough beside the level's best."""

    share: float  # of the best candidate's path probability
    budget: int  # nodes of the whole tree, the root counted
    first: int  # nodes of a level before the gate is used
    levels: int  # levels before it is used


class Bounds(NamedTuple):
    """Which nodes are expanded, and into how many children. Scores are path log-probabilities."""

    floor: float  # a node with a lower score is not expanded
    ordinary: float  # a node of this depth or deeper is expanded only if its score is above `deep`
    deep: float
    sure: float  # a node whose best child has at least this probability keeps `narrow` children,
    unsure: float  # one whose best child has less than this keeps `wide`, others `middle`
    narrow: int
    middle: int
    wide: int
    first: int  # the root keeps at most this many children; it is always expanded


class NodeFilter(Protocol):
    """Decides which drafted nodes stay in the tree. It is called with numpy arrays or with tensors."""

    entropy: bool  # whether it reads the drafter's entropy

    @property
    def key(self) -> object:
        """Identifies the filter: equal keys mean the same filter."""

    def weights(self) -> dict[str, Any]:
        """Numpy arrays that `keeps` reads; the GPU copies them once."""

    def keeps(self, weights: dict[str, Any], score: Any, depth: Any, entropy: Any) -> Any:
        """Whether nodes with these path log-probabilities, depths and (before them) entropies stay."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """How a tree grows: at most `passes` draft passes, each over at most `width` nodes with `k` children.

    Nodes of a pass: the best of the newest level (`order="level"`) or of all unexpanded nodes (`order="best"`), by
    path probability. `decide` is called after the passes in `asks`; the passes of `opening(ctx)` run before it is first
    called, or are all passes of the cycle where there is no `decide`. In the end the best rows are verified.
    """

    passes: int
    width: int
    k: int
    rows: int
    order: str = "level"
    # which nodes count
    calibrated: bool = False  # by the calibrated acceptance of their path instead of its draft probability
    decay: float = 1.0  # factor on the path probability for each level
    shape: Callable[[Context], Shape] | None = None  # a fixed shape: its nodes, all of them verified
    top: int | None = None  # expand only nodes among the best `top` of the tree, if they are better than the last
    include_last: bool = False  # expand the last of these too, while fewer than `top` nodes have been chosen
    layer: LayerGate | None = None
    bounds: Callable[[], Bounds] | None = None  # which nodes are expanded, and into how many children
    floor: Callable[[Context], float] | None = None  # nodes with this key or less leave the tree
    keep: NodeFilter | None = None
    max_depth: int | None = None  # deeper nodes are not drafted
    first_come: bool = False  # verify the first `rows` nodes in breadth-first order instead of the best
    expanded_only: bool = False  # verify only nodes that were chosen for expansion
    # decisions
    watches: tuple[str, ...] = ()
    decide: Callable[[int, TreeView, Context], Decision] | None = None
    asks: Collection[int] | None = None  # None: after every pass but the last
    opening: Callable[[Context], Opening] | None = None  # None: the passes before the first in `asks`, and `rows`
    lookahead: bool = False  # decide about the pass after the next, while the next one runs
    suits: Callable[[Context], bool] | None = None  # whether the plan is right at these costs; None: always
    prices: Callable[[Context], tuple[float, float]] | None = None  # calibrated: pass and row, in tokens
    # for graphs that are captured before they are needed
    openings: Collection[int] = ()  # all numbers of passes that `opening` may return
    sizes: Collection[int] = ()  # all numbers of rows that it or `decide` may return; more nodes take the next size

    def __post_init__(self) -> None:
        if problem := self._problem():
            raise ValueError(f"this plan cannot be followed: {problem}")

    def _problem(self) -> str:
        """What contradicts itself in this plan; nothing if all is well."""
        if self.order not in ORDERS:
            return f"order must be one of {ORDERS}, not {self.order!r}"
        if unknown := sorted(set(self.watches) - set(WATCHABLE)):
            return f"watches may be {WATCHABLE}, not {unknown}"
        if self.decide is None and (self.asks is not None or self.watches):
            return "asks and watches need a decide function"
        if self.decide is not None and not self.watches:
            return f"decide must watch something; watches may be {WATCHABLE}"
        rules = [name for name in ("shape", "top", "layer", "bounds", "keep") if getattr(self, name) is not None]
        if len(rules) > 1:
            return f"only one of shape, top, layer, bounds and keep can be given, not {rules}"
        if self.selective and not set(self.watches) <= set(WATCHABLE_IN_SELECTIVE):
            return f"with top or layer, watches may be {WATCHABLE_IN_SELECTIVE}, not {self.watches}"
        if self.keep is not None and (
            self.order != "level" or self.calibrated or self.floor is not None or self.decay != 1.0
        ):
            return "keep needs order 'level' and keys that are path probabilities (no calibrated, floor or decay)"
        if self.calibrated != (self.prices is not None):
            return "calibrated plans need prices, other plans have none"
        if self.calibrated and (rules or self.floor is not None or self.decay != 1.0):
            return f"calibrated cannot be combined with {rules or 'floor or decay'}"
        return ""

    @property
    def selective(self) -> bool:
        """Whether some of the drafted nodes leave the tree after each pass."""
        return self.top is not None or self.layer is not None

    @property
    def asked(self) -> Collection[int]:
        """The passes after which `decide` is called."""
        if self.decide is None:
            return ()
        return range(1, self.passes) if self.asks is None else self.asks

    def begin(self, ctx: Context) -> Opening:
        """How this cycle begins."""
        if self.opening is None:
            return Opening(min(self.asked, default=self.passes), self.rows)
        passes, rows = self.opening(ctx)
        return Opening(min(passes, self.passes), min(rows, self.rows))

    def decision(self, level: int, view: TreeView, ctx: Context) -> Decision:
        """What follows this pass."""
        if self.decide is not None and level in self.asked:
            found = self.decide(level, view, ctx)
            return found if level < self.passes else found._replace(go_on=False)
        return Decision(level < self.passes, self.rows)
