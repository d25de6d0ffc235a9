"""The logits after a text have the same hash in every pass, whatever other rows the pass contains.

The Triton kernels run here under Triton's interpreter on a tiny model. tests/gpu checks the same on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from helpers.exact import check_one_hash
from helpers.interpreter import INTERPRETED
from helpers.tiny import tiny


@pytest.mark.skipif(not INTERPRETED, reason="torch's products on a CPU depend on the number of rows")
def test_logits_have_one_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_PROGRAMS_SMALL", "MAX_PROGRAMS"):  # each program takes long here
        monkeypatch.setattr(f"windfall.kernels.triton.path_attention.{name}", 4)
    model = tiny(dtype=torch.float16, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    check_one_hash(model, 70, (1, 7, 7), (64, 33, 64), pairs=True)
