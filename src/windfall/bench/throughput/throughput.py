"""`windfall bench throughput`: everything is measured in one process, on the same weights and the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from windfall.bench.methods import DrafterSpec, Method
from windfall.bench.runner import NoDrafter, first_questions
from windfall.bench.tasks import Prompt
from windfall.bench.throughput.contest import Contest
from windfall.bench.throughput.engines import Engines
from windfall.bench.throughput.workload import Settings, repeated
from windfall.engine.engine import Engine
from windfall.model.target import Target
from windfall.policies.none import NoSpeculation

METHODS = ("none", "beam", "auto")


@dataclass
class Result:
    """What was measured so far, as plain data."""

    target: str
    provenance: dict[str, Any]
    settings: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)  # with the reasons
    profiles: dict[str, Any] = field(default_factory=dict)  # the costs with which policies began
    finished: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {"what": "throughput of many requests at once", **asdict(self)}

    def take(self, contest: Contest, engines: Engines) -> None:
        """Take over what is known by now."""
        self.rows, self.skipped, self.profiles = contest.rows, contest.skipped, engines.profiles
        about = engines.about.items()
        self.provenance["drafters"] = {label: each["drafters"][label] for label, each in about}
        exact = all(each["target"]["exact"] for _, each in about)
        self.provenance["target"] = {**self.provenance.get("target", {}), "exact": exact}

    @property
    def different(self) -> int:
        """Texts that differ from plain decoding's although they must not."""
        return sum(row["texts"] - row["same_texts"] for row in self.rows if row["exact"])


def measure(
    result: Result,
    target: Target,
    methods: Sequence[Method],
    drafter: DrafterSpec,
    prompts: Sequence[Prompt],
    settings: Settings,
    keep: Callable[[Result], None],
    progress: Callable[[int, int], None] = lambda done, total: None,
    trust_remote_code: bool = False,
) -> None:
    """Measure everything into the result, and call `keep` with it after each run."""
    tokenizing, eos = Engine(target, NoDrafter(), NoSpeculation()), () if settings.ignore_eos else None
    asked = tokenizing, settings.seed, settings.prompt_tokens
    sampling: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, "eos": eos}
    fitting = [case.prompt for case in first_questions(prompts, *asked, **sampling)]
    count = max(settings.requests(cell, len(fitting)) for cell in settings.cells)
    cases = first_questions(repeated(fitting, count), *asked, **sampling)
    engines = Engines(target, drafter, settings, trust_remote_code)
    engines.expect(cases)
    contest = Contest(engines, methods, cases, len(fitting))
    try:
        for _ in contest.run(progress):
            result.take(contest, engines)
            keep(result)
        result.take(contest, engines)
        result.finished = True
        keep(result)
    finally:
        engines.close()
