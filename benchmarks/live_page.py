"""The images of the live page in docs/: an answer of the embedded model, and plain decoding of the same text.

PYTHONPATH=tests python benchmarks/live_page.py URL [--out docs]

URL is a server that runs: `windfall serve`. Needs playwright and an installed Chromium, as the tests of the page do.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from helpers.browser import chromium

MESSAGE = "Write a Python class Stack with push, pop and peek."
MAX_TOKENS = 110
POLL_MS = 500
SETTLE_MS = 2500
# While the model runs, the page is drawn once a second: a browser on the same machine takes time from the model.
SLOW_FRAMES = "window.requestAnimationFrame = (draw) => setTimeout(() => draw(performance.now()), window.slow ?? 1000)"
FAST_FRAMES = "window.slow = 0"
MANY = 3  # accepted tokens of a cycle
ENDED = "() => document.getElementById('stop').hidden"
MEASURED = "() => document.getElementById('verdict').textContent.includes('as fast as plain decoding')"
HEIGHT = "(tree) => tree.scrollHeight"
VIEWS: dict[str, tuple[int, int, str]] = {  # width, height and colours
    "live-page.png": (1280, 960, "light"),
    "live-page-phone.png": (360, 800, "dark"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, chromium(Path(folder)) as browser:
        page = browser.new_page()
        page.add_init_script(SLOW_FRAMES)
        width, height, _ = VIEWS["live-page.png"]
        page.set_viewport_size({"width": width, "height": height})
        page.goto(options.url)
        answer(page)
        page.evaluate(FAST_FRAMES)
        show_tree(page)
        for name, (width, height, colours) in VIEWS.items():
            page.set_viewport_size({"width": width, "height": height})
            page.emulate_media(color_scheme=colours)
            page.wait_for_timeout(SETTLE_MS)
            page.screenshot(path=options.out / name, full_page=True)


def answer(page: Any) -> None:
    """Send the message, and measure plain decoding of the answer."""
    page.locator("#max-tokens").evaluate("(field, value) => { field.value = value; }", str(MAX_TOKENS))
    page.fill("#message", MESSAGE)
    page.press("#message", "Enter")
    wait(page, ENDED)
    page.click("#measure")
    wait(page, MEASURED)
    page.wait_for_timeout(SETTLE_MS)


def wait(page: Any, script: str) -> None:
    page.wait_for_timeout(POLL_MS)
    while not page.evaluate(script):
        page.wait_for_timeout(POLL_MS)


def show_tree(page: Any) -> None:
    """Show a cycle with many accepted tokens, and among those the one with the smallest tree."""
    slider, tree = page.locator("#cycle"), page.locator("#tree")
    found = []
    for cycle in range(1, int(slider.get_attribute("max")) + 1):
        slider.fill(str(cycle))
        page.wait_for_timeout(50)
        accepted = page.locator("#tree .node.accepted").count()
        found.append((-min(accepted, MANY), tree.evaluate(HEIGHT), cycle))
    slider.fill(str(min(found)[-1]))
    slider.blur()


if __name__ == "__main__":
    main()
