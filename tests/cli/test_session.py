"""What the commands share."""

from __future__ import annotations

import gc

from windfall.cli.session import freeze_objects


def test_present_objects_are_exempt_from_garbage_collection() -> None:
    before = gc.get_freeze_count()
    try:
        freeze_objects()
        assert gc.get_freeze_count() > max(before, 10_000)  # torch alone has more
    finally:
        gc.unfreeze()
