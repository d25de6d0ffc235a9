"""A pytest plugin: a test that is skipped because something is not installed fails, if WINDFALL_NO_SKIPS says so.

`programs`: programs and the packages of .venv must be installed. `all`: also what `make other` installs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from typing import TypeVar

import pytest

VARIABLE = "WINDFALL_NO_SKIPS"
OTHERS = re.compile(r"\b(ray|litellm|langchain|torchao|peft|bitsandbytes)", re.IGNORECASE)  # what `make other` installs
MISSING = re.compile(r"not installed|could not import|there is no C compiler")  # in the reason of a skip

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _checked((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _checked((yield))


def _checked(report: Report) -> Report:
    """The report; a failure if it is a skip because a program or package is missing, and the variable is set."""
    wanted = os.environ.get(VARIABLE)
    if wanted and report.skipped and isinstance(report.longrepr, tuple):
        _, _, reason = report.longrepr
        if MISSING.search(reason) and (wanted == "all" or not OTHERS.search(reason)):
            report.outcome, report.longrepr = "failed", f"{reason}. With {VARIABLE}={wanted} this is a failure."
    return report
