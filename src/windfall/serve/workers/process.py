"""The main function of an HTTP process: `python -m windfall.serve.workers.process CONNECTION SOCKET`.

Both arguments are file numbers that `pool` hands over: of the connection to the process of the engine, and of the
socket to listen on. Nothing here imports torch.
"""

from __future__ import annotations

import os
import socket
import sys
import threading

from windfall.core.garbage import freeze_objects
from windfall.serve import log_format, server
from windfall.serve.app import app_over
from windfall.serve.workers.channel import Channel
from windfall.serve.workers.client import RemoteEngine
from windfall.serve.workers.messages import Hello

ORPHAN_SECONDS = 5.0  # that answers may take to end when the process of the engine has ended


def run(connection: socket.socket, bound: socket.socket) -> None:
    """Serve until SIGTERM, or until the process of the engine ends."""
    channel = Channel(connection)
    prepare_tokenizers()
    hello = first_message(channel, connection)
    if hello is None:
        return
    backend = RemoteEngine(channel, hello)
    with log_format.logging_as(hello.log_format):

        def end() -> None:
            made.should_exit = made.force_exit = True
            late = threading.Timer(ORPHAN_SECONDS, os._exit, [1])
            late.daemon = True
            late.start()

        made = server.make_server(app_over(backend), hello.drain_seconds, lambda: backend.attach(end))
        freeze_objects()
        with server.received_signals():
            made.run(sockets=[bound])


def prepare_tokenizers() -> None:
    """Import what tokenizers need, code from the hub included."""
    from transformers import PreTrainedTokenizerFast
    from transformers.dynamic_module_utils import init_hf_modules

    assert PreTrainedTokenizerFast
    init_hf_modules()


def first_message(channel: Channel, connection: socket.socket) -> Hello | None:
    """What the process of the engine says when it has loaded its model; None if it ends before."""
    connection.setblocking(True)
    try:
        while not (messages := channel.receive()):
            pass
    except EOFError:
        return None
    connection.setblocking(False)
    hello: Hello = messages[0]
    return hello


def main() -> None:
    connection, bound = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    run(connection, bound)


if __name__ == "__main__":
    main()
