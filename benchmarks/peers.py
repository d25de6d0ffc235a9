"""Tokens per second beside transformers and vLLM, on the same prompts and machine.

python benchmarks/peers.py TASK… [--target MODEL] [--drafter HEAD] [--assistant MODEL] [--vllm FILE] [--json FILE]
python benchmarks/peers.py TASK… --write-prompts FILE

Every way runs in a process of its own: transformers' `generate`, assisted generation, prompt lookup and continuous
batching (`generate_batch`), and windfall's methods. With N requests at once, the next request begins when one ends;
`generate` takes batches of N. A round answers 3 N prompts, at least --alone and at most all of them. Its time includes
prefill. One round before the others does not count, and they end when they took three seconds together. vLLM needs
other libraries: --write-prompts writes the prompts as token ids, peers_vllm.py measures them, and --vllm takes over
what it wrote. What a way measured is kept in FILE.parts; with --resume, only ways without such a file run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from peers_vllm import hash_of, measured, repeated, size
from provenance import publish

import windfall
from windfall.bench.gpu_internals import forget_prefixes
from windfall.bench.hf_generate import hf_generate
from windfall.bench.runner import Case, NoDrafter, first_questions
from windfall.bench.tasks import in_turns, load_tasks
from windfall.bench.throughput.answers import Answer, Part
from windfall.bench.throughput.hf_loops import Unavailable, continuous_server, padded_server
from windfall.bench.throughput.serve import Serve, engine_server
from windfall.checkpoints.bundled import bundled_lm
from windfall.checkpoints.find import FULL, load_model
from windfall.engine.engine import Engine
from windfall.engine.loading import as_target
from windfall.model.target import Target
from windfall.policies.none import NoSpeculation

OURS, THEIRS = "windfall", "transformers"
THEIR_WAYS = ("generate", "assisted", "prompt lookup", "generate_batch")
LOOKUP_TOKENS = 10  # that prompt lookup drafts, as in transformers' documentation
SEED = 0
VERSIONS = {OURS: windfall.__version__, THEIRS: transformers.__version__}
COPIED = ("limit", "alone", "tokens", "temperature", "rounds", "ignore_eos")  # options that become settings
MODELS = ("drafter", "assistant")  # options that name models


def main() -> None:
    options = parsed()
    if options.way:
        Path(options.json).write_text(json.dumps(measure(options)), "utf-8")
    elif options.write_prompts:
        Path(options.write_prompts).write_text(json.dumps(prompts_of(options)), "utf-8")
    else:
        publish(everything(options), options.json)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", help="JSONL files with prompts, or builtin")
    for name in ("target", "drafter", "device", "dtype", "json"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--assistant", help="model for assisted generation; default: the bundled one of the target")
    parser.add_argument("--methods", default="none,beam,auto", help="policies of windfall")
    parser.add_argument("--theirs", default=",".join(THEIR_WAYS), help="ways of transformers")
    parser.add_argument("--requests", default="1,8,64", help="numbers of requests at once")
    parser.add_argument("--limit", type=int, default=40, help="prompts of each task")
    parser.add_argument("--alone", type=int, default=12, help="smallest number of prompts")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--rounds", type=int, default=5, help="at most; a way that takes long has fewer")
    parser.add_argument("--seconds", type=float, default=900, help="limit of each process")
    parser.add_argument("--vllm", metavar="FILE", action="append", default=[], help="what peers_vllm.py wrote")
    parser.add_argument("--resume", action="store_true", help="keep what is in FILE.parts")
    parser.add_argument("--write-prompts", metavar="FILE", help="only write the prompts, for peers_vllm.py")
    parser.add_argument("--way", help=argparse.SUPPRESS)  # what this process measures
    return parser.parse_args()


# ---- all processes


def everything(options: argparse.Namespace) -> dict[str, Any]:
    """What all ways measured, with their texts compared."""
    result: dict[str, Any] = {"rows": [], "skipped": []}
    ways = [(OURS, method) for method in options.methods.split(",")]
    ways += [(THEIRS, way) for way in filter(None, options.theirs.split(","))]
    for engine, way in ways:
        found = in_own_process(f"{engine}/{way}", options)
        result["rows"] += found.pop("rows", [])
        result["skipped"] += found.pop("skipped")
        result |= found
        print(f"{engine}, {way}: done", file=sys.stderr, flush=True)
    for file in options.vllm:
        add_vllm(result, file)
    compare_texts(result["rows"])
    models = {name: Path(given).name for name in MODELS if (given := getattr(options, name))}
    copied = {name: getattr(options, name) for name in COPIED}
    result["settings"] = {"tasks": [Path(task).name for task in options.tasks], **copied, **models}
    return result


def in_own_process(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """What `measure` returns in a process of its own; if that fails or takes too long, the reason."""
    folder = Path(f"{options.json or 'peers.json'}.parts")
    part = folder / f"{way.replace('/', '-').replace(' ', '-')}.json"
    if not (options.resume and part.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way, "--json", str(part)]
        try:
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=options.seconds)
            reason = (done.stderr.strip().splitlines() or [""])[-1]
        except subprocess.TimeoutExpired:
            reason = f"it took more than {options.seconds:g} s"
    if not part.exists():
        return {"skipped": [skip(way, None, reason)]}
    found: dict[str, Any] = json.loads(part.read_text("utf-8"))
    return found


def skip(way: str, requests: int | None, reason: str) -> dict[str, Any]:
    engine, _, name = way.partition("/")
    return {"engine": engine, "way": name, "requests": requests, "reason": reason}


def add_vllm(result: dict[str, Any], file: str) -> None:
    """Add the rows of vLLM, and where they were measured, if its prompts are the same."""
    found = json.loads(Path(file).read_text("utf-8"))
    if found["prompts"] != result.get("prompts"):
        sys.exit(f"peers.py: '{file}' was measured on other prompts or with other settings; write the prompts again")
    result["rows"] += found.pop("rows")
    result["skipped"] += found.pop("skipped")
    result["vllm"] = found


def compare_texts(rows: list[dict[str, Any]]) -> None:
    """Replace the hashes of texts by how many there are, and how many are those of windfall's plain decoding."""
    plain = {row["requests"]: row["texts"] for row in rows if (row["engine"], row["way"]) == (OURS, "none")}
    for row in rows:
        texts, wanted = row["texts"], plain.get(row["requests"])
        row["texts"] = len(texts)
        row["same_texts"] = None if wanted is None else sum(map(str.__eq__, texts, wanted))


