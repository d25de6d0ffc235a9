"""The contract of what an environment runs on: cycles of a beam, one decision at a time."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from windfall.policies.papers.ltd import View


class Outcome(NamedTuple):
    """What a cycle brought and cost."""

    tokens: int  # committed, the target's own included
    seconds: float
    passes: int
    nodes: int  # drafted and verified


class Backend(Protocol):
    """`begin`, then `draft` once or more, then `verify`; texts follow one another until there are no more."""

    passes: int  # of this cycle so far

    def begin(self) -> bool:
        """A new cycle, where the last one ended or in the next text; False: all texts are done."""

    def draft(self) -> bool:
        """One more pass of the beam; False: no candidates came, and none will."""

    def view(self, newest: bool) -> View:
        """The candidates of the last pass that brought some, or of all passes."""

    def verify(self, nodes: int, thinking: float) -> Outcome:
        """Judge the best so many candidates; `thinking`: seconds that the decisions took."""

    def close(self) -> None:
        """No more cycles are wanted."""
