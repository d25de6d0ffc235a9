"""C2T's classifier on the device: which of the children that a pass drafted stay."""

from __future__ import annotations

import torch
from torch import Tensor

from windfall.policies.papers.classifiers import SCALE, Classifier


class Sieve:
    """What `Classifier` and `c2t_inputs` compute, with torch."""

    def __init__(self, classifier: Classifier, beta: float, device: torch.device):
        self.beta, self.entropy = beta, classifier.entropy
        self._own = {name: torch.from_numpy(array).to(device) for name, array in classifier.weights.items()}

    def __call__(self, scores: Tensor, depth: Tensor, entropy: Tensor | None) -> Tensor:
        """Scores [w, k] of children, their depth [w] and the entropy [w] of what each row's were drawn from, if it is
        shown: whether they stay [w, k]."""
        rows = [depth / SCALE] if entropy is None else [entropy, depth / SCALE]
        inputs = torch.stack([scores.exp(), *(row[:, None].expand_as(scores) for row in rows)], -1)  # [w, k, 2 or 3]
        own = self._own
        hidden = (inputs @ own["hidden"].T + own["hidden_bias"]).relu()
        verdict: Tensor = (hidden @ own["output"] + own["output_bias"]).sigmoid() > self.beta
        return verdict