# ---- one process


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The rows of one way, for all numbers of requests."""
    engine, _, way = options.way.partition("/")
    weights = None if engine == OURS else FULL  # transformers has no kernels for packed ones
    target = as_target(options.target, device=options.device, dtype=options.dtype, weights=weights)
    cases, counts = cases_of(options, target), [int(count) for count in options.requests.split(",")]
    ours = None
    if engine == OURS:
        ours = windfall.load(target, options.drafter, way, max_requests=max(counts))
        ours.prepare((options.temperature,))
    rows, skipped = [], []
    for count in counts:
        try:
            with server(options, target, ours, count) as serve:
                chosen = cases[: size(count, options.alone)]
                run(serve, chosen if ours else chosen[:count], count, ours)  # windfall captures graphs meanwhile
                runs = repeated(partial(run, serve, chosen, count, ours), span, options.rounds)
        except (Unavailable, torch.OutOfMemoryError) as error:
            skipped.append(skip(options.way, count, str(error).partition("\n")[0]))
            continue
        steps = sum(len(answer.parts) for answer in runs[-1]) if ours else 0
        row = {"engine": engine, "version": VERSIONS[engine], "way": way, "requests": count}
        row |= measured([(span(answers), [list(answer.tokens) for answer in answers]) for answers in runs])
        rows.append({**row, "tau": row["tokens"] / steps if steps else None})
    about = {"target": Path(target.name).name, "dtype": str(target.decoder.dtype).removeprefix("torch.")}
    prompts = asked(options, target, cases)["prompts"]
    return {"rows": rows, "skipped": skipped, **about, "device": target.device.type, "prompts": prompts}


def cases_of(options: argparse.Namespace, target: Target) -> list[Case]:
    """The prompts as token ids, those of all tasks in turn."""
    prompts = in_turns(load_tasks(options.tasks, options.limit))
    sampling: dict[str, Any] = {"max_new_tokens": options.tokens, "temperature": options.temperature}
    sampling["eos"] = () if options.ignore_eos else None
    return first_questions(prompts, Engine(target, NoDrafter(), NoSpeculation()), SEED, **sampling)


def prompts_of(options: argparse.Namespace) -> dict[str, Any]:
    """What peers_vllm.py needs to know."""
    target = as_target(options.target, device="cpu", weights=FULL)
    known = asked(options, target, cases_of(options, target))
    requests = [int(count) for count in options.requests.split(",")]
    return {**known, "model": target.model.name_or_path, "requests": requests, "rounds": options.rounds}


def asked(options: argparse.Namespace, target: Target, cases: list[Case]) -> dict[str, Any]:
    """What makes texts the same, and a hash of it."""
    known = {"ids": [case.ids for case in cases], "eos": [] if options.ignore_eos else list(target.eos)}
    known |= {name: getattr(options, name) for name in ("alone", "tokens", "temperature")}
    return {**known, "prompts": hash_of(known)}


@contextmanager
def server(options: argparse.Namespace, target: Target, ours: Engine | None, count: int) -> Iterator[Serve]:
    """Answers requests in the way of this process, `count` at once."""
    way, temperature = options.way.partition("/")[2], options.temperature
    if ours is not None:
        yield partial(one_by_one, alone(ours)) if count == 1 else engine_server(ours, temperature)
    elif way == "generate":
        yield partial(in_batches, padded_server(target, temperature))
    elif way == "generate_batch":
        with continuous_server(target, temperature, count) as serve:
            yield serve
    elif count > 1:
        raise Unavailable("it takes one request at once")
    else:
        helper = LOOKUP_TOKENS if way == "prompt lookup" else assistant(options, target)
        yield partial(one_by_one, partial(with_help, target, helper))


def run(serve: Serve, cases: list[Case], count: int, ours: Engine | None) -> list[Answer]:
    if ours is not None:
        forget_prefixes(ours)
    return serve(cases, count)


def span(answers: list[Answer]) -> float:
    """Seconds from the first request to the end of the last text."""
    return max(answer.ended for answer in answers) - min(answer.submitted for answer in answers)


def one_by_one(answer: Callable[[Case], Answer], cases: list[Case], count: int) -> list[Answer]:
    answers = []
    for case in cases:
        started = time.perf_counter()
        made = answer(case)
        answers.append(replace(made, submitted=started, ended=time.perf_counter()))
    return answers


def alone(engine: Engine) -> Callable[[Case], Answer]:
    """Answers a request as `Engine.generate` does."""

    def answer(case: Case) -> Answer:
        (made,) = engine.decode([case.ids], [case.params])
        return Answer(tuple(made.token_ids), 0, 0, tuple(Part(0, len(step.tokens)) for step in made.steps))

    return answer


def with_help(target: Target, helper: Any, case: Case) -> Answer:
    """Answers a request by transformers' `generate` with a model that assists it, or with prompt lookup."""
    (tokens,) = hf_generate(target, [case.ids], case.params, helper)
    return Answer(tuple(tokens), 0, 0)


def in_batches(serve: Serve, cases: list[Case], count: int) -> list[Answer]:
    return [answer for place in range(0, len(cases), count) for answer in serve(cases[place : place + count], count)]


def assistant(options: argparse.Namespace, target: Target) -> Any:
    """The model that assists transformers."""
    found = bundled_lm(target) if options.assistant is None else options.assistant
    if found is None:
        raise Unavailable("no assistant was given, and the target has no bundled one")
    return load_model(found, device=target.device, dtype=target.decoder.dtype, lender=target.model).model


if __name__ == "__main__":
    main()
