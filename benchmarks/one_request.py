"""One request at a time, with this version of windfall and an earlier one, in turns.

python benchmarks/one_request.py BEFORE [TASK…] [--methods none,beam,auto] [--rounds 2] [--json FILE]

BEFORE is the `src` folder of the earlier version, for example of a git worktree. Each version runs in a process of its
own, and the two take turns; tokens per second include prefill, and are the medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from provenance import publish

THIS = Path(__file__).resolve().parents[1] / "src"
TEMPERATURES = (0.0, 1.0)
Speeds = dict[tuple[str, float], list[float]]  # by method and temperature, of all rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="`src` folder of the earlier version")
    parser.add_argument("tasks", nargs="*", default=["builtin"], help="JSONL files with prompts, or builtin")
    for name in ("target", "drafter", "device", "dtype", "json"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--methods", default="none,beam,auto", help="policies")
    parser.add_argument("--limit", type=int, default=16, help="prompts of each task")
    parser.add_argument("--tokens", type=int, default=128, help="length of an answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)  # this process measures
    options = parser.parse_args()
    if options.run:
        print(json.dumps(measure(options, json.load(sys.stdin))))
    else:
        publish(compare(options), options.json)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    from windfall.bench.tasks import in_turns, load_tasks

    prompts = [prompt.turns[0] for prompt in in_turns(load_tasks(options.tasks, options.limit))]
    found: dict[Path, Speeds] = {options.before.resolve(): {}, THIS: {}}
    for turn in range(options.rounds):
        for folder, speeds in found.items():
            for method, temperature, speed in in_own_process(folder, prompts):
                speeds.setdefault((method, temperature), []).append(speed)
        print(f"round {turn + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    before, after = found.values()
    rows = [
        {
            "method": method,
            "temperature": temperature,
            "before": median(before[method, temperature]),
            "after": median(runs),
            "runs": {"before": before[method, temperature], "after": runs},
        }
        for (method, temperature), runs in after.items()
    ]
    settings = {name: getattr(options, name) for name in ("limit", "tokens", "rounds", "methods")}
    settings["tasks"] = [Path(task).name for task in options.tasks]
    return {"what": "one request, before and after", "settings": settings, "rows": rows}


def in_own_process(folder: Path, prompts: list[str]) -> list[tuple[str, float, float]]:
    """What `measure` returns with the version of windfall in this folder."""
    command = [sys.executable, __file__, *sys.argv[1:], "--run"]
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, input=json.dumps(prompts), stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        sys.exit(f"one_request.py: the version in '{folder}' fails; see the messages above")
    found: list[tuple[str, float, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(options: argparse.Namespace, prompts: list[str]) -> list[tuple[str, float, float]]:
    """Method, temperature and tokens per second. Uses only what all versions have."""
    import windfall

    found = []
    for method in options.methods.split(","):
        engine = windfall.load(options.target, options.drafter, method, device=options.device, dtype=options.dtype)
        for temperature in TEMPERATURES:
            for chosen in (prompts[: len(prompts) // 2], prompts):  # the first run warms up
                started, tokens = time.perf_counter(), 0
                for seed, prompt in enumerate(chosen):
                    sampling = {"max_new_tokens": options.tokens, "temperature": temperature, "seed": seed}
                    tokens += len(engine.generate([{"role": "user", "content": prompt}], **sampling).token_ids)
                seconds = time.perf_counter() - started
            found.append((method, temperature, tokens / seconds))
    return found


if __name__ == "__main__":
    main()
