"""Tokens per second of vLLM on the prompts of benchmarks/peers.py. It needs vLLM and the standard library only.

python benchmarks/peers_vllm.py PROMPTS.json [--model FOLDER] [--head FOLDER] [--settings plain,ngram-3] --json FILE

PROMPTS.json is written by `peers.py --write-prompts`, and --head is a draft head that `windfall export` wrote. A
setting is plain, ngram-N or eagle3-N, which draft N tokens. Each runs in a process of its own. The processes load at
the same time, because that takes vLLM a minute, and measure one after the other. The next request begins when one ends.
peers.py takes the result with --vllm, also several, for example of different settings.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
ENGINE = "vLLM"
HASH_DIGITS = 12
SPARE_TOKENS = 64  # of the longest text, for drafts
ENOUGH_SECONDS = 3  # after which a measurement is not repeated
START_MEMORY = 0.1  # share of the GPU's memory that must be free at the start
OFFLINE = {  # vLLM looks for a network otherwise
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # an optional package; greedy texts do not need it
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
}

T = TypeVar("T")
Run = tuple[float, list[list[int]]]  # its seconds, and its texts as token ids in the order of the prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help="what `peers.py --write-prompts` wrote")
    parser.add_argument("--model", help="folder of the target; default: the one that peers.py used")
    parser.add_argument("--head", help="folder of an EAGLE-3 head, from `windfall export`")
    parser.add_argument("--settings", default="plain,ngram-3,ngram-5,eagle3-3,eagle3-5")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-memory", type=float, default=8, metavar="GB", help="of the KV cache of each process")
    parser.add_argument("--lock", metavar="FILE", help="measure only while no other process has locked this file")
    parser.add_argument("--seconds", type=float, default=600, help="limit of each process")
    parser.add_argument("--json", required=True)
    parser.add_argument("--setting", help=argparse.SUPPRESS)  # what this process measures
    options = parser.parse_args()
    asked = json.loads(options.prompts.read_text("utf-8"))
    result = measure(options, asked) if options.setting else everything(options, asked)
    Path(options.json).write_text(json.dumps(result, indent=2) + "\n", "utf-8")


def hash_of(value: Any) -> str:
    """A hash of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:HASH_DIGITS]


def size(count: int, least: int) -> int:
    """The number of prompts of a round with this many requests at once."""
    return max(3 * count, least)


def repeated(run: Callable[[], T], seconds: Callable[[T], float], rounds: int) -> list[T]:
    """Measure up to `rounds` times, until that took ENOUGH_SECONDS. No garbage is collected while a run is timed."""
    runs: list[T] = []
    while not runs or (len(runs) < rounds and sum(map(seconds, runs)) < ENOUGH_SECONDS):
        gc.disable()
        try:
            runs.append(run())
        finally:
            gc.enable()
    return runs


def measured(runs: list[Run]) -> dict[str, Any]:
    """The figures of runs."""
    counts = [sum(map(len, texts)) for _, texts in runs]
    return {
        "tokens_per_second": median(tokens / seconds for tokens, (seconds, _) in zip(counts, runs, strict=True)),
        "tokens": counts[-1],
        "seconds": median(seconds for seconds, _ in runs),
        "rounds": len(runs),
        "texts": [hash_of(text) for text in runs[-1][1]],
    }


# ---- all processes


