"""What `windfall serve` costs: tokens per second of the server and of the bare engine, on the same prompts.

python benchmarks/serve_overhead.py [TASK…] [--target TARGET] [--methods none,auto] [--clients 1,4,16,64] [--json FILE]

For each method, one process serves the model (`windfall serve`), and another one holds the bare engine, with the same
number of requests in flight (`Engine.submit`). They take turns: a run of the engine with each number of requests, then
a run of the server with the same numbers of clients (`windfall bench serve`, in a process of its own), and so on. While
one works, the other is idle. Both have the same requests: greedy chats, all answers equally long. Tokens per second are
those from the first request to the end of the last. The overhead is 1 - server / engine. All figures are medians of the
rounds, of percentiles, too.
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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from provenance import publish

MODEL_OPTIONS = ("target", "drafter", "device", "dtype", "kv_memory")
TIMES = ("ttft", "tpot")
START_SECONDS = 600.0  # that a server has to load its model
STOP_SECONDS = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=["builtin"], help="JSONL files with prompts, or builtin")
    for name in ("target", "drafter", "device", "dtype", "kv-memory", "json"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--methods", default="none,auto", help="policies")
    parser.add_argument("--clients", default="1,4,16,64", help="requests in flight")
    parser.add_argument("--requests", type=int, help="of each run; default: as `windfall bench serve`")
    parser.add_argument("--limit", type=int, default=12, help="prompts of each task")
    parser.add_argument("--tokens", type=int, default=128, help="length of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--note", help="a sentence about the measurement, for example that the machine was shared")
    parser.add_argument("--engine", metavar="METHOD", help=argparse.SUPPRESS)  # this process holds the engine
    options = parser.parse_args()
    if options.engine:
        hold_engine(options)
        return
    rows, about = [], dict[str, Any]()
    for method in options.methods.split(","):
        measured = measure(method, options)
        about |= measured.pop("about")
        rows += measured.pop("rows")
    names = ("tasks", "clients", "requests", "limit", "tokens", "rounds", "kv_memory")
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
    with bare_engine(method, options) as engine, server(method, options) as url:  # they load at the same time
        about = engine.about()
        for _ in range(options.rounds):
            found = {"engine": engine.ask(clients(options)), "server": load_test(url, options)}
            runs.append({side: {row["concurrency"]: row for row in rows} for side, rows in found.items()})
            print(f"{method}: round {len(runs)} of {options.rounds} done", file=sys.stderr, flush=True)
    rows = [row(method, each, [{side: run[side][each] for side in run} for run in runs]) for each in clients(options)]
    return {"about": about, "rows": rows}


def row(method: str, count: int, runs: Sequence[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """The medians of several runs."""
    rates = {side: [run[side]["tokens_per_second"] for run in runs] for side in ("engine", "server")}
    made: dict[str, Any] = {"method": method, "clients": count, "requests": runs[0]["server"]["requests"]}
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


# ---- the server


@contextmanager
def server(method: str, options: argparse.Namespace) -> Iterator[str]:
    """The address of a server that runs in this block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "windfall", "serve", "--port", port, "--policy", method]
    command += ["--max-requests", str(max(clients(options))), *given(options)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
            while not ready(url):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    sys.exit(f"the server does not start:\n{log.read().decode(errors='replace')}")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            finally:
                process.kill()


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def given(options: argparse.Namespace) -> list[str]:
    """The options of the model, as the command line takes them."""
    found = {name: getattr(options, name) for name in MODEL_OPTIONS}
    return [word for name, value in found.items() if value for word in (f"--{name.replace('_', '-')}", value)]


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


# ---- the bare engine


class BareEngine:
    """A process that holds an engine, and measures it when it is asked."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process

    def about(self) -> dict[str, Any]:
        """What it loaded; to be asked once, and first."""
        found: dict[str, Any] = self._answer()
        return found

    def ask(self, counts: Sequence[int]) -> list[dict[str, Any]]:
        """A run for each of these numbers of requests in flight."""
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
def bare_engine(method: str, options: argparse.Namespace) -> Iterator[BareEngine]:
    command = [sys.executable, __file__, *sys.argv[1:], "--engine", method]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield BareEngine(process)
    finally:
        process.kill()
        process.wait()


def hold_engine(options: argparse.Namespace) -> None:
    """Load the engine as `windfall serve` does; then a run for each number of a line on standard input."""
    import windfall
    from windfall import registry
    from windfall.bench.serving.workload import Level, Settings
    from windfall.bench.tasks import in_turns, load_tasks
    from windfall.bench.throughput.serve import engine_server
    from windfall.cli.session import freeze_objects

    answers, sys.stdout = sys.stdout, sys.stderr
    model = {name: getattr(options, name) for name in MODEL_OPTIONS}
    engine = windfall.load(policy=registry.policy(options.engine), max_requests=max(clients(options)), **model)
    engine.prepare()
    freeze_objects()
    dtype, device = str(engine.target.decoder.dtype).removeprefix("torch."), engine.target.device.type
    about = {"target": Path(engine.target.name).name, "device": device, "dtype": dtype}
    print(json.dumps(about), file=answers, flush=True)
    prompts = in_turns(load_tasks(options.tasks, options.limit))
    serve = engine_server(engine, 0.0)
    run(engine, serve, prompts, 1, 1, options.tokens)
    settings = Settings(requests=options.requests)
    for line in sys.stdin:
        asked = {count: settings.count(Level(count), len(prompts)) for count in json.loads(line)}
        found = [run(engine, serve, prompts, count, requests, options.tokens) for count, requests in asked.items()]
        print(json.dumps(found), file=answers, flush=True)


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
