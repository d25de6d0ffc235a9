"""A server in a thread, over a tiny model."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import httpx
import openai
from fastapi import FastAPI

from helpers.cli import character_tokenizer
from helpers.random_parallel import some_drafter
from helpers.tiny import tiny
from helpers.tokenizers import single_bytes
from windfall import registry
from windfall.drafters.lm import LMDrafter
from windfall.engine.engine import Engine
from windfall.model.target import Target
from windfall.serve import server
from windfall.serve.admission import Admission
from windfall.serve.app import app_over, make_app
from windfall.serve.settings import Settings
from windfall.serve.workers import process
from windfall.serve.workers.channel import Channel
from windfall.serve.workers.client import RemoteEngine
from windfall.serve.workers.hub import Hub

MODEL = "tiny"
Serving = Callable[..., AbstractContextManager[str]]  # `running` or `running_apart`


def new_engine(max_requests: int = 4, kv_memory: int | None = None) -> Engine:
    target = Target(tiny(num_hidden_layers=2, max_position_embeddings=96), character_tokenizer(), MODEL)
    limits: dict[str, Any] = {"max_requests": max_requests, "kv_memory": kv_memory}
    return Engine(target, some_drafter("ngram"), registry.policy("chain", depth=2), **limits)


def bytes_engine(context: int = 96, max_requests: int = 2) -> Engine:
    """An engine whose tokenizer has a token for each byte, so that the size of a text tells its length."""
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = single_bytes(template)
    target = Target(tiny(vocab_size=len(tokenizer), max_position_embeddings=context), tokenizer, MODEL)
    return Engine(target, some_drafter("ngram"), registry.policy("chain", depth=2), max_requests=max_requests)


@cache
def drafting_engine(chats: bool = True) -> Engine:
    """An engine with wide trees. Most drafts are accepted, because the drafter is the target itself.

    `chats`: its model has a chat template.
    """
    model = tiny(num_hidden_layers=2, max_position_embeddings=512)
    target = Target(model, character_tokenizer(**({} if chats else {"template": None})), MODEL)
    return Engine(target, LMDrafter(model=model), registry.policy("beam", depth=3, k=3, nodes=8), max_requests=4)


@cache
def engine() -> Engine:
    return new_engine()


@contextmanager
def running(made: Engine, settings: Settings | None = None, drain_seconds: int = 5) -> Iterator[str]:
    """The address of a server that runs in this block."""
    with app_running(make_app(made, settings), drain_seconds) as url:
        yield url


@contextmanager
def running_apart(made: Engine, settings: Settings | None = None, drain_seconds: int = 5) -> Iterator[str]:
    """The address of a server whose application sees the engine through the messages of an HTTP process."""
    with running_as_processes(made, 1, settings, drain_seconds) as (url,):
        yield url


@contextmanager
def running_as_processes(
    made: Engine, count: int, settings: Settings | None = None, drain_seconds: int = 5
) -> Iterator[list[str]]:
    """The addresses of HTTP processes of one server, which run in threads of this process: that starts faster."""
    hub, ended = Hub(Admission(made, settings or Settings())), threading.Event()

    def pass_messages() -> None:
        while not ended.is_set():
            hub.step(0.2)

    thread = threading.Thread(target=pass_messages)
    with ExitStack() as running:
        backends = [connected(hub, made, drain_seconds, running) for _ in range(count)]
        thread.start()
        try:
            yield [
                running.enter_context(app_running(app_over(each), drain_seconds, partial(each.attach, lambda: None)))
                for each in backends
            ]
        finally:
            running.pop_all().close()  # they need the hub until then
            ended.set()
            hub.wake()
            thread.join(30)
            hub.close()
            assert not thread.is_alive()


def connected(hub: Hub, made: Engine, drain_seconds: int, running: ExitStack) -> RemoteEngine:
    """An engine over the messages of this hub."""
    ours, others = socket.socketpair()
    hub.add(ours, hub.hello("none", drain_seconds), os.getpid())
    hello = process.first_message(channel := Channel(others), others)
    assert hello is not None
    running.callback(channel.close)
    return RemoteEngine(channel, hello._replace(model=made.target))  # whose tokenizer tests may change


@contextmanager
def app_running(app: FastAPI, drain_seconds: int = 5, before: Callable[[], None] = lambda: None) -> Iterator[str]:
    """The address of any application that runs in this block."""
    uvicorn = server.make_server(app, drain_seconds, before)
    with server.bind("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=uvicorn.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            wait_for(lambda: uvicorn.started)
            yield server.address(bound)
        finally:
            uvicorn.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


def wait_for(met: Callable[[], Any], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "this takes too long"
        time.sleep(0.01)


@cache
def http() -> httpx.Client:
    """A client for all tests: making one takes long."""
    return httpx.Client(verify=False, timeout=20)


def client(address: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=30)
