"""The server's own time per request and per event of a stream, with a made-up engine.

python benchmarks/serve_cost.py [--clients 64] [--round-ms 2] [--tokens 2,2048] [--seconds 5] [--json FILE]

The engine's rounds take a fixed time, in which the device would work, and give each text two tokens. All else is as in
`windfall serve`: HTTP, tokenizer, chat template, queue, detokenizer, JSON. Clients in another process send chats as
streams, each as soon as its last one has ended. The times are those that the CPU spends in the thread of the server,
per request, event and token; waiting does not count, so other programs disturb little. Short texts tell what a request
costs, and long ones what an event of a stream costs.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, cast

from provenance import publish

TOKENS = 2  # of a text in a round
TEXT = "The river carried the small boat past fields, farms and villages, and nobody on it said a word. "
SWITCH_SECONDS = 5e-6  # between two looks at the clock, in which other threads may run
END = b"0\r\n\r\n"  # of an answer in chunks
EVENT = b'data: {"id"'
READ_BYTES = 2**18


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--round-ms", type=float, default=2)
    parser.add_argument("--tokens", default="2,2048", help="lengths of texts")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--target")
    parser.add_argument("--json")
    parser.add_argument("--send", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send is not None:
        send(options.send, options.clients, int(options.tokens), options.seconds)
        return
    lengths = sorted(map(int, options.tokens.split(",")))
    rows = [measure(options, length) for length in lengths]
    publish({"clients": options.clients, "round_ms": options.round_ms, "rows": rows}, options.json)


# ---- the server


class MadeUpRunner:
    """A BatchRunner without a model. Like that of a GPU, it returns Steps whose text is decoded when it is read."""

    max_length, has_room, spent = None, True, 0.0

    def __init__(self, words: list[int], seconds: float):
        """`words`: the ids that all texts repeat; `seconds`: of a round."""
        from windfall.core.types import Split
        from windfall.engine.batch_runner import Use
        from windfall.engine.gpu.batch.results import BatchStep

        self.words, self.seconds, self.use = words, seconds, Use()
        self._step, self._parts = BatchStep, Split()
        self.texts: list[Any] = []
        self._due = time.perf_counter()

    def join(self, sequences: list[Any]) -> None:
        self.texts += sequences

    def leave(self, sequences: Iterable[Any]) -> None:
        gone = set(sequences)
        self.texts = [text for text in self.texts if text not in gone]

    def fits(self, lengths: Mapping[Any, int]) -> bool:
        return True

    def round(self) -> dict[Any, Any]:
        MadeUpRunner.spent = time.thread_time()
        now = time.perf_counter()
        self._due = max(self._due + self.seconds, now)
        while time.perf_counter() < self._due:
            time.sleep(SWITCH_SECONDS)
        texts = self.texts
        results = cast(Any, SimpleNamespace(
            tokens=[],
            rows=[TOKENS] * len(texts),
            accepted=[TOKENS] * len(texts),
            taken=[0] * len(texts),
            ends=[0] * len(texts),
            sizes=SimpleNamespace(passes=1),
            seconds=self._parts,
            recorded=False,
        ))  # fmt: skip
        steps = {}
        for seat, text in enumerate(texts):
            begin = len(text.tokens) % len(self.words)
            results.tokens.append(self.words[begin : begin + TOKENS])
            results.taken[seat] = text.extend(results.tokens[seat])
            results.ends[seat] = end = len(text.tokens) - text.prompt_length
            text.late_text.ends.append(end)
            text.late_text.final = text.finish is not None
            steps[text] = self._step(results, seat, text.late_text, text.finish)
        results.counts = [(taken, TOKENS, TOKENS - 1, TOKENS - 1, 1) for taken in results.taken]
        return steps


def measure(options: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Seconds of the server's thread while clients ask for texts of this length."""
    import windfall
    from windfall.cli.session import freeze_objects
    from windfall.serve import server
    from windfall.serve.app import make_app

    engine = windfall.load(options.target, policy="none", device="cpu", max_requests=options.clients)
    words = engine.encode(TEXT * 4, raw=True)
    made_up = MadeUpRunner(words + words[:TOKENS], options.round_ms / 1000)
    engine._batch_runner = lambda: made_up  # type: ignore[method-assign,assignment,return-value]
    uvicorn = server.make_server(make_app(engine))
    freeze_objects()
    with engine, server.bind("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=uvicorn.run, kwargs={"sockets": [bound]})
        thread.start()
        while not uvicorn.started:
            time.sleep(0.01)
        clock = time.pthread_getcpuclockid(cast(int, thread.ident))
        before, everything = time.clock_gettime(clock), time.process_time()
        command = [sys.executable, __file__, "--send", str(bound.getsockname()[1]), "--clients", str(options.clients)]
        command += ["--tokens", str(tokens), "--seconds", str(options.seconds)]
        counts = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        spent, everything = time.clock_gettime(clock) - before, time.process_time() - everything
        uvicorn.should_exit = True
        thread.join()
    generated = counts["requests"] * tokens
    return {
        "tokens": tokens,
        **counts,
        "tokens_per_second": round(generated / counts["seconds"]),
        "server_seconds": spent,
        "process_seconds": everything,
        "per_request_us": round(1e6 * spent / counts["requests"]),
        "per_event_us": round(1e6 * spent / counts["events"]),
        "per_token_us": round(1e6 * spent / generated, 2),
        "server_share": round(spent / counts["seconds"], 3),
    }


# ---- the clients


def send(port: int, clients: int, tokens: int, seconds: float) -> None:
    """Send requests for this time, and print what came back."""
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": tokens, "stream": True}
    content = json.dumps({**body, "ignore_eos": True, "temperature": 0, "stream_options": {"include_usage": True}})
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: server\r\nContent-Type: application/json\r\n"
    asked = f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode()
    waiting, requests, events, reads = selectors.DefaultSelector(), 0, 0, 0
    start = time.perf_counter()
    for _ in range(clients):
        made = socket.create_connection(("127.0.0.1", port))
        made.sendall(asked)
        waiting.register(made, selectors.EVENT_READ)
    left = clients
    while left:
        for key, _ in waiting.select():
            connection = cast(socket.socket, key.fileobj)
            found = connection.recv(READ_BYTES)
            assert found, "the server has closed a connection"
            reads, events = reads + 1, events + found.count(EVENT)
            if not found.endswith(END):
                continue
            requests += 1
            if time.perf_counter() - start < seconds:
                connection.sendall(asked)
            else:
                waiting.unregister(connection)
                connection.close()
                left -= 1
    wall = time.perf_counter() - start
    print(json.dumps({"requests": requests, "events": events, "reads": reads, "seconds": round(wall, 2)}))


if __name__ == "__main__":
    main()
