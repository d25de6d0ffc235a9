"""Passes of transformers models without their check for packed sequences.

Without a cache and a mask, transformers looks whether a row of the batch holds several sequences after each other. It
reads the answer from the device, so the host would wait for all that runs there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import masking_utils

CHECK = "find_packed_sequence_indices"  # transformers' function
_lock = threading.Lock()
_blocks: list[None] = []  # one for each block that is entered, in all threads
_theirs: Any = getattr(masking_utils, CHECK, None)


@contextmanager
def single_sequences() -> Iterator[None]:
    """In this block every row of a batch is one sequence."""
    with _lock:
        if not _blocks and _theirs is not None:
            setattr(masking_utils, CHECK, _none_packed)
        _blocks.append(None)
    try:
        yield
    finally:
        with _lock:
            _blocks.pop()
            if not _blocks and _theirs is not None:
                setattr(masking_utils, CHECK, _theirs)


def _none_packed(position_ids: Any) -> None:
    """Transformers' answer for rows with one sequence each."""
