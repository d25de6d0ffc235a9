"""Read text files with one-line errors; write files atomically."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from windfall.core.errors import InputError

WEIGHTS = Path(__file__).parent.parent / "weights"  # bundled with the package


def read_text(file: Path) -> str:
    try:
        return file.read_text("utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read '{file}': {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"'{file}' is not UTF-8 text (byte {error.start})") from error


def is_unicode(text: str) -> bool:
    """Whether the text can be written as UTF-8; a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_json(text: str) -> Any:
    """`json.loads`, with a ValueError instead of a RecursionError if the text is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def replace_file(file: Path, write: Callable[[Path], Any], mode: int = 0o666) -> None:
    """Let `write` fill a temporary file in the same folder and rename it; `mode` are its permissions before umask."""
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        temporary.touch(mode)
        made = temporary.stat().st_mode
        write(temporary)
        temporary.chmod(made)  # safetensors makes private files
        os.replace(temporary, file)
    except (OSError, RuntimeError, SafetensorError) as error:  # the last two if the disk is full
        raise InputError(f"cannot write '{file}': {getattr(error, 'strerror', None) or error}") from error
    finally:
        with suppress(OSError):  # the folder may not exist
            temporary.unlink(missing_ok=True)


def replace_text(file: Path, text: str, mode: int = 0o666) -> None:
    replace_file(file, lambda temporary: temporary.write_text(text, "utf-8"), mode)


def replace_arrays(file: Path, arrays: Mapping[str, Any]) -> None:
    """Write numpy arrays as a compressed .npz file."""
    import numpy as np

    def write(temporary: Path) -> None:
        with temporary.open("wb") as stream:
            np.savez_compressed(stream, **arrays)

    replace_file(file, write)


def user_folder(kind: str, mac: str, linux: str) -> Path:
    """The user's folder for files of a kind (CACHE or DATA), from the environment or as usual on this system."""
    if own := os.environ.get(f"WINDFALL_{kind}"):
        return Path(own).expanduser()
    if shared := os.environ.get(f"XDG_{kind}_HOME"):
        return Path(shared).expanduser() / "windfall"
    home = Path(os.path.expanduser("~"))
    if not home.is_absolute():
        raise InputError("the home folder is unknown")
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "windfall"
    return home / (mac if sys.platform == "darwin" else linux) / "windfall"


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder '{folder}': {error.strerror or error}") from error


def check_writable(folder: Path) -> None:
    """Refuse a folder in which no files can be made. If it does not exist yet, this checks the folder above it."""
    try:
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise InputError(f"cannot write to '{folder}': {error.strerror or error}") from error
