"""Keeping other libraries quiet while models load, and saying what takes long or goes wrong in one line."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import transformers
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from rich.console import Console
from rich.text import Text

_SETTINGS = threading.RLock()  # of the libraries: global, so one thread at a time changes them


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300].rstrip(".:")


@contextmanager
def announced(text: str) -> Iterator[None]:
    """One line on stderr while something takes its time; on a terminal it goes away afterwards."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(Text(text)):
            yield
    else:
        console.print(Text(text), soft_wrap=True)
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back the libraries' progress bars, log lines and warnings, and put their settings back afterwards."""
    logging = transformers.utils.logging
    with _SETTINGS, warnings.catch_warnings():
        verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        hub_bars = not are_progress_bars_disabled()
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()
            if hub_bars:
                enable_progress_bars()
            else:
                disable_progress_bars()
