"""A headless Chromium for tests of the live page. The browser has to be installed; nothing is downloaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium(folder: Path) -> Iterator[Any]:
    """A browser context with its data in this empty folder; the test is skipped if there is no browser."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as made:
        context = made.chromium.launch_persistent_context(folder, executable_path=found, args=list(OPTIONS))
        context.set_default_timeout(20_000)
        yield context
        context.close()
