"""`windfall serve`: the OpenAI API over the model."""

from __future__ import annotations

import os
from contextlib import ExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING

from windfall.cli.declare import complete, option
from windfall.cli.options import BatchOptions, ModelOptions, PolicyOptions
from windfall.cli.session import freeze_objects, remember_costs
from windfall.core.errors import InputError
from windfall.core.wording import listed
from windfall.render import console
from windfall.serve.options import ServerOptions
from windfall.serve.settings import DRAIN_SECONDS

if TYPE_CHECKING:
    from windfall.engine.engine import Engine

KEY_VARIABLE = "WINDFALL_API_KEY"
NEEDED = ("fastapi", "uvicorn", "prometheus_client")
MAX_PORT = 65_535


def serve(
    model: ModelOptions,
    policy: PolicyOptions,
    batch: BatchOptions,
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 accepts connections from other machines."),
    port: int = option(8000, "Port to listen on; 0: any free port."),
    api_key: list[str] = option(
        [], f"Key that clients must send. Repeatable. Default: {KEY_VARIABLE}, or no key.", metavar="KEY"
    ),
    *,
    limits: ServerOptions,
    drain_seconds: int = option(
        DRAIN_SECONDS, "Time that running requests have to finish after SIGTERM or Ctrl-C.", min=0, metavar="SECONDS"
    ),
    request_policy: list[str] = option(
        [],
        "Policy that a request may choose, in addition to none. Repeatable.",
        metavar="NAME",
        autocompletion=complete("policies"),
    ),
    http_processes: int | None = option(
        None, "Processes that answer HTTP requests; 0: the process of the engine does it. Default: by the machine."
    ),
    no_page: bool = option(False, "Do not offer the live page at / and its data."),
) -> None:
    """Serve the model over the OpenAI API, until Ctrl-C or SIGTERM.

    Running requests then have 30 seconds to finish, or the time of --drain-seconds. The server needs fastapi, uvicorn
    and prometheus_client, which the extra `serve` installs.
    """
    check_extra()
    from windfall.serve import log_format as log_formats
    from windfall.serve import policies, server
    from windfall.serve.workers import pool

    if not 0 <= port <= MAX_PORT:
        raise InputError(f"--port takes a number from 0 to {MAX_PORT}, not {port}")
    log_formats.check(limits.log_format)
    settings = limits.settings_with(_keys(api_key), tuple(request_policy), page=not no_page)
    made_policy = policy.make()
    policies.offered(request_policy)  # before the weights are read: a wrong name costs no loading
    count = pool.default_count(model.device) if http_processes is None else pool.checked_count(http_processes)
    with server.bind(host, port) as bound, ExitStack() as started:
        if not settings.api_keys and not server.is_local(bound):
            console.note("other machines can use this server without a key; set one with --api-key")
        others = started.enter_context(pool.http_processes(bound, count)) if count else None
        with model.load(made_policy, batch) as engine:
            from windfall.serve.admission import Admission
            from windfall.serve.app import make_app

            if others is not None and not has_portable_tokenizer(engine, required=http_processes is not None):
                started.close()
                others = None
            with console.progress("Preparing for batches…") as progress:
                engine.prepare(progress=progress)
            if engine.target.device.type == "cuda":
                note_slow_batches(engine)
            url = server.address(bound)
            page = f" (live page: {url}/)" if settings.page else ""
            freeze_objects()
            console.note(f"serving {settings.model_name or engine.target.name} on {url}/v1{page}")
            try:
                with log_formats.logging_as(limits.log_format):
                    if others is None:
                        server.run(make_app(engine, settings), bound, engine, drain_seconds)
                    else:
                        others.run(Admission(engine, settings), limits.log_format, drain_seconds)
            finally:
                if engine.lost is None:
                    remember_costs(engine)


def has_portable_tokenizer(engine: Engine, required: bool) -> bool:
    """Whether HTTP processes can have the tokenizer; an InputError if they must, else a note."""
    from windfall.serve.workers.pool import check_tokenizer

    try:
        check_tokenizer(engine.target.tokenizer)
    except InputError as problem:
        if required:
            raise
        console.note(f"the process of the engine answers HTTP requests: {problem}")
        return False
    return True


def note_slow_batches(engine: Engine) -> None:
    """Say if requests that run together will not be drafted, or will not share passes."""
    if engine.undrafted:
        console.note(f"requests that run at the same time are decoded without drafts: {engine.undrafted}")
    elif engine.batch_fallback:
        console.note(f"requests do not share passes on the GPU, which is slower: {engine.batch_fallback}")


def check_extra() -> None:
    """Refuse to start without the packages of the server."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise InputError(f"the server needs {listed(missing)}; run: pip install windfall[serve]")


def _keys(given: list[str]) -> tuple[str, ...]:
    """The keys of the command line, or that of the environment."""
    from_environment = os.environ.get(KEY_VARIABLE)
    return tuple(given or ([from_environment] if from_environment else []))
