"""The prompts of tasks: JSONL files, known datasets on the hub, and the built-in set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from windfall.core.errors import InputError
from windfall.prompts import files as prompt_files
from windfall.prompts.files import PromptLine

BUILTIN = "builtin"
HUB_ROWS = 80  # read from the start of a dataset, as many as in the papers


@dataclass(frozen=True)
class Prompt:
    """A conversation (the user's turns) or, with `raw`, one text to be continued."""

    task: str
    category: str
    id: str
    turns: tuple[str, ...]
    raw: bool = False


def load_tasks(names: Sequence[str], limit: int | None = None) -> list[Prompt]:
    """The prompts of these tasks, at most `limit` of each; a task is `builtin`, a JSONL file or a known dataset."""
    prompts = [prompt for name in dict.fromkeys(names) for prompt in _load(name, limit)]
    seen: set[tuple[str, str]] = set()
    for prompt in prompts:
        if (prompt.task, prompt.id) in seen:
            raise InputError(f"task {prompt.task} has two prompts with the id '{prompt.id}'; ids must differ")
        seen.add((prompt.task, prompt.id))
    return prompts if limit is None else limited(prompts, limit)


def limited(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """At most `limit` prompts of each task."""
    by_task: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_task[prompt.task].append(prompt)
    return [prompt for own in by_task.values() for prompt in spread(own, limit)]


def spread(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """`limit` of these prompts, chosen evenly from all categories; their order is kept."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, prompt in enumerate(prompts):
        places[prompt.category].append(place)
    turns = sorted((turn, place) for own in places.values() for turn, place in enumerate(own))
    return [prompts[place] for place in sorted(place for _, place in turns[:limit])]


def in_turns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first prompts of all tasks, then all second ones, so that a run that ends early has every task."""
    seen: dict[str, int] = defaultdict(int)
    places = []
    for prompt in prompts:
        places.append(seen[prompt.task])
        seen[prompt.task] += 1
    return [prompt for _, prompt in sorted(zip(places, prompts, strict=True), key=lambda pair: pair[0])]


def _load(name: str, limit: int | None) -> list[Prompt]:
    if name == BUILTIN:
        return builtin()
    if name in HUB:
        return _from_hub(name, limit)
    if name.endswith(".jsonl") or Path(name).is_file():
        return read_file(Path(name))
    raise InputError(f"there is no task '{name}'; give a JSONL file, {BUILTIN}, or one of {', '.join(HUB)}")


# ---- files


def builtin() -> list[Prompt]:
    """The sixty prompts of the package: ten each of chat, code, math, writing, summarization and question answering."""
    text = files("windfall.bench").joinpath("builtin.jsonl").read_text("utf-8")
    return [_prompt(asked, BUILTIN) for asked in prompt_files.parse_lines(text, BUILTIN)]


def read_file(file: Path) -> list[Prompt]:
    """The lines of a prompt file (`windfall.prompts.files`), with their own "task" or the file's name."""
    return [_prompt(asked, file.stem) for asked in prompt_files.read(file)]


def _prompt(line: PromptLine, task: str) -> Prompt:
    return Prompt(line.task or task, line.category, line.id, line.turns, line.raw)


# ---- the hub

Row = dict[str, Any]


class Source(NamedTuple):
    """A dataset on the hub, and how one of its rows becomes turns; `raw` rows are texts to be continued."""

    path: str
    split: str
    turns: Callable[[Row], list[str]]
    category: str = ""
    config: str | None = None
    file: str | None = None
    raw: bool = False


def _field(name: str, before: str = "") -> Callable[[Row], list[str]]:
    return lambda row: [before + row[name]]


def _turns_or_prompt(row: Row) -> list[str]:
    found = row.get("turns") or row["prompt"]
    return [found] if isinstance(found, str) else list(found)


def _alpaca(row: Row) -> list[str]:
    return ["\n\n".join(filter(None, (row["instruction"], row["input"])))]


def _spec_bench(file: str, category: str) -> Source:
    return Source("RedHatAI/speculator_benchmarks", "train", _turns_or_prompt, category, file=f"{file}.jsonl")


HUB = {
    "mt-bench": Source("HuggingFaceH4/mt_bench_prompts", "train", _turns_or_prompt),
    "humaneval": Source(
        "openai/openai_humaneval", "test", _field("prompt", "Complete this Python function.\n\n"), "code"
    ),
    "gsm8k": Source("openai/gsm8k", "test", _field("question"), "math", config="main"),
    "alpaca": Source("tatsu-lab/alpaca", "train", _alpaca, "instruction"),
    "cnn_dm": Source("abisee/cnn_dailymail", "test", _field("article", "Summarize: "), "summarization", config="3.0.0"),
    "natural-questions": Source("google-research-datasets/nq_open", "validation", _field("question"), "qa"),
    "wikitext-2": Source("Salesforce/wikitext", "test", _field("text"), config="wikitext-2-raw-v1", raw=True),
    "pg-19": Source("emozilla/pg19", "test", _field("text"), raw=True),
    "spec-bench-mt": _spec_bench("question", ""),
    "spec-bench-translation": _spec_bench("translation", "translation"),
    "spec-bench-summarization": _spec_bench("summarization", "summarization"),
    "spec-bench-qa": _spec_bench("qa", "qa"),
    "spec-bench-math": _spec_bench("math_reasoning", "math"),
    "spec-bench-rag": _spec_bench("rag", "rag"),
}


def _from_hub(name: str, limit: int | None) -> list[Prompt]:
    instead = f"or use --tasks FILE.jsonl or --tasks {BUILTIN}"
    try:
        from datasets import load_dataset
    except ImportError:
        raise InputError(
            f"task {name} comes from the hub, which takes: pip install 'windfall[hub]'; {instead}"
        ) from None
    source = HUB[name]
    more = {"data_files": source.file} if source.file else {}
    try:
        rows = load_dataset(source.path, source.config, split=source.split, streaming=True, **more)
        prompts = list(islice(as_prompts(name, source, rows), max(HUB_ROWS, limit or 0)))
    except Exception as error:
        from windfall.checkpoints.quiet_libs import first_line

        raise InputError(f"cannot get task {name} from the hub ({first_line(error)}); connect, {instead}") from error
    return prompts if limit is None else spread(prompts, limit)


def as_prompts(name: str, source: Source, rows: Iterable[Row]) -> Iterator[Prompt]:
    """The rows of a dataset as prompts; lines of WikiText are joined into articles."""
    rows = _articles(rows) if name == "wikitext-2" else rows
    for number, row in enumerate(rows):
        turns = tuple(source.turns(row))
        yield Prompt(name, str(row.get("category") or source.category), f"{name}/{number}", turns, source.raw)


def _articles(lines: Iterable[Row]) -> Iterator[Row]:
    """WikiText's lines up to the next title, ` = Title = `, as one text each."""
    article: list[str] = []
    for line in lines:
        text = line["text"].strip()
        if text.startswith("= ") and not text.startswith("= =") and article:
            yield {"text": "\n".join(article)}
            article = []
        article += [text] if text else []
    if article:
        yield {"text": "\n".join(article)}
