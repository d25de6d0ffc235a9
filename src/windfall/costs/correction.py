"""How far the acceptance of one request differs from the calibrated estimate."""

from __future__ import annotations

import numpy as np

from windfall.core.types import Step
from windfall.costs.acceptance import Calibrator, Floats, outcomes

PRIOR_INFORMATION = 2.0  # weight of the neutral start; a node with an even chance counts 0.25
MEMORY = 0.96  # share of the information that is kept per cycle, because the text changes
RETURN = 0.99  # share of the shift that is kept after a cycle that verified no drafted node
MAX_SHIFT = 4.0  # log-odds
FIT_EVERY_CYCLES = 4  # a changed shift must be copied to the device


class Correction:
    """A shift of one request's acceptance chances, in log-odds. It starts at 0 and is fitted online.

    The calibrator learns slowly, from all texts. The drafter may stay confident in a text that it cannot follow, or be
    too modest in a text that it can follow. One number per request, fitted by Newton steps on the logistic loss with
    older cycles weighing less, shows this within a dozen cycles.
    """

    def __init__(self) -> None:
        self.shift = 0.0  # to be added to the log-odds of acceptance
        self._information = self._slope = 0.0
        self._unread = 0

    def observe(self, step: Step, calibrator: Calibrator) -> None:
        """Learn from a cycle, before the calibrator does."""
        if len(step.tree) == 1:
            self.learn(np.zeros(0), np.zeros(0))
            return
        nodes, accepted = outcomes(step)
        self.learn(calibrator.chances(step.tree, self.shift)[nodes - 1], accepted)

    def learn(self, chances: Floats, accepted: Floats) -> None:
        """Learn from the verified nodes of a cycle whose parents were accepted: their chances and 1.0 or 0.0."""
        self.add(float((accepted - chances).sum()), float((chances * (1 - chances)).sum()), len(chances) > 0)

    def add(self, slope: float, information: float, drafted: bool = True, fit: bool = False) -> None:
        """The same from the sums over these nodes of accepted - chance and of chance * (1 - chance).

        `fit`: change the shift at once.
        """
        self._unread += 1
        if drafted:
            self._slope += slope
            self._information = MEMORY * self._information + information
        else:
            self.shift *= RETURN
        if fit or self._unread >= FIT_EVERY_CYCLES:
            moved = self.shift + self._slope / (PRIOR_INFORMATION + self._information)
            self.shift = min(max(moved, -MAX_SHIFT), MAX_SHIFT)
            self._slope, self._unread = 0.0, 0
