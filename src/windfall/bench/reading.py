"""Reads the folder of a benchmark run: its records, settings and provenance."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from windfall.core.errors import InputError

ALL = "all"  # the task that stands for every task together
RUN_FILE, RECORDS_FILE = "run.json", "records.jsonl"
PACKED_FILE = RECORDS_FILE + ".gz"  # the same, compressed by hand
PEAKS_FILE = "memory.json"  # peak bytes of device memory by method, each measured separately
FORMAT = 1  # of these files


def reason(error: Exception) -> str:
    """What is wrong with a file, from the error that reading it raised."""
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


Key = tuple[str, str, float, int]  # task, id, temperature, repeat


class Nodes(NamedTuple):
    """Counts of nodes at one place of the trees: verified, judged (their parent was accepted) and accepted."""

    depth: int
    rank: int  # among its siblings, 0 for the likeliest
    layer_rank: int  # among the verified nodes of its depth, by path probability
    verified: int
    judged: int
    accepted: int


@dataclass(frozen=True)
class Turn:
    """One answer. The lists have an entry for each cycle; times are None if nothing was timed."""

    prompt_tokens: int
    tokens: int
    digest: str
    finish: str
    committed: list[int]  # tokens emitted
    accepted: list[int]  # drafted nodes on the accepted path
    rows: list[int]  # verified, including the root
    drafted: list[int]
    passes: list[int]  # of the drafter
    depth: list[int]  # of the verified tree
    nodes: list[Nodes]
    tried: list[int] = field(default_factory=list)  # by depth from 1: cycles that had a judged node there
    seconds: float | None = None
    ttft: float | None = None
    prefill: float | None = None
    split: dict[str, float] | None = None

    @property
    def cycles(self) -> int:
        return len(self.committed)

    @classmethod
    def of_dict(cls, given: dict[str, Any]) -> Turn:
        known = {name: given[name] for name in cls.__dataclass_fields__ if name in given}
        return cls(**{**known, "nodes": [Nodes(*each) for each in given["nodes"]]})


@dataclass(frozen=True)
class Record:
    """One conversation of one method at one temperature, in one repeat."""

    method: str
    drafter: str
    policy: str
    settings: dict[str, Any]
    task: str
    category: str
    id: str
    temperature: float
    repeat: int
    seed: int
    coupled: bool
    turns: list[Turn]
    repeated: float
    peak_memory: int | None = None

    @property
    def key(self) -> Key:
        return self.task, self.id, self.temperature, self.repeat

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)

    @property
    def cycles(self) -> int:
        return sum(turn.cycles for turn in self.turns)

    @property
    def seconds(self) -> float | None:
        times = [turn.seconds for turn in self.turns if turn.seconds is not None]
        return sum(times) if len(times) == len(self.turns) else None

    @property
    def tau(self) -> float:
        return self.tokens / self.cycles

    @classmethod
    def of_dict(cls, given: dict[str, Any]) -> Record:
        known = {name: given[name] for name in cls.__dataclass_fields__ if name in given}
        return cls(**{**known, "turns": [Turn.of_dict(each) for each in given["turns"]]})


@dataclass(frozen=True)
class Run:
    """The content of a run's folder."""

    name: str
    settings: dict[str, Any]
    provenance: dict[str, Any]
    profiles: dict[str, Any]  # costs of passes by drafter
    records: list[Record]

    @property
    def methods(self) -> list[str]:
        return _unique(record.method for record in self.records)

    @property
    def tasks(self) -> list[str]:
        return _unique(record.task for record in self.records)

    @property
    def temperatures(self) -> list[float]:
        return sorted({record.temperature for record in self.records})

    def select(
        self, method: str | None = None, task: str | None = None, temperature: float | None = None
    ) -> list[Record]:
        """The records of a method, task and temperature; None and the task `all` select everything."""
        return [
            record
            for record in self.records
            if method in (None, record.method)
            and task in (None, ALL, record.task)
            and temperature in (None, record.temperature)
        ]


def load(folder: str | Path) -> Run:
    """Read a folder that `windfall bench run` wrote; an incomplete last line is ignored."""
    folder = Path(folder)
    try:
        about = json.loads((folder / RUN_FILE).read_text("utf-8"))
        if about.get("format", FORMAT) != FORMAT:
            raise InputError(f"'{folder}' has format {about['format']}; this windfall reads format {FORMAT}")
        records = [Record.of_dict(each) for each in complete_lines(_records_text(folder))]
        _check(records)
        if about["settings"].get("memory") or (folder / PEAKS_FILE).exists():
            peaks = json.loads((folder / PEAKS_FILE).read_text("utf-8")) if (folder / PEAKS_FILE).exists() else {}
            records = [replace(each, peak_memory=peaks.get(each.method)) for each in records]
        order = {label: place for place, label in enumerate(about["settings"]["methods"])}
        records.sort(key=lambda record: order.get(record.method, len(order)))  # stable: prompts keep their order
        return Run(folder.name, about["settings"], about["provenance"], about.get("profiles", {}), records)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"'{folder}' holds a damaged {PACKED_FILE}: {error}") from error
    except OSError as error:
        raise InputError(f"'{folder}' is not the folder of a benchmark: it has no readable {RUN_FILE}") from error
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"'{folder}' holds a damaged {RUN_FILE} or {RECORDS_FILE}: {reason(error)}") from error


def _records_text(folder: Path) -> str:
    """The lines of the records, which may be compressed."""
    if (folder / RECORDS_FILE).exists():
        return (folder / RECORDS_FILE).read_text("utf-8")
    if (folder / PACKED_FILE).exists():
        return gzip.decompress((folder / PACKED_FILE).read_bytes()).decode("utf-8")
    return ""


def _check(records: Sequence[Record]) -> None:
    """Refuse empty conversations and duplicates."""
    seen = set()
    for record in records:
        if not record.cycles or (record.method, record.key) in seen:
            raise ValueError(f"{record.method} on {record.task} {record.id} is there twice, or empty")
        _ = record.seconds  # fails if a time is not a number
        seen.add((record.method, record.key))


def complete_lines(text: str) -> list[dict[str, Any]]:
    """The JSON lines of a text without an incomplete last one; other damage is a ValueError."""
    lines = text.split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
