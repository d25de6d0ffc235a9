"""Start-up by part: how long `windfall` takes from the command to the first token on this machine.

python benchmarks/startup.py [--rounds 3] [--json FILE]

Whole commands run in processes of their own: `--help`, `generate` right after the conversion of the embedded model
(no cost profile yet), and `generate` with everything in the cache. Then one more process times the parts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from provenance import publish

GENERATE = ("generate", "Say hi.", "--max-new-tokens", "8")
PARTS = """
import json, time
times, last = {}, time.perf_counter()
def part(name):
    global last
    now = time.perf_counter()
    times[name], last = now - last, now
import gc
gc.disable()
import torch; part("import torch")
import transformers; part("import transformers")
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM; part("import transformers' models")
from windfall import loading
from windfall.checkpoints.find import load_model; part("import windfall")
loaded = load_model(None); part("read weights and tokenizer")
target = loading._checked(loaded); part("make the target")
from windfall.engine import Engine
gc.enable()
engine = Engine(target, loading.as_drafter("head"), loading.as_policy("auto")); part("load the draft head")
loading.attach_costs(engine, engine.policy); part("read the cost profile")
next(engine.stream("Say hi.", max_new_tokens=8)); part("prefill and first cycle")
print(json.dumps(times))
"""


def seconds_to_first_output(arguments: tuple[str, ...], environment: dict[str, str]) -> float:
    """From starting the command to the first byte on its standard output."""
    command = [sys.executable, "-u", "-m", "windfall.cli", *arguments]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as running:
        assert running.stdout is not None
        if not running.stdout.read(1):
            raise SystemExit(f"`windfall {' '.join(arguments)}` printed nothing")
        taken = time.perf_counter() - started
        running.stdout.read()
    return taken


def parts(environment: dict[str, str]) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", PARTS], capture_output=True, text=True, env=environment, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def convert(environment: dict[str, str]) -> float:
    """Convert the embedded model in a process of its own; the seconds that takes, imports included."""
    started = time.perf_counter()
    code = "from windfall.checkpoints.find import load_model; load_model(None)"
    subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "WINDFALL_CACHE": cache}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        rounds = range(options.rounds)
        seconds = {"convert the embedded model": [convert(environment)], "first token after the conversion": []}
        for _ in rounds:
            for profile in (Path(cache) / "profiles").glob("*"):
                profile.unlink()
            seconds["first token after the conversion"].append(seconds_to_first_output(GENERATE, environment))
        seconds["first token, warm cache"] = [seconds_to_first_output(GENERATE, environment) for _ in rounds]
        seconds["--help"] = [seconds_to_first_output(("--help",), environment) for _ in rounds]
        by_part = [parts(environment) for _ in rounds]
    found = {name: statistics.median(taken) for name, taken in seconds.items()}
    each = {name: statistics.median(taken[name] for taken in by_part) for name in by_part[0]}
    for name, taken in found.items():
        print(f"{name:36} {taken:7.2f} s")
    print("by part, warm cache:")
    for name, taken in each.items():
        print(f"  {name:34} {taken:7.2f} s")
    publish({"seconds": found, "parts": each, "rounds": options.rounds}, options.json)


if __name__ == "__main__":
    main()
