"""What the server costs, with a made-up engine: its time per request and event, and rounds that the engine loses.

python benchmarks/serve_cost.py [--ways alone,0,1,2] [--clients 64] [--round-ms 1.3] [--tokens 128] [--seconds 5]
    [--json FILE]

The engine's rounds take a fixed time, in which the device would work, and give each text two tokens. All else is as in
`windfall serve`: HTTP, tokenizer, chat template, queue, detokenizer, JSON. Clients in another process send chats as
streams, each as soon as its last one has ended.

Each of the ways is measured with each length of texts: `alone` is the engine without a server, which generates the same
texts, 0 a server in the process of the engine, and 1, 2, … that number of HTTP processes. Host and device work at the
same time, as they do on a GPU: a round is late if the host is.

CPU times are those of single threads and processes. Waiting does not count, so other programs disturb them little.
Rounds per second also show what waits for a core or for Python's interpreter lock. Short texts tell what a request
costs, and long ones what an event of a stream costs.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from provenance import publish

TOKENS = 2  # of a text in a round
TEXT = "The river carried the small boat past fields, farms and villages, and nobody on it said a word. "
END = b"0\r\n\r\n"  # of an answer in chunks
EVENT = b'data: {"id"'
READ_BYTES = 2**18


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--ways", default="alone,0,1,2", help="alone, or numbers of HTTP processes")
    parser.add_argument("--round-ms", type=float, default=1.3)
    parser.add_argument("--host-ms", type=float, default=0.0, help="work of the host in each round, besides its own")
    parser.add_argument("--tokens", default="128", help="lengths of texts")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--target")
    parser.add_argument("--json")
    parser.add_argument("--send", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send is not None:
        send(options.send, options.clients, int(options.tokens), options.seconds)
        return
    lengths = sorted(map(int, options.tokens.split(",")))
    rows = [measure(options, way, length) for length in lengths for way in options.ways.split(",")]
    settings = {name: getattr(options, name) for name in ("clients", "round_ms", "host_ms", "seconds")}
    publish({"what": "cost of the server", **settings, "cores": os.cpu_count(), "rows": rows}, options.json)


# ---- the server


class MadeUpRunner:
    """A BatchRunner without a model. Like that of a GPU, it returns Steps whose text is decoded when it is read."""

    max_length, has_room = None, True

    def __init__(self, words: list[int], seconds: float, host_seconds: float = 0.0):
        """`words`: the ids that all texts repeat; `seconds`: of a round; `host_seconds`: that Python works in it."""
        from windfall.core.types import Split
        from windfall.engine.batch_runner import Use
        from windfall.engine.gpu.batch.results import BatchStep

        self.words, self.seconds, self.use, self.host_seconds = words, seconds, Use(), host_seconds
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
        worked = time.thread_time() + self.host_seconds
        while time.thread_time() < worked:
            pass
        now = time.perf_counter()
        self._due = max(self._due + self.seconds, now)
        time.sleep(self._due - now)
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


def measure(options: argparse.Namespace, way: str, tokens: int) -> dict[str, Any]:
    """The figures of one way while clients ask for texts of this length."""
    import windfall
    from windfall.core.garbage import freeze_objects

    engine = windfall.load(options.target, policy="none", device="cpu", max_requests=options.clients)
    words = engine.encode(TEXT * 4, raw=True)
    made_up = MadeUpRunner(words + words[:TOKENS], options.round_ms / 1000, options.host_ms / 1000)
    engine._batch_runner = lambda: made_up  # type: ignore[method-assign,assignment,return-value]
    freeze_objects()
    with engine:
        if way == "alone":
            return figures(options, engine, way, tokens, lambda: generate(engine, options, tokens), [])
        with server_of(engine, int(way)) as (port, processes):
            command = [sys.executable, __file__, "--send", str(port), "--clients", str(options.clients)]
            command += ["--tokens", str(tokens), "--seconds", str(options.seconds)]

            def ask() -> dict[str, Any]:
                return dict(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))

            return figures(options, engine, way, tokens, ask, processes)


@contextmanager
def server_of(engine: Any, count: int) -> Iterator[tuple[int, list[int]]]:
    """The port of a server with this number of HTTP processes, and their ids."""
    from windfall.serve import server
    from windfall.serve.admission import Admission
    from windfall.serve.app import make_app
    from windfall.serve.settings import Settings
    from windfall.serve.workers.pool import http_processes

    with server.bind("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        if not count:
            uvicorn = server.make_server(make_app(engine))
            thread = threading.Thread(target=uvicorn.run, kwargs={"sockets": [bound]})
            thread.start()
            while not uvicorn.started:
                time.sleep(0.01)
            yield port, []
            uvicorn.should_exit = True
            thread.join()
            return
        with http_processes(bound, count) as pool:
            thread = threading.Thread(target=pool.run, args=(Admission(engine, Settings()), "none", 1))
            thread.start()
            pool.ready.wait()
            yield port, pool.ids
            pool.stop()
            thread.join()


def figures(
    options: argparse.Namespace,
    engine: Any,
    way: str,
    tokens: int,
    ask: Callable[[], dict[str, Any]],
    processes: list[int],
) -> dict[str, Any]:
    """What `ask` counts, and the time that threads and processes spend meanwhile."""
    from windfall.engine.service import Service

    spent = [0.0]  # CPU seconds of the engine's threads: a new one starts when there was nothing to do
    usual = Service._work

    def work(service: Service) -> None:
        usual(service)
        spent[0] += time.thread_time()

    Service._work = work  # type: ignore[method-assign]
    rounds, own, others = engine.counters.rounds, time.process_time(), sum(map(cpu_seconds, processes))
    counts = ask()
    while engine._service.busy:
        time.sleep(0.001)
    time.sleep(0.1)
    Service._work = usual  # type: ignore[method-assign]
    rounds, own = engine.counters.rounds - rounds, time.process_time() - own
    others = sum(map(cpu_seconds, processes)) - others
    generated, beside = counts["requests"] * tokens, max(own - spent[0], 0.0)
    server = others if processes else beside
    row = {
        "way": way,
        "tokens": tokens,
        **counts,
        "rounds": rounds,
        "rounds_per_second": round(rounds / counts["seconds"]),
        "tokens_per_second": round(generated / counts["seconds"]),
        "engine_us_per_round": round(1e6 * spent[0] / rounds),
        "beside_engine_us_per_request": round(1e6 * beside / counts["requests"]),
        "server_us_per_request": round(1e6 * server / counts["requests"]),
        "server_us_per_event": round(1e6 * server / counts["events"]) if counts.get("events") else None,
        "server_us_per_token": round(1e6 * server / generated, 2),
        "server_cores": round(server / counts["seconds"], 3),
        "load_average": os.getloadavg()[0],
    }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def cpu_seconds(process: int) -> float:
    """That a process has spent, all threads together."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def generate(engine: Any, options: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """As many texts at once as there are clients, without a server."""
    ids, ended, requests = engine.encode([{"role": "user", "content": TEXT}]), queue.SimpleQueue[Any](), 0
    start, left = time.perf_counter(), options.clients

    def submit() -> None:
        engine.submit(ids, max_new_tokens=tokens, eos=()).add_done_callback(ended.put)

    for _ in range(options.clients):
        submit()
    while left:
        ended.get()
        requests += 1
        if time.perf_counter() - start < options.seconds:
            submit()
        else:
            left -= 1
    return {"requests": requests, "seconds": round(time.perf_counter() - start, 2)}


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
