"""`windfall bench serve`: a load test of any server with the OpenAI API."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from windfall.bench.paths import shorten
from windfall.bench.tasks import in_turns, load_tasks
from windfall.cli import measuring
from windfall.cli.declare import argument, ignore_eos_option, json_option, numbers, option, tasks_option, words
from windfall.cli.serve import KEY_VARIABLE
from windfall.cli.session import ON_INTERRUPT, check_result_file, command_line, write_json
from windfall.core.errors import InputError
from windfall.core.wording import counted
from windfall.render import console
from windfall.render.tables import Figures, Wrapped, figure

if TYPE_CHECKING:
    from windfall.bench.serving.workload import Settings

FAILED = 1  # exit code if no request was answered
CONCURRENCY = "1,2,4,8"
RESULT_KEYS = ("server", "model", "rows")  # of the JSON


@dataclass
class LoadOptions:
    """What is sent."""

    PANEL = "Load"

    concurrency: str | None = option(
        None,
        f"Numbers of clients; each sends its next request when the last one ends. Default: {CONCURRENCY}, unless "
        "--rate is given.",
        metavar="A,B,C",
    )
    rate: str | None = option(None, "Requests per second at random times (Poisson); inf: all at once.", metavar="A,B,C")
    requests: int | None = option(
        None, "Requests of each run. Default: the number of prompts, but at least 16, and at least 3 per client.", min=1
    )
    tasks: list[str] = tasks_option(["builtin"])
    limit: int = option(12, "Prompts per task, spread over its categories.", min=1)
    api: str = option("chat", "API to use: chat or completions.", metavar="API")
    max_new_tokens: int = option(128, "Maximum length of an answer.", min=1)
    temperature: float = option(0.0, "Sampling temperature; 0 is greedy.")
    ignore_eos: bool = ignore_eos_option()
    stream: bool = option(
        True, "Request streams; without them, only the end of each answer is timed.", "--stream/--no-stream"
    )
    warm_up: int = option(1, "Requests before the first run, which are not timed.", min=0)
    timeout: float = option(600.0, "Seconds without an answer after which a request counts as an error.")
    ttft_ms: float | None = option(None, "Goodput counts answers whose first text arrives within this time.")
    tpot_ms: float | None = option(None, "Goodput counts answers with at most this time per token.")
    seed: int = option(0, "Random seed of the arrivals and the texts.")

    def settings(self) -> Settings:
        from windfall.bench.serving.workload import Settings

        clients = self.concurrency or (CONCURRENCY if self.rate is None else None)
        same = {f.name for f in dataclasses.fields(Settings)} & {f.name for f in dataclasses.fields(self)}
        return Settings(
            **{name: getattr(self, name) for name in same - {"concurrency"}},
            concurrency=() if clients is None else numbers(clients, "--concurrency", int, "1,8,32"),
            rates=() if self.rate is None else numbers(self.rate, "--rate", example="0.5,2"),
        )


def serve(
    options: LoadOptions,
    url: str = argument(..., "Address of the server, such as http://127.0.0.1:8000/v1."),
    model: str = option("", "Name of the model. Default: the first that the server lists.", metavar="NAME"),
    key_variable: str | None = option(
        None, f"Environment variable with the server's API key. Default: {KEY_VARIABLE}, if it is set.", metavar="NAME"
    ),
    out: Path | None = option(None, "Write the JSON to this file after every run."),
    json: bool = json_option(),
) -> None:
    """Run a load test of a server with the OpenAI API (windfall, vLLM, SGLang, …).

    It needs aiohttp, which the extra `serve` installs.
    """
    if find_spec("aiohttp") is None:
        raise InputError("the load test needs aiohttp; run: pip install windfall[serve]")
    from windfall.bench import provenance
    from windfall.bench.serving.client import Client
    from windfall.bench.serving.load import Result, measure

    settings, key = options.settings(), _key(key_variable)
    client = Client(url, key, settings.timeout)
    check_result_file(out, "bench serve", RESULT_KEYS)
    tasks = words(options.tasks, "--tasks")
    prompts = in_turns(load_tasks(tasks, options.limit))
    given = {"tasks": list(map(shorten, tasks)), "limit": options.limit, **dataclasses.asdict(settings)}
    result = Result(client.base, model, provenance.describe_client(prompts, command_line()), given)

    def save(found: Result) -> None:
        write_json(out, found.as_dict(), indent=1)

    def work() -> None:
        with console.progress("Load test", counts=True) as progress:
            asyncio.run(measure(result, client, prompts, settings, save, progress))

    interrupted = measuring.run(result, work, save, lambda report: None, show, json)
    if interrupted:
        raise typer.Exit(ON_INTERRUPT)
    if not result.answered:
        raise typer.Exit(FAILED)


def _key(variable: str | None) -> str | None:
    """The key of the server, which the command line must not show."""
    found = os.environ.get(variable or KEY_VARIABLE)
    if variable is not None and not found:
        raise InputError(f"the environment variable {variable} is not set")
    return found or None


# ---- what is printed


def show(report: dict[str, Any]) -> None:
    """Print a table with a row for each run, and what is to be said about them."""
    out, rows = console.stdout(), report["rows"]
    out.print(table(rows, f"{report['model']} on {report['server']}, times in ms"))
    for row in rows:
        if row["errors"]:
            kinds = ", ".join(f"{count} × {kind}" for kind, count in sorted(row["errors"].items()))
            failed = counted(sum(row["errors"].values()), "request")
            out.print(Wrapped(Text(f"{row['load']}: {failed} of {row['requests']} failed ({kinds})", style="red")))
        if not row["complete"]:
            out.print(Wrapped(Text(f"{row['load']}: stopped after {counted(row['requests'], 'request')}", "yellow")))
    if not all(row["tokens_counted"] for row in rows):
        note = "The server does not count tokens: each piece of a stream counts as one, which is too few"
        out.print(Wrapped(Text(note, style="yellow")))


def table(rows: list[dict[str, Any]], title: str) -> Figures:
    """The runs, each with its percentiles."""
    times = [(name, field) for name, field in (("TTFT", "ttft"), ("TPOT", "tpot"), ("total", "latency"))]
    heads = [f"{name} p{each}" for name, _ in times for each in (50, 90, 99)]
    columns = ("load", "requests", "errors", "tokens/s", "requests/s", *heads, "goodput/s", "accepted")
    least = ("accepted", "requests/s", "total p90", "TTFT p90", "TPOT p90", "total p99", "requests", "total p50")
    made = Figures(columns, title, least)
    for row in rows:
        parts = [
            figure((row[field] or {}).get(f"p{each}"), "{:.2f}" if field == "tpot" else "{:.0f}", 1000)
            for _, field in times
            for each in (50, 90, 99)
        ]
        made.add(
            row["load"],
            str(row["requests"]),
            str(sum(row["errors"].values())),
            figure(row["tokens_per_second"], "{:.1f}"),
            figure(row["requests_per_second"], "{:.2f}"),
            *parts,
            figure(row["goodput"], "{:.2f}"),
            figure(row["accepted_length"], "{:.2f}"),
        )
    return made
