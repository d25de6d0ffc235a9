"""Garbage collection in processes that work with many requests."""

from __future__ import annotations

import gc

COLLECTED_OBJECTS = 100_000  # new ones after which garbage is collected, with many requests


def freeze_objects() -> None:
    """Let garbage collection take little time, in a process that works with many requests from here on.

    Otherwise Python now and then looks through the hundreds of thousands of objects of torch and transformers, and all
    requests wait. Every round of a batch makes a few hundred objects, which are freed without a collection.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECTED_OBJECTS, *gc.get_threshold()[1:])
