"""GET /health and /ready: whether the engine generates."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import torch

from helpers.scheduling import held
from helpers.serving import Serving, http, new_engine, running, wait_for
from windfall.engine.engine import Engine
from windfall.engine.host_runner import HostRunner
from windfall.engine.lost_device import is_lost
from windfall.serve import health
from windfall.serve.admission import Admission
from windfall.serve.health import Health, Unhealthy
from windfall.serve.settings import Settings

ROUTES = ("/health", "/ready")
CPU = torch.device("cpu")
ASSERT = torch.AcceleratorError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later")


@pytest.fixture(autouse=True)
def always_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check of an idle engine generates a token."""
    monkeypatch.setattr(health, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(Health.__init__, "__defaults__", (health.HANG_SECONDS, 0.0))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_head_and_get(route: str, keys: tuple[str, ...]) -> None:
    made = new_engine()
    with running(made, Settings(api_keys=keys)) as url:
        got, head = http().get(url + route), http().head(url + route)
    made.close()
    assert (got.status_code, head.status_code, head.content) == (200, 200, b"")
    assert got.json()["status"] in ("ok", "ready")


def fail(*_: Any) -> None:
    raise RuntimeError("a secret")


@pytest.mark.parametrize("route", ROUTES)
def test_an_engine_that_fails_in_every_pass(
    serving: Serving, route: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = new_engine()
    with serving(made) as url:
        assert http().get(url + route).status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr(HostRunner, "round", fail)
            wait_for(lambda: http().get(url + route).status_code == 503)
            answer = http().get(url + route)
            assert answer.json()["error"]["code"] == "unhealthy" and "secret" not in answer.text
            assert "unhealthy: the engine fails: a secret" in caplog.text
            assert 'requests_refused_total{reason="shutting_down"} 0.0' in http().get(f"{url}/metrics").text
        wait_for(lambda: http().get(url + route).status_code == 200)
    made.close()


@pytest.mark.parametrize("route", ROUTES)
def test_an_engine_that_hangs(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Health.__init__, "__defaults__", (0.3, 0.0))
    monkeypatch.setattr(Health.check, "__defaults__", (0.05,))
    made = new_engine()
    gate, _ = held(made)
    try:
        with running(made) as url:
            assert http().get(url + route).status_code == 200  # it may be busy
            wait_for(lambda: http().get(url + route).status_code == 503)
            gate.open.set()
            wait_for(lambda: http().get(url + route).status_code == 200)
    finally:
        gate.open.set()
        made.close()


def test_an_engine_that_works_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    made, submitted, usual = new_engine(), [], Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda *given, **named: submitted.append(1) or usual(*given, **named))
    probe = Health(Admission(made, Settings()), fresh_seconds=60)

    async def check() -> int:
        await probe.check()
        return len(submitted)

    assert asyncio.run(check()) == 0
    made.submit([1, 2, 3], max_new_tokens=4).result(20)
    assert asyncio.run(check()) == 1
    assert asyncio.run(check()) == 2  # nothing has happened since
    assert asyncio.run(check()) == 2  # and the token was generated a moment ago
    made.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_died_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests that it had fail."""

    class Died(BaseException): ...

    def die(*_: Any) -> None:
        raise Died

    made = new_engine()
    with monkeypatch.context() as patch:
        patch.setattr(HostRunner, "round", die)
        handle = made.submit([1, 2, 3], max_new_tokens=4)
        with pytest.raises(RuntimeError, match="the engine's thread has ended: Died"):
            handle.result(20)
    assert len(made.submit([1, 2, 3], max_new_tokens=4, eos=()).result(20).token_ids) == 4
    made.close()


def test_a_lost_device(serving: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    made, told = new_engine(), []
    made.when_lost(lambda: told.append("before"))

    def lose(*_: Any) -> None:
        raise ASSERT

    with serving(made) as url, caplog.at_level(logging.ERROR):
        monkeypatch.setattr(HostRunner, "round", lose)
        http().post(f"{url}/v1/completions", json={"prompt": "Hi"})
        wait_for(lambda: told)
        assert made.closed and made.lost is ASSERT
        for route in ROUTES:
            assert http().get(url + route).json()["error"]["code"] == "unhealthy"
        assert http().post(f"{url}/v1/completions", json={"prompt": "Hi"}).status_code == 503
    made.when_lost(lambda: told.append("after"))
    assert told == ["before", "after"] and "unhealthy: the device is lost: CUDA error" in caplog.text
    made.close()


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (ASSERT, True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (torch.AcceleratorError("CUDA error: invalid argument"), False),
        (ValueError("a processor says: CUDA error: device-side assert triggered"), False),
    ],
)
def test_errors_of_a_lost_device(error: Exception, lost: bool) -> None:
    assert is_lost(CPU, error) == lost


def test_unhealthy_is_raised_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    made = new_engine()
    probe = Health(Admission(made, Settings()))
    asyncio.run(probe.check())
    monkeypatch.setattr(HostRunner, "round", fail)
    with pytest.raises(Unhealthy) as caught:
        asyncio.run(probe.check())
    assert isinstance(caught.value.__cause__, RuntimeError)
    made.close()
