"""Runs methods alternately on the same requests, and compares their speed and their texts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from windfall.bench.gpu_internals import forget_prefixes
from windfall.bench.methods import PLAIN, Method
from windfall.bench.runner import Case
from windfall.bench.throughput.answers import Answer, Run, figures
from windfall.bench.throughput.engines import Engines
from windfall.bench.throughput.hf_loops import CONTINUOUS, PADDED, Unavailable, continuous_server, padded_server
from windfall.bench.throughput.serve import Serve, engine_server, run_cell
from windfall.bench.throughput.workload import BATCH, Cell, Settings
from windfall.core.clock import now
from windfall.core.types import FULL_PRECISION
from windfall.engine.engine import Engine

WARM_UP_REQUESTS = 8  # at least
GPU, HOST, TRANSFORMERS = "gpu", "host", "transformers"  # what ran the requests

Progress = Callable[[int, int], None]  # finished runs, and all runs


@dataclass
class Entry:
    """A method, or (without one) a loop of transformers, in one cell; and what it did so far."""

    label: str
    cell: Cell
    method: Method | None = None
    runner: str = TRANSFORMERS
    fallback: str = ""  # why requests did not run on the GPU runner
    undrafted: str = ""  # why requests that ran together were not drafted
    exact: bool = False  # whether its texts must be those of plain decoding
    engine_number: int = 0  # of the engine that was warmed up for this cell
    skipped: bool = False  # whether it cannot run here
    runs: list[Run] = field(default_factory=list)


class Contest:
    """All methods in all cells. `rows` has the figures of the runs that are finished."""

    def __init__(self, engines: Engines, methods: Sequence[Method], cases: Sequence[Case], prompts: int):
        """`prompts`: the number of cases that are different prompts; later ones repeat them."""
        self.engines, self.methods, self.cases, self.prompts = engines, methods, cases, min(prompts, len(cases))
        self.settings: Settings = engines.settings
        self.entries: list[Entry] = []
        self.skipped: list[dict[str, Any]] = []
        self.wanted: dict[tuple[float, int], tuple[int, ...]] = {}  # plain decoding's texts by temperature and case
        self._done = 0

    def run(self, progress: Progress = lambda done, total: None) -> Iterator[None]:
        """Yields whenever `rows` has changed."""
        cells = list(self.settings.cells)
        theirs = sum((cell.arrivals == BATCH) + 1 for cell in cells) if self.settings.hf else 0
        turns = len(cells) * len(self.methods) + theirs
        total = turns * (self.settings.rounds + 1) + len(self.settings.temperatures)

        def advance(by: int = 1) -> None:
            self._done += by
            progress(self._done, total)

        for temperature in self.settings.temperatures:
            self._write_references(temperature)
            advance()
            for cell in (each for each in cells if each.temperature == temperature):
                yield from self._run_cell(cell, advance)

    def _run_cell(self, cell: Cell, advance: Callable[..., None]) -> Iterator[None]:
        entries = [Entry(method.label, cell, method) for method in self.methods]
        if self.settings.hf and cell.arrivals == BATCH:  # a padded batch takes no new requests
            entries.append(Entry(PADDED, cell))
        self.entries += entries
        for turn in range(self.settings.rounds + 1):
            for place in range(len(entries)):
                entry = entries[(max(turn - 1, 0) + place) % len(entries)]
                if turn:
                    self._measure(entry)
                    yield
                else:
                    self._warm_up(entry)
                advance()
        if self.settings.hf:
            yield from self._run_continuous(Entry(CONTINUOUS, cell))
            advance(self.settings.rounds + 1)

    # ---- runs

    def cases_of(self, cell: Cell) -> Sequence[Case]:
        return self.cases[: self.settings.requests(cell, self.prompts)]

    def _write_references(self, temperature: float) -> None:
        """Plain decoding's texts of the different prompts, one at a time."""
        plain = next(method for method in self.methods if method.plain)
        _, engine = self.engines.get(plain)
        for place, answer in enumerate(engine_server(engine, temperature)(self.cases[: self.prompts], 1)):
            self.wanted[temperature, place] = answer.tokens

    def _warm_up(self, entry: Entry) -> None:
        """A run that does not count; engines capture graphs and learn."""
        if entry.method is not None:
            self._server(entry)
        else:
            self._run_padded(entry)
            entry.runs.clear()

    def _measure(self, entry: Entry) -> None:
        if entry.method is None:
            self._run_padded(entry)
            return
        serve, cases = self._server(entry), self.cases_of(entry.cell)
        with no_collections():
            made = run_cell(serve, cases, entry.cell)
        self._keep(entry, made)

    def _server(self, entry: Entry) -> Serve:
        """The server of an entry's engine, which has been warmed up in this cell."""
        assert entry.method is not None
        number, engine = self.engines.get(entry.method)
        serve = engine_server(engine, entry.cell.temperature)
        if entry.engine_number != number:
            forget_prefixes(engine)
            serve(self.cases_of(entry.cell)[: warm_up_requests(entry.cell)], entry.cell.concurrency)
            entry.engine_number = number
        forget_prefixes(engine)
        now(engine.target.device)
        entry.fallback = engine.batch_fallback
        entry.undrafted = engine.undrafted if entry.cell.concurrency > 1 else ""
        entry.runner = HOST if entry.fallback else GPU
        entry.exact = is_exact(engine)
        return serve

    def _run_padded(self, entry: Entry) -> None:
        """A run of `generate`, unless one failed before, for example for want of memory."""
        if entry.skipped:
            return
        serve = padded_server(self.engines.target, entry.cell.temperature)
        try:
            self._keep(entry, run_cell(serve, self.cases_of(entry.cell), entry.cell))
        except Exception as error:
            self._skip(entry, str(error).partition("\n")[0])

    def _run_continuous(self, entry: Entry) -> Iterator[None]:
        """All runs of transformers' continuous batching follow each other: its start takes long."""
        cell, cases = entry.cell, self.cases_of(entry.cell)
        try:
            with continuous_server(self.engines.target, cell.temperature, cell.concurrency) as serve:
                self.entries.append(entry)
                for turn in range(self.settings.rounds + 1):
                    made = run_cell(serve, cases, cell)
                    if turn:
                        self._keep(entry, made)
                        yield
        except Unavailable as reason:
            self._skip(entry, str(reason))

    def _keep(self, entry: Entry, made: Run) -> None:
        entry.runs.append(made)
        if entry.label == PLAIN:
            for place, answer in enumerate(made.answers):
                self.wanted.setdefault((entry.cell.temperature, place), answer.tokens)

    def _skip(self, entry: Entry, reason: str) -> None:
        entry.skipped = True
        self.skipped.append({"method": entry.label, **entry.cell._asdict(), "reason": reason})

    # ---- results

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The figures of every entry that has finished a run."""
        return [self._row(entry) for entry in self.entries if entry.runs]

    def _row(self, entry: Entry) -> dict[str, Any]:
        found = figures(entry.runs)
        plain = next((e for e in self.entries if e.label == PLAIN and e.cell == entry.cell and e.runs), None)
        speed, base = found["tokens_per_second"], None if plain is None else figures(plain.runs)["tokens_per_second"]
        same = self._same_texts(entry)
        return {
            "method": entry.label,
            **entry.cell._asdict(),
            **found,
            "over_none": speed / base if speed and base else None,
            "runner": entry.runner,
            "fallback": entry.fallback or None,
            "undrafted": entry.undrafted or None,
            "rounds": len(entry.runs),
            "texts": None if same is None else len(same),
            "same_texts": None if same is None else sum(same),
            "exact": entry.exact,
        }

    def _same_texts(self, entry: Entry) -> list[bool] | None:
        """Whether each text is plain decoding's; None where transformers draws with other noise."""
        temperature = entry.cell.temperature
        if entry.method is None and temperature:
            return None
        pairs: list[tuple[int, Answer]] = [pair for run in entry.runs for pair in enumerate(run.answers)]
        known = [(self.wanted.get((temperature, place)), answer.tokens) for place, answer in pairs]
        return [wanted == tokens for wanted, tokens in known if wanted is not None]


@contextmanager
def no_collections() -> Iterator[None]:
    """Without garbage collections, which the answers of earlier runs make long. A run may take a tenth of a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def warm_up_requests(cell: Cell) -> int:
    """The number of requests before those that count: each seat of the batch has one that leaves and one that joins."""
    return max(WARM_UP_REQUESTS, 2 * cell.concurrency)


def is_exact(engine: Engine) -> bool:
    """Whether every text must be plain decoding's: on a CPU in float32, and on a GPU in exact passes."""
    if engine.target.device.type == "cpu":
        return engine.target.decoder.dtype in FULL_PRECISION
    return engine.exact_passes
