"""Keep other libraries quiet while models load; one-line messages for long waits and errors."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import transformers
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from rich.console import Console
from rich.text import Text

from windfall.core.wording import first_line as first_line

_SETTINGS = threading.RLock()  # the libraries' settings are global: one thread at a time changes them


@contextmanager
def announced(text: str) -> Iterator[None]:
    """Show one line on stderr during this block; on a terminal it is removed afterwards."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(Text(text)):
            yield
    else:
        console.print(Text(text), soft_wrap=True)
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the libraries' progress bars, log lines and warnings during this block."""
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
