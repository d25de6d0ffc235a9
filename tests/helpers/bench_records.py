"""Made-up records of benchmark runs, in the format that `windfall bench run` writes: for testing what reads them."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

METHODS = {  # label: drafter, policy, chance that a drafted level is accepted, depth, rows
    "none": ("ngram", "none", 0.0, 0, 1),
    "beam": ("ngram", "beam", 0.70, 6, 60),
    "salf": ("ngram", "salf", 0.68, 5, 48),
    "talon": ("ngram", "talon", 0.72, 7, 60),
}
TASKS = {"math": "reasoning", "code": "code", "story": "writing"}
SETTINGS = {"tasks": list(TASKS), "max_new_tokens": 64, "temperatures": [0.0, 1.0], "repeats": 2}
PROVENANCE = {
    "command": "windfall bench run --out made-up",
    "machine": "made-up machine, 2 threads",
    "gpu": None,
    "versions": {"windfall": "0"},
    "date": "2026-01-01T00:00:00+00:00",
}


def write_run(
    folder: Path,
    methods: dict[str, tuple[str, str, float, int, int]] = METHODS,
    tasks: dict[str, str] = TASKS,
    temperatures: tuple[float, ...] = (0.0, 1.0),
    texts: int = 6,
    repeats: int = 2,
    wrong: str | None = None,
) -> Path:
    """A run whose figures look like those of a real one; the texts of method `wrong` differ."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(
        json.dumps({"settings": {**SETTINGS, "methods": list(methods)}, "provenance": PROVENANCE}), "utf-8"
    )
    lines = [
        json.dumps(record(label, *about, task, category, text, temperature, repeat, label == wrong))
        for temperature in temperatures
        for repeat in range(repeats)
        for task, category in tasks.items()
        for text in range(texts)
        for label, about in methods.items()
    ]
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    return folder


def record(
    label: str,
    drafter: str,
    policy: str,
    chance: float,
    depth: int,
    rows: int,
    task: str,
    category: str,
    text: int,
    temperature: float,
    repeat: int,
    wrong: bool = False,
) -> dict[str, Any]:
    hardness = random.Random(f"{task}{text}").uniform(-0.2, 0.2)
    luck = random.Random(f"{label}{task}{text}{temperature}{repeat}")
    own = max(chance + hardness - 0.15 * temperature, 0.05)
    return {
        "method": label,
        "drafter": drafter,
        "policy": policy,
        "settings": {"depth": depth, "base_depth": depth},
        "task": task,
        "category": category,
        "id": f"{task}-{text}",
        "temperature": temperature,
        "repeat": repeat,
        "seed": text,
        "coupled": True,
        "turns": [turn(luck, own, depth, rows, f"{task}-{text}-{temperature}-{number}", wrong) for number in (0, 1)],
        "repeated": 0.1,
        "peak_memory": None,
    }


def turn(luck: random.Random, chance: float, depth: int, rows: int, name: str, wrong: bool) -> dict[str, Any]:
    committed: list[int] = []
    nodes: Counter[tuple[int, ...]] = Counter()  # by depth, rank, layer rank, and which of the three counts
    deepest = [max(1, round(depth * luck.uniform(0.5, 1))) if depth else 0 for _ in range(64)]
    while sum(committed) < 64:
        accepted = 0
        while accepted < deepest[len(committed)] and luck.random() < chance:
            accepted += 1
        for *place, verified, judged, found in cycle_nodes(luck, deepest[len(committed)], accepted):
            nodes.update({(*place, 0): verified, (*place, 1): judged, (*place, 2): found})
        committed.append(min(accepted + 1, 64 - sum(committed)))
    cycles = len(committed)
    passes = deepest[:cycles]
    split = {
        "draft": 0.002 * sum(passes),
        "verify": cycles * (0.02 + 0.0001 * rows),
        "policy": 0.0004 * sum(passes),
        "other": 0.0005 * cycles,
    }
    seconds = sum(split.values()) * luck.uniform(1.0, 1.05) + 0.03
    return {
        "prompt_tokens": 40,
        "tokens": 64,
        "digest": name + ("-wrong" if wrong else ""),
        "finish": "length",
        "seconds": seconds,
        "ttft": 0.05,
        "prefill": 0.03,
        "split": split,
        "committed": committed,
        "accepted": [each - 1 for each in committed],
        "rows": [rows] * cycles,
        "drafted": [rows - 1] * cycles,
        "passes": passes,
        "depth": passes,
        "nodes": [[*place, *(nodes[(*place, n)] for n in range(3))] for place in sorted({each[:3] for each in nodes})],
    }


def cycle_nodes(luck: random.Random, depth: int, accepted: int) -> list[list[int]]:
    """[depth, rank, layer rank, verified, judged, accepted] of three nodes a level."""
    made = []
    for level in range(1, depth + 1):
        lucky = 0 if luck.random() < 0.8 else luck.randrange(1, 3)
        for rank in range(3):
            judged = level <= accepted + 1
            made.append([level, rank, rank, 1, int(judged), int(level <= accepted and rank == lucky)])
    return made
