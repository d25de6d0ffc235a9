"""What `windfall serve` costs: tokens per second of the server and of the bare engine, on the same prompts.

python benchmarks/serve_overhead.py [TASK…] [--target TARGET] [--methods none,auto] [--clients 1,4,16,64]
                                    [--http-processes 0,2,4] [--json FILE]

For each method, one process holds an engine, and serves it as `windfall serve` does, with each of these numbers of HTTP
processes. They take turns: a run of the bare engine with each number of requests in flight (`Engine.submit`), then runs
with the same numbers of clients (`windfall bench serve`, in a process of its own) for each server, and so on. All have
the same requests: greedy chats, all answers equally long.
Tokens per second are those from the first request to the end of the last. The overhead is 1 - server / engine. All
figures are medians of the rounds, of percentiles, too.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from provenance import publish

TIMES = ("ttft", "tpot")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=["builtin"], help="JSONL files with prompts, or builtin")
    for name in ("target", "drafter", "device", "dtype", "kv-memory", "json"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--methods", default="none,auto", help="policies")
    parser.add_argument("--widen", help="zero-pad the model to a larger one's size, such as llama-3.1-8b")
    parser.add_argument("--clients", default="1,4,16,64", help="requests in flight")
    parser.add_argument("--requests", type=int, help="of each run; default: as `windfall bench serve`")
    parser.add_argument("--limit", type=int, default=12, help="prompts of each task")
    parser.add_argument("--tokens", type=int, default=128, help="length of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--http-processes", help="of the servers; default: one server as `windfall serve` starts it")
    parser.add_argument("--note", help="a sentence about the measurement, for example that the machine was shared")
    parser.add_argument("--engine", metavar="METHOD", help=argparse.SUPPRESS)  # this process holds the engine
    options = parser.parse_args()
    if options.engine:
        serve_engine(options)
        return
    rows, about = [], dict[str, Any]()
    for method in options.methods.split(","):
        measured = measure(method, options)
        about |= measured.pop("about")
        rows += measured.pop("rows")
    names = ("tasks", "clients", "requests", "limit", "tokens", "rounds", "kv_memory", "widen", "http_processes")
    settings = {
        **{name: getattr(options, name) for name in names},
        "tasks": [Path(task).name for task in options.tasks],
    }
    noted = {"note": options.note} if options.note else {}
    publish({"what": "overhead of the server", **about, "settings": settings, "rows": rows, **noted}, options.json)


def clients(options: argparse.Namespace) -> tuple[int, ...]:
    return tuple(sorted(map(int, options.clients.split(","))))


def measure(method: str, options: argparse.Namespace) -> dict[str, Any]:
    """All rounds with this policy."""
    runs: list[dict[str, dict[int, dict[str, Any]]]] = []
    with served_engine(method) as engine:
        for _ in range(options.rounds):
            found = {"engine": engine.ask(clients(options))}
            found |= {processes: load_test(url, options) for processes, url in engine.urls.items()}
            runs.append({side: {row["concurrency"]: row for row in rows} for side, rows in found.items()})
            print(f"{method}: round {len(runs)} of {options.rounds} done", file=sys.stderr, flush=True)
    rows = []
    for each in clients(options):
        for processes in engine.urls:
            pairs = [{"engine": run["engine"][each], "server": run[processes][each]} for run in runs]
            rows.append(row(method, each, int(processes), pairs))
    return {"about": engine.about, "rows": rows}


def row(method: str, count: int, processes: int, runs: Sequence[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """The medians of several runs."""
    rates = {side: [run[side]["tokens_per_second"] for run in runs] for side in ("engine", "server")}
    made: dict[str, Any] = {"method": method, "clients": count, "http_processes": processes}
    made["requests"] = runs[0]["server"]["requests"]
    made["errors"] = sum(sum(run["server"]["errors"].values()) for run in runs)
    for side, found in rates.items():
        times = {name: medians([run[side][name] for run in runs]) for name in TIMES}
        made[side] = {"tokens_per_second": statistics.median(found), "runs": found, **times}
    pairs = zip(rates["server"], rates["engine"], strict=True)
    overheads = [1 - server / engine for server, engine in pairs]
    return {**made, "overhead": statistics.median(overheads), "overheads": overheads}


def medians(found: Sequence[dict[str, float] | None]) -> dict[str, float] | None:
    """The median of each percentile."""
    known = [each for each in found if each is not None]
    return {name: statistics.median(each[name] for each in known) for name in known[0]} if known else None


# ---- the clients


def load_test(url: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What clients measure, a row for each number of them."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "load.json"
        command = [sys.executable, "-m", "windfall", "bench", "serve", url, "--concurrency", options.clients]
        command += ["--max-new-tokens", str(options.tokens), "--ignore-eos", "--out", str(out)]
        command += ["--tasks", ",".join(options.tasks), "--limit", str(options.limit)]
        command += ["--requests", str(options.requests)] if options.requests else []
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        rows: list[dict[str, Any]] = json.loads(out.read_text("utf-8"))["rows"]
        return rows


# ---- the process that serves


class ServedEngine:
    """A process that serves an engine, and measures the engine when it is asked."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process
        self.about: dict[str, Any] = self._answer()
        self.urls: dict[str, str] = self.about.pop("urls")  # of its servers, by the number of HTTP processes

    def ask(self, counts: Sequence[int]) -> list[dict[str, Any]]:
        """A run of the bare engine for each of these numbers of requests in flight."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(counts) + "\n")
        self._process.stdin.flush()
        found: list[dict[str, Any]] = self._answer()
        return found

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("the engine has ended; see the messages above")
        return json.loads(line)


@contextmanager
def served_engine(method: str) -> Iterator[ServedEngine]:
    command = [sys.executable, __file__, *sys.argv[1:], "--engine", method]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield ServedEngine(process)
    finally:
        process.kill()
        process.wait()


def serve_engine(options: argparse.Namespace) -> None:
    """Load and serve an engine as `windfall serve` does; then measure it for each line of standard input.

    All servers belong to one engine; those without requests are idle."""
    from windfall.bench.serving.workload import Level, Settings
    from windfall.bench.tasks import in_turns, load_tasks
    from windfall.bench.throughput.serve import engine_server
    from windfall.core.garbage import freeze_objects
    from windfall.serve import server
    from windfall.serve.workers.pool import default_count

    answers, sys.stdout = sys.stdout, sys.stderr
    engine = load_engine(options)
    given, device = options.http_processes, engine.target.device.type
    counts = [default_count(device)] if given is None else [int(count) for count in given.split(",")]
    with ExitStack() as started:
        engine.prepare()
        freeze_objects()
        urls = {}
        for count in counts:
            bound = started.enter_context(server.bind("127.0.0.1", 0))
            start_server(engine, bound, count, started)
            urls[count] = server.address(bound)
        dtype = str(engine.target.decoder.dtype).removeprefix("torch.")
        about = {"target": Path(engine.target.name).name, "device": device, "dtype": dtype}
        print(json.dumps({**about, "urls": urls}), file=answers, flush=True)
        prompts, settings = in_turns(load_tasks(options.tasks, options.limit)), Settings(requests=options.requests)
        submit = engine_server(engine, 0.0)
        run(engine, submit, prompts, 1, 1, options.tokens)
        for line in sys.stdin:
            asked = {count: settings.count(Level(count), len(prompts)) for count in json.loads(line)}
            found = [run(engine, submit, prompts, count, asked[count], options.tokens) for count in asked]
            print(json.dumps(found), file=answers, flush=True)


def start_server(engine: Any, bound: socket.socket, processes: int, started: ExitStack) -> None:
    """Serve in a thread, with HTTP processes that end with the stack."""
    from windfall.serve import server
    from windfall.serve.admission import Admission
    from windfall.serve.app import make_app
    from windfall.serve.settings import DRAIN_SECONDS, Settings
    from windfall.serve.workers import pool

    if not processes:
        uvicorn = server.make_server(make_app(engine))
        threading.Thread(target=uvicorn.run, kwargs={"sockets": [bound]}, daemon=True).start()
        return
    made = started.enter_context(pool.http_processes(bound, processes))
    given = (Admission(engine, Settings()), "none", DRAIN_SECONDS)
    threading.Thread(target=made.run, args=given, daemon=True).start()
    made.ready.wait()


def load_engine(options: argparse.Namespace) -> Any:
    import windfall
    from windfall import registry
    from windfall.bench.methods import DrafterSpec
    from windfall.bench.speed.speed import widened
    from windfall.engine.loading import as_target

    policy, how = registry.policy(options.engine), {"device": options.device, "dtype": options.dtype}
    batch = {"max_requests": max(clients(options)), "kv_memory": options.kv_memory}
    if not options.widen:
        return windfall.load(options.target, options.drafter, policy, **how, **batch)
    target, drafter = widened(as_target(options.target, **how), DrafterSpec(options.drafter or "head"), options.widen)
    return windfall.load(target, drafter.make(), policy, **batch)


def run(engine: Any, serve: Any, prompts: Any, count: int, requests: int, tokens: int) -> dict[str, Any]:
    """The figures of a run, as a load test has them."""
    from windfall.bench.runner import Case
    from windfall.bench.serving.figures import percentiles
    from windfall.bench.throughput.workload import repeated

    params = engine.params(max_new_tokens=tokens, eos=())
    asked = repeated(prompts, requests)
    cases = [Case(each, engine.encode([{"role": "user", "content": each.turns[0]}]), params) for each in asked]
    answers = serve(cases, count)
    seconds = max(answer.ended for answer in answers) - min(answer.submitted for answer in answers)
    return {
        "concurrency": count,
        "tokens_per_second": sum(len(answer.tokens) for answer in answers) / seconds,
        **{name: percentiles([getattr(answer, name) for answer in answers]) for name in TIMES},
        "load_average": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main()
