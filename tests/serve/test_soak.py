"""The traffic of benchmarks/serve_soak.py, for a few seconds."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from pathlib import Path

import httpx
import pytest

from helpers.serving import Serving, bytes_engine, http, wait_for
from windfall.serve.settings import Settings

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import serve_soak
import soak_traffic

CLIENTS = 8
CASES = 6  # the next one has a grammar, whose first compilation takes seconds
EXPECTED = {
    ("whole", "right"),
    ("stream", "right"),
    ("bad", "right"),
    ("huge", "right"),
    ("failing processor", "right"),
}


def test_every_request_gets_its_text_or_the_right_error(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_soak, "CASES", CASES)
    monkeypatch.setattr(soak_traffic, "TOKENS", (2, 8))
    monkeypatch.setattr(soak_traffic, "BAD", [bad for bad in soak_traffic.BAD if b"regex" not in bad[1]])
    monkeypatch.setattr(soak_traffic.Client, "slow_grammar", soak_traffic.Client.bad)
    made = bytes_engine(context=160, max_requests=4)
    serve_soak.let_marked_fail(made)

    async def client(own: httpx.AsyncClient, cases: list[soak_traffic.Case], number: int) -> list[soak_traffic.Outcome]:
        chance = random.Random(number)
        asking = soak_traffic.Client(own, cases, chance)
        return [await asking.ask(kind) for kind in chance.sample([*asking.kinds], len(asking.kinds))]

    async def soak(url: str) -> list[soak_traffic.Outcome]:
        async with httpx.AsyncClient(base_url=url, timeout=60, verify=False) as own:
            cases = await serve_soak.plain_texts(own, random.Random(0))
            found = await asyncio.gather(*(client(own, cases, number) for number in range(CLIENTS)))
        return [outcome for each in found for outcome in each]

    with serving(made, Settings(max_queue=CLIENTS)) as url:
        outcomes = asyncio.run(soak(url))
        assert not [each for each in outcomes if each.end in ("wrong", "stuck")]
        ends = Counter((each.kind, each.end) for each in outcomes)
        assert ends.keys() >= EXPECTED
        idle = {"status": "ready", "running": 0, "waiting": 0}
        wait_for(lambda: http().get(f"{url}/ready").json() == idle)
    made.close()
