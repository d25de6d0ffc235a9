"""GET /live: the server's load, which the live page asks for again and again."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from windfall import __version__
from windfall.serve.backend import Backend, Figures
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


def live_routes(backend: Backend) -> APIRouter:
    routes, about = APIRouter(), _about(backend)

    @routes.get("/live")
    async def live() -> Live:
        await backend.refresh()
        return live_figures(backend.figures, about)

    return routes


def live_figures(now: Figures, about: About) -> Live:
    """The load now. The counts are read while the engine goes on, so they may be of different rounds."""
    counters, busy = now.counters, now.running > 0
    sizes = now.budget if busy else None
    return Live(
        about=about,
        running=now.running,
        waiting=max(now.unfinished - now.running, 0),
        cache_use=now.memory if busy or now.memory is None else 0.0,
        budget=None if sizes is None else Budget(draft_passes=sizes.passes, rows=sizes.rows),
        totals=Totals(
            rounds=counters.rounds,
            texts=sum(counters.lengths.counts),
            rows=int(counters.rows.sum),
            draft_passes=counters.draft_passes,
            tokens=counters.tokens,
        ),
    )


def _about(backend: Backend) -> About:
    return About(
        model=served_name(backend),
        version=__version__,
        **backend.about._asdict(),
        policies=[*backend.policies],
        chat=bool(getattr(backend.model.tokenizer, "chat_template", None)),
        context=backend.model.context,
        max_requests=backend.max_requests,
        max_queue=backend.settings.max_queue,
    )
