"""What `import windfall` does."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="set on Linux and x86 only")
@pytest.mark.parametrize(
    ("given", "expected"), [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, None)]
)
def test_threads_that_wait_do_not_spin_for_long(given: dict[str, str], expected: str | None) -> None:
    own = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "import sys, windfall, os; print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**own, **given}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", str(expected)]
