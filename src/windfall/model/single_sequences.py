"""Passes of transformers models without their check for packed sequences.

Without a cache and a mask, transformers checks whether a row of the batch holds several sequences. It reads the answer
from the device, so the host would wait for all work that is queued there.
"""

from __future__ import annotations

from typing import Any

from transformers import masking_utils

from windfall.model.while_used import WhileUsed

CHECK = "find_packed_sequence_indices"  # transformers' function
_theirs: Any = getattr(masking_utils, CHECK, None)


def _replace(function: Any) -> None:
    if _theirs is not None:
        setattr(masking_utils, CHECK, function)


def _none_packed(position_ids: Any) -> None:
    """Transformers' answer for rows with one sequence each."""


_replaced = WhileUsed(lambda: _replace(_none_packed), lambda: _replace(_theirs))
single_sequences = _replaced.block  # in such a block, every row of a batch is one sequence
