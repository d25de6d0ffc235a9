"""GET /live: the server's load, which the live page asks for again and again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from windfall import __version__, registry
from windfall.serve.admission import Admission
from windfall.serve.calls import served_name


class About(BaseModel):
    """What does not change while the server runs."""

    model: str
    version: str
    device: str
    dtype: str
    drafter: str
    policy: str
    policies: list[str]  # that a request may choose
    chat: bool  # whether the model has a chat template
    context: int | None
    max_requests: int
    max_queue: int


class Totals(BaseModel):
    """Counts since the start of the server."""

    rounds: int  # verify passes
    texts: int  # that took part in the rounds
    rows: int  # of the verify passes
    draft_passes: int
    tokens: int  # new ones


class Budget(BaseModel):
    """What requests with the same policy share in a round."""

    draft_passes: int
    rows: int


class Live(BaseModel):
    about: About
    running: int  # texts
    waiting: int
    cache_use: float | None  # share of the memory for KV caches, from 0 to 1; None: unknown
    budget: Budget | None  # of the last round; None: each text decides for itself
    totals: Totals


def live_routes(admission: Admission) -> APIRouter:
    routes, about = APIRouter(), _about(admission)

    @routes.get("/live")
    async def live() -> Live:
        return live_figures(admission, about)

    return routes


def live_figures(admission: Admission, about: About) -> Live:
    """The load now. The counts are read while the engine goes on, so they may be of different rounds."""
    engine = admission.engine
    counters, busy = engine.counters, engine.running > 0
    sizes = counters.use.budget if busy else None
    return Live(
        about=about,
        running=engine.running,
        waiting=max(admission.unfinished - engine.running, 0),
        cache_use=counters.use.memory if busy or counters.use.memory is None else 0.0,
        budget=None if sizes is None else Budget(draft_passes=sizes.passes, rows=sizes.rows),
        totals=Totals(
            rounds=counters.rounds,
            texts=sum(counters.lengths.counts),
            rows=int(counters.rows.sum),
            draft_passes=counters.draft_passes,
            tokens=counters.tokens,
        ),
    )


def _known_name(made: Any, known: Mapping[str, str]) -> str:
    """The name by which the command line knows this policy or drafter; the name of its class, if it is not built in."""
    cls = type(made)
    return {path: name for name, path in known.items()}.get(f"{cls.__module__}:{cls.__name__}", cls.__name__)


def _about(admission: Admission) -> About:
    engine, settings = admission.engine, admission.settings
    target = engine.target
    return About(
        model=served_name(admission),
        version=__version__,
        device=str(target.device),
        dtype=str(target.decoder.dtype).removeprefix("torch."),
        drafter=_known_name(engine.drafter, registry.DRAFTERS),
        policy=_known_name(engine.policy, registry.POLICIES),
        policies=[*admission.policies],
        chat=bool(getattr(target.tokenizer, "chat_template", None)),
        context=target.context,
        max_requests=engine.max_requests,
        max_queue=settings.max_queue,
    )
