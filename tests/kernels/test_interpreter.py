"""Runs the tests of kernels under Triton's interpreter. Files share a process, because its start takes long."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers.interpreter import INTERPRETED

HERE = Path(__file__).parent
GROUPS = {  # of about the same length
    "kernels": [HERE / "test_kernels.py"],
    "others": [
        HERE / f"test_{name}.py" for name in ("batch", "cutoff", "experts", "families", "pages", "tree_kernels")
    ],
}
GROUPS["others"].append(HERE.parent / "engine" / "test_one_hash.py")


@pytest.mark.skipif(INTERPRETED or find_spec("triton") is None, reason="this is the interpreter, or there is no Triton")
@pytest.mark.parametrize("group", GROUPS)
def test_under_the_interpreter(group: str) -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they load long
    run = subprocess.run([*command, *map(str, GROUPS[group])], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_file_with_kernels_is_in_a_group() -> None:
    named = {file.name for group in GROUPS.values() for file in group} | {Path(__file__).name, "test_few_rows.py"}
    named |= {"test_layer_kernels.py", "test_module_product.py", "test_packed.py"}
    assert {file.name for file in HERE.glob("test_*.py")} <= named  # a kernel in C needs no interpreter
