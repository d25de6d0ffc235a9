"""A pytest plugin: where everything should be installed, a test that is skipped for want of something fails."""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from typing import TypeVar

import pytest

VARIABLE = "WINDFALL_NO_SKIPS"
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
    if os.environ.get(VARIABLE) and report.skipped and isinstance(report.longrepr, tuple):
        _, _, reason = report.longrepr
        if MISSING.search(reason):
            report.outcome, report.longrepr = "failed", f"{reason}. With {VARIABLE} this is a failure."
    return report