def everything(options: argparse.Namespace, asked: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {"rows": [], "skipped": [], "prompts": asked["prompts"]}
    settings = options.settings.split(",")
    with ThreadPoolExecutor(len(settings)) as threads, tempfile.NamedTemporaryFile() as own_lock:
        lock = options.lock or own_lock.name
        for found in threads.map(lambda setting: in_own_process(setting, lock, options), settings):
            result["rows"] += found.pop("rows", [])
            result["skipped"] += found.pop("skipped", [])
            result |= found
    return {**result, "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}


def in_own_process(setting: str, lock: str, options: argparse.Namespace) -> dict[str, Any]:
    """What `measure` returns in a process of its own; if that fails or takes too long, the reason."""
    if setting.startswith("eagle3") and not options.head:
        return failed(setting, "no head was given")
    with tempfile.TemporaryDirectory() as folder:
        part, log = Path(folder) / "part.json", Path(folder) / "log"
        command = [sys.executable, __file__, *sys.argv[1:], "--setting", setting, "--lock", lock, "--json", str(part)]
        environment = {**OFFLINE, "VLLM_CACHE_ROOT": folder, **os.environ}
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        try:
            process.wait(options.seconds)
        except subprocess.TimeoutExpired:
            return failed(setting, f"it took more than {options.seconds:g} s")
        finally:
            end_group(process)
        print(f"{setting}: done", file=sys.stderr, flush=True)
        if part.exists():
            found: dict[str, Any] = json.loads(part.read_text("utf-8"))
            return found
        lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]  # the first one is the cause
        return failed(setting, (errors or lines[-1:] or ["it ended without a message"])[0])


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and vLLM's own processes, which belong to its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def failed(setting: str, reason: str) -> dict[str, Any]:
    return {"skipped": [{"engine": ENGINE, "way": setting, "requests": None, "reason": reason}]}


# ---- one process


def measure(options: argparse.Namespace, asked: dict[str, Any]) -> dict[str, Any]:
    """The rows of one setting, for all numbers of requests."""
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform
    from vllm.sampling_params import RequestOutputKind

    engine = LLM(
        model=options.model or asked["model"],
        dtype=options.dtype,
        max_model_len=max(map(len, asked["ids"])) + asked["tokens"] + SPARE_TOKENS,
        max_num_seqs=max(asked["requests"]),
        gpu_memory_utilization=START_MEMORY,
        kv_cache_memory_bytes=int(options.kv_memory * 1e9),
        enable_prefix_caching=False,
        seed=0,
        **speculation(options.setting, options.head),
    ).llm_engine
    params = SamplingParams(
        temperature=asked["temperature"],
        max_tokens=asked["tokens"],
        ignore_eos=True,  # the model's own, which may be fewer than windfall's
        stop_token_ids=asked["eos"],
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    version, names = importlib.metadata.version("vllm"), itertools.count()
    rows = []
    with locked(options.lock):
        for count in asked["requests"]:
            chosen = asked["ids"][: size(count, asked["alone"])]
            answer = partial(run, engine, chosen, params, count, names)
            answer()  # vLLM captures graphs
            runs = repeated(answer, itemgetter(0), asked["rounds"])
            row = {"engine": ENGINE, "version": version, "way": options.setting, "requests": count}
            rows.append({**row, **measured(runs), "tau": None})
    versions = {name: importlib.metadata.version(name) for name in ("vllm", "torch", "transformers")}
    machine = {"architecture": platform.machine(), "cpu": processor(), "cores": os.cpu_count()}
    return {"rows": rows, "versions": versions, "machine": machine, "gpu": current_platform.get_device_name()}


@contextmanager
def locked(file: str) -> Iterator[None]:
    """Wait until no other process holds this lock, and hold it."""
    with open(file, "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def speculation(setting: str, head: str | None) -> dict[str, Any]:
    """The arguments of LLM for a setting."""
    method, _, tokens = setting.partition("-")
    if method == "plain":
        return {}
    config = NGRAM if method == "ngram" else {"method": "eagle3", "model": head}
    return {"speculative_config": {**config, "num_speculative_tokens": int(tokens)}}


def run(engine: Any, prompts: list[list[int]], params: Any, count: int, names: Any) -> Run:
    """Answer all prompts, `count` at once."""
    waiting, places, texts = deque(enumerate(prompts)), {}, {}
    started = time.perf_counter()
    while waiting or len(texts) < len(prompts):
        while waiting and len(places) - len(texts) < count:
            place, ids = waiting.popleft()
            name = f"request-{next(names)}"
            engine.add_request(name, {"prompt_token_ids": ids}, params)
            places[name] = place
        for output in engine.step():
            if output.finished:
                texts[places[output.request_id]] = list(output.outputs[0].token_ids)
    return time.perf_counter() - started, [texts[place] for place in range(len(prompts))]


def processor() -> str:
    """The name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "an unknown CPU"


if __name__ == "__main__":
    main()
