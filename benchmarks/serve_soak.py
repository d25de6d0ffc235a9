"""A server under load from clients that disconnect, send nonsense and huge prompts; then SIGTERM under load.

python benchmarks/serve_soak.py [--clients 64] [--seconds 180] [--target TARGET] [--policy auto] [--json FILE]

The texts of all cases are first generated alone, by plain decoding. Then each client sends random requests: most are
cases, whole or as streams; in some the client leaves early, the body is wrong, the prompt is too long, the schema takes
too long to compile, or a processor raises an error. Every accepted request must get exactly the text of its case, every
other one the right error, none may take longer than 600 seconds, and the memory of the server must not grow in the last
quarter. At last the server gets SIGTERM while requests run and wait: all of them must be answered, and the server must
end with code 0. The exit code is 1 if anything is wrong. Needs Linux, for the memory of another process.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from provenance import publish
from soak_traffic import MARK, TIMEOUT_SECONDS, Case, Client, Outcome, make_cases, text_of

from windfall.render import console

CASES = 16
GRAMMAR_SECONDS = 2.0
DRAIN_SECONDS = 600
ENDING_REQUESTS = 24  # that run or wait when the server gets SIGTERM
MEMORY_SLACK = 0.03  # share by which the median of the memory may grow from the third quarter to the last
LONG_RUN = 300  # requests from which the memory must be flat; before, caches still fill
SAMPLE_SECONDS = 3.0
MAX_REPORTED = 20  # wrong answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "drafter", "json"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, __file__, "--serve", *sys.argv[1:]]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url:
                process.wait()
                log.seek(0)
                sys.exit(f"the server does not start:\n{log.read().decode(errors='replace')}")
            result = asyncio.run(soak(url, process, options))
        finally:
            process.kill()
        log.seek(0)
        errors = [line for line in log.read().decode(errors="replace").splitlines() if "a request failed" in line]
    expected = result["requests"].get("failing processor", {}).get("right", 0)
    result["errors_logged"] = len(errors)
    right = bool(result.pop("right")) and len(errors) == expected
    publish({"right": right, **result, "policy": options.policy, "device": "cpu", "dtype": "float32"}, options.json)
    sys.exit(not right)


async def soak(url: str, process: subprocess.Popen[str], options: argparse.Namespace) -> dict[str, Any]:
    """What became of all requests."""
    chance = random.Random(options.seed)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_SECONDS, limits=limits) as http:
        cases = await plain_texts(http, chance)
        start = time.perf_counter()
        outcomes, memory, slowest = await load(http, cases, process, options)
        seconds = time.perf_counter() - start
        ready = (await http.get("/ready")).json()
        generated = await generated_tokens(http)
        ending = await terminate(http, cases, process, chance)
    quarter = max(len(memory) // 4, 1)
    growth = statistics.median(memory[-quarter:]) / statistics.median(memory[-2 * quarter : -quarter] or memory) - 1
    idle = ready == {"status": "ready", "running": 0, "waiting": 0}
    wrong = [f"{each.kind}: {each.about}" for each in outcomes if each.end in ("wrong", "stuck")]
    flat = growth <= MEMORY_SLACK or len(outcomes) < LONG_RUN
    by_kind: dict[str, Counter[str]] = {}
    for each in outcomes:
        by_kind.setdefault(each.kind, Counter())[each.end] += 1
    return {
        "right": not wrong and idle and flat and ending["right"],
        "clients": options.clients,
        "seconds": round(seconds, 1),
        "requests": {kind: dict(ends) for kind, ends in sorted(by_kind.items())},
        "wrong": wrong[:MAX_REPORTED],
        "wrong_count": len(wrong),
        "slowest_seconds": round(slowest, 1),
        "idle_afterwards": idle,
        "tokens_per_second": round(generated / seconds, 1),
        "memory_bytes": memory,
        "memory_growth": round(growth, 4),
        "sigterm": ending,
        "cases": len(cases),
    }


async def plain_texts(http: httpx.AsyncClient, chance: random.Random) -> list[Case]:
    """All cases with their texts by plain decoding, one after another."""
    made, cases = make_cases(CASES, chance), []
    with console.progress("Generating each text alone…") as progress:
        for number, (path, body) in enumerate(made):
            answer = (await http.post(path, json={**body, "policy": "none"})).json()
            cases.append(Case(path, body, text_of(answer["choices"][0])))
            progress((number + 1) / len(made))
    return cases


async def load(
    http: httpx.AsyncClient, cases: list[Case], process: subprocess.Popen[str], options: argparse.Namespace
) -> tuple[list[Outcome], list[int], float]:
    """The outcomes of all requests, the memory of the server over time, and the seconds of the slowest request."""
    outcomes: list[Outcome] = []
    memory: list[int] = []
    slowest = [0.0]
    start = time.perf_counter()

    def passed() -> float:
        return time.perf_counter() - start

    async def client(number: int) -> None:
        own = Client(http, cases, random.Random(options.seed + number))
        while passed() < options.seconds and process.poll() is None:
            asked = time.perf_counter()
            outcomes.append(await own.ask())
            slowest[0] = max(slowest[0], time.perf_counter() - asked)
            if outcomes[-1].end == "refused":
                await asyncio.sleep(1)

    async def watch() -> None:
        with console.progress("Soaking…") as progress:
            while passed() < options.seconds and process.poll() is None:
                memory.append(used_memory(process.pid))
                progress(passed() / options.seconds)
                await asyncio.sleep(SAMPLE_SECONDS)

    await asyncio.gather(watch(), *(client(number) for number in range(options.clients)))
    return outcomes, memory, slowest[0]


async def terminate(
    http: httpx.AsyncClient, cases: list[Case], process: subprocess.Popen[str], chance: random.Random
) -> dict[str, Any]:
    """Send SIGTERM while requests run and wait; all of them must be answered with their texts."""
    own = Client(http, cases, chance)
    asked = [asyncio.create_task(own.stream() if number % 2 else own.whole()) for number in range(ENDING_REQUESTS)]
    while (await http.get("/ready")).json()["running"] == 0:
        await asyncio.sleep(0.05)
    await asyncio.sleep(1)
    unfinished = sum(not each.done() for each in asked)
    process.terminate()
    start = time.perf_counter()
    found = await asyncio.gather(*asked, return_exceptions=True)
    code = await asyncio.to_thread(process.wait, DRAIN_SECONDS + 30)
    complete = sum(isinstance(each, Outcome) and each.end == "right" for each in found)
    return {
        "right": complete == len(found) and code == 0 and unfinished > 0,
        "requests": len(found),
        "unfinished_at_signal": unfinished,
        "complete": complete,
        "exit_code": code,
        "seconds": round(time.perf_counter() - start, 1),
    }


async def generated_tokens(http: httpx.AsyncClient) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith("windfall:generation_tokens_total")))


def used_memory(pid: int) -> int:
    """Bytes of physical memory that a process has."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) * 1024


# ---- the process of the server


class Failing:
    """A logits processor that raises an error at the second token."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: Any, logits: Any) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("this processor always fails")
        return logits


def let_marked_fail(engine: Any) -> None:
    """Give texts with the marked prompt a processor that fails."""
    usual, marked = engine.submit_ids, engine.encode(MARK, raw=True)

    def submit(prompt: Any, **given: Any) -> Any:
        return usual(prompt, **given, **({"processors": (Failing(),)} if prompt == marked else {}))

    engine.submit_ids = submit


def serve(options: argparse.Namespace) -> None:
    """Serve the model as `windfall serve` does, and print the address. Marked prompts get a processor that fails."""
    import windfall
    from windfall import registry
    from windfall.serve import server
    from windfall.serve.app import make_app
    from windfall.serve.settings import Settings

    engine = windfall.load(options.target, options.drafter, registry.policy(options.policy), "cpu")
    let_marked_fail(engine)
    with engine, server.bind("127.0.0.1", 0) as bound:
        app = make_app(engine, Settings(grammar_timeout=GRAMMAR_SECONDS))
        engine.prepare()
        print(server.address(bound), flush=True)
        server.run(app, bound, engine, DRAIN_SECONDS)


if __name__ == "__main__":
    main()
