"""The folder of a run: settings and provenance in run.json, one line for each finished conversation in records.jsonl.

A line is on the disk before the next conversation begins, so an interrupted run loses at most one conversation.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from windfall.bench.provenance import now
from windfall.bench.reading import FORMAT, PACKED_FILE, PEAKS_FILE, RECORDS_FILE, RUN_FILE, complete_lines, reason
from windfall.core.errors import InputError
from windfall.core.files import replace_text

WARM_UP_FILE = "warm-up.json"  # what the calibrators learned before the first conversation
SAME_PROVENANCE = ("target", "drafters", "prompts", "versions")  # what must not change when a run is resumed
SAME_IF_TIMED = (*SAME_PROVENANCE, "machine")

Done = tuple[str, str, str, float, int]  # method, task, id, temperature, repeat


class Store:
    """Opens a folder for a new run, or with `resume` to continue the run in it."""

    def __init__(self, folder: Path, resume: bool = False):
        self.folder = folder
        self.about: dict[str, Any] | None = None  # of the run that is resumed
        self.done: set[Done] = set()
        self._lock_file: int | None = None
        if resume and not folder.exists():
            raise InputError(f"there is no folder '{folder}' to resume; leave --resume out to begin a run in it")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock_file = _lock(folder)  # until it is closed or the process ends
            self._enter(resume)
        except OSError as error:
            self.close()
            raise InputError(f"cannot use '{folder}' for the results: {error.strerror}") from error
        except InputError:
            self.close()
            raise

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock_file is not None:
            os.close(self._lock_file)
        self._lock_file = None

    def _enter(self, resume: bool) -> None:
        if all(file.suffix == ".tmp" for file in self.folder.iterdir()):
            return
        if not resume:
            raise InputError(f"'{self.folder}' is not empty; give another --out, or --resume the run in it")
        if (self.folder / PACKED_FILE).exists():
            raise InputError(f"the records in '{self.folder}' are packed; unpack {PACKED_FILE} to go on with the run")
        try:
            about = json.loads((self.folder / RUN_FILE).read_text("utf-8"))
            self.about = {name: about[name] for name in ("settings", "provenance", "profiles")}
            self.done = {_key(record) for record in self._mend()}
        except FileNotFoundError:
            raise InputError(f"'{self.folder}' is not empty and holds no {RUN_FILE}: no run to resume") from None
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"'{self.folder}' holds a damaged {RUN_FILE} or {RECORDS_FILE}: {reason(error)}"
            ) from error

    def _mend(self) -> list[dict[str, Any]]:
        """Read the records, and cut off an incomplete last line."""
        file = self.folder / RECORDS_FILE
        if not file.exists():
            return []
        content = file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        records = complete_lines(whole.decode("utf-8"))
        if len(whole) < len(content):
            os.truncate(file, len(whole))
        return records

    @property
    def profiles(self) -> dict[str, Any] | None:
        """The costs that the resumed run used."""
        return None if self.about is None else self.about["profiles"]

    @property
    def warm_up(self) -> dict[str, Any]:
        """What the resumed run's calibrators learned in the warm-up."""
        try:
            kept: dict[str, Any] = json.loads((self.folder / WARM_UP_FILE).read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return kept

    def begin(self, settings: dict[str, Any], provenance: dict[str, Any], profiles: dict[str, Any]) -> None:
        """Write run.json; a run that is resumed must have the same settings."""
        settings = json.loads(json.dumps(settings))  # as it will be read back
        if self.about is not None:
            self._compare(settings, provenance)
            before = self.about["provenance"]
            provenance = {**before, "resumed": [*before.get("resumed", []), now()]}
        about = {"format": FORMAT, "settings": settings, "provenance": provenance, "profiles": profiles}
        replace_text(self.folder / RUN_FILE, json.dumps(about, indent=1, ensure_ascii=False) + "\n")

    def _compare(self, settings: dict[str, Any], provenance: dict[str, Any]) -> None:
        assert self.about is not None
        same = SAME_IF_TIMED if settings["timing"] else SAME_PROVENANCE
        before = {**self.about["settings"], **{name: self.about["provenance"].get(name) for name in same}}
        after = json.loads(json.dumps({**settings, **{name: provenance[name] for name in same}}))
        for name in {**before, **after}:
            if before.get(name) != after.get(name):
                was, wanted = (json.dumps(each.get(name), ensure_ascii=False) for each in (before, after))
                raise InputError(
                    f"'{self.folder}' was run with other settings: {name} was {was}, not {wanted}; give another --out"
                )

    def keep_warm_up(self, learned: dict[str, Any]) -> None:
        replace_text(self.folder / WARM_UP_FILE, json.dumps(learned) + "\n")

    @property
    def peaks(self) -> dict[str, int]:
        """The peak memory of the methods measured so far."""
        file = self.folder / PEAKS_FILE
        found: dict[str, int] = json.loads(file.read_text("utf-8")) if file.exists() else {}
        return found

    def keep_peak(self, label: str, peak: int) -> None:
        replace_text(self.folder / PEAKS_FILE, json.dumps({**self.peaks, label: peak}, indent=1) + "\n")

    def append(self, record: dict[str, Any]) -> None:
        """Add a finished conversation; it is on the disk when this returns."""
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
        try:
            with (self.folder / RECORDS_FILE).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(
                f"cannot write to '{self.folder}': {error.strerror}; --resume goes on from here"
            ) from error
        self.done.add(_key(record))


def _lock(folder: Path) -> int | None:
    """Lock a folder against other processes; None if the system has no such locks."""
    try:
        import fcntl
    except ImportError:
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise InputError(f"'{folder}' is in use by a run that has not ended yet") from None
    except OSError:  # a file system without locks
        os.close(handle)
        return None
    return handle


def _key(record: dict[str, Any]) -> Done:
    return record["method"], record["task"], record["id"], record["temperature"], record["repeat"]
