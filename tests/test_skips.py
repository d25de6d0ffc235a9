"""The plugin that makes skips failures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import skips

TESTS = """
import pytest

@pytest.mark.skipif(True, reason="nginx is not installed")
def test_a_program(): ...

def test_a_package():
    pytest.importorskip("a_package_that_nobody_has")

@pytest.fixture
def browser():
    pytest.skip("Chromium is not installed")

def test_a_fixture(browser): ...

@pytest.mark.skipif(True, reason="starts a cluster; RUN_RAY=1 runs it")
def test_that_is_run_on_request(): ...

@pytest.mark.xfail
def test_that_is_known_to_fail():
    raise ValueError

def test_that_runs(): ...
"""
WHOLE_FILE = 'import pytest\npytest.importorskip("another_package", reason="Ray is not installed")\ndef test(): ...\n'


@pytest.mark.parametrize(
    ("value", "counts"),
    [
        ("", "1 passed, 5 skipped, 1 xfailed"),
        ("programs", "1 failed, 1 passed, 2 skipped, 1 xfailed, 2 errors"),
        ("all", "1 failed, 1 passed, 1 skipped, 1 xfailed, 3 errors"),
    ],
)
def test_a_skip_for_want_of_something_is_a_failure_on_request(value: str, counts: str, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_whole.py").write_text(WHOLE_FILE)
    command = [sys.executable, "-m", "pytest", "-p", "skips", "-p", "no:cacheprovider", "--rootdir", ".", "-rs"]
    path = os.pathsep.join((str(Path(skips.__file__).parent), os.environ.get("PYTHONPATH", "")))
    own = {"PYTHONPATH": path, skips.VARIABLE: value, "PYTEST_ADDOPTS": "--continue-on-collection-errors"}
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **own}, capture_output=True, text=True)
    *_, summary = done.stdout.splitlines()
    assert f" {counts} in " in summary and done.returncode == bool(value), done.stdout
