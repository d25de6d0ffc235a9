"""Triton's interpreter, which runs kernels on a CPU: it must be asked for before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter does not multiply or round in bf16
outside = pytest.mark.skipif(
    INTERPRETED or find_spec("triton") is None, reason="this is the interpreter, or Triton is not installed"
)


def passes_under_the_interpreter(file: str) -> None:
    """Run a file's tests in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", file]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


if INTERPRETED and find_spec("triton"):
    from triton.runtime import interpreter

    plain = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: Any) -> None:
        """Triton before 3.9 takes int() of an array of one element as a loop's bound; numpy no longer allows it."""
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
