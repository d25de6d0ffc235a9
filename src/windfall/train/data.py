"""Prompts → conversations whose answers the target wrote itself: what draft heads learn from."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError

from windfall.core.files import make_folder, replace_text
from windfall.core.types import InputError
from windfall.model.target import Target
from windfall.train import shards
from windfall.train.bulk import Answer, BulkGenerator, Job, fitting
from windfall.train.shards import Batch, Finished, Text, TokenData, token_counts
from windfall.train.sources import LEAST, Source, hashed, read_sources, share

__all__ = ["Batch", "Progress", "Settings", "Source", "TokenData", "make_data", "read_sources", "token_counts"]

ROOM = 16  # tokens that an answer must have place for
GRAM = 8  # tokens whose return tells a loop
USER_TOKENS = 256  # of a user's turn that the target writes
ATTEMPTS = 4  # at a user's turn, for each one wanted
SENTINEL = "WINDFALLUSERTEXT"
SELF_PROMPTS = "self-prompts.jsonl"


@dataclass(frozen=True)
class Settings:
    """What the answers depend on, besides the target and the prompts."""

    max_new_tokens: int = 256
    temperature: float = 1.0
    greedy_share: float = 0.5
    held_out: float = 0.02
    seed: int = 0
    max_length: int = 2048  # tokens of a conversation
    cut_loops: bool = False
    shard: int = 2000  # prompts that go into a file together

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_new_tokens", 1, None),
            ("temperature", 0, None),
            ("greedy_share", 0, 1),
            ("held_out", 0, 1),
            ("max_length", 2 * ROOM, None),
            ("shard", 1, None),
        ):
            value = getattr(self, name)
            if value < low or (high is not None and value > high):
                wanted = f"at least {low}" if high is None else f"between {low} and {high}"
                raise InputError(f"{name} must be {wanted}, not {value}")

    def job(self, key: int, prompt: list[int]) -> Job:
        """Greedy or sampled, and with which noise, is a matter of the prompt alone."""
        greedy = share("greedy", self.seed, key) < self.greedy_share
        return Job(
            key, prompt, self.max_new_tokens, 0.0 if greedy else self.temperature, hashed("noise", self.seed, key)
        )


@dataclass(frozen=True)
class Progress:
    """How far it is."""

    stage: str
    done: int
    total: int
    tokens: int  # written since this start


Report = Callable[[Progress], None]


def make_data(
    target: Target,
    names: list[str],
    folder: Path,
    settings: Settings,
    *,
    self_prompts: int = 0,
    limit: int | None = None,
    batch: int | None = None,
    resume: bool = False,
    report: Report = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Let the target answer these prompts (and `self_prompts` of its own); returns what `data.json` tells."""
    if target.tokenizer is None:
        raise InputError(f"{target.name} has no tokenizer, without which prompts cannot be read")
    if not names and not self_prompts:
        raise InputError("there are no prompts; name files or datasets, or ask for --self-prompts")
    about = _describe(target, settings)
    _check_folder(folder, about, resume)
    given = list(read_sources(names))
    prompts = {source.key: source for source in given}
    about["prompts"] = {"given": len(given), "duplicates": len(given) - len(prompts), "self": 0}
    chosen = sorted(prompts, key=lambda key: hashed("order", settings.seed, key))[:limit]
    if not chosen and not self_prompts:
        raise InputError(f"these files hold no prompts (texts to go on with need {LEAST} characters)")
    mill = _mill(target, settings, batch, max(len(chosen), self_prompts), say)
    make_folder(folder)
    if not (folder / shards.ABOUT).exists():
        shards.write_about(folder, about)
    kept = {key: prompts[key] for key in chosen}
    if self_prompts:
        own = _self_prompts(mill, folder, settings, self_prompts, set(kept), report)
        about["prompts"]["self"] = len(own)
        kept |= {source.key: source for source in own}
        if len(own) < self_prompts:
            say(f"the target wrote {len(own)} different user turns in {ATTEMPTS * self_prompts} attempts")
    if not kept:
        raise InputError(f"{target.name} wrote no user turn that ends; give it prompts")
    about["prompts"]["kept"] = len(kept)
    about["prompts"]["sources"] = dict(Counter(source.origin for source in kept.values()))
    Scribe(mill, folder, settings, about, report).answer(list(kept.values()))
    return about


def _describe(target: Target, settings: Settings) -> dict[str, Any]:
    return {
        "windfall": _versions(),
        "target": {
            "name": target.name,
            "vocab_size": target.vocab_size,
            "dtype": str(target.decoder.dtype).removeprefix("torch."),
            "eos": list(target.eos),
        },
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else target.device.type,
        "settings": dataclasses.asdict(settings),
        "date": time.strftime("%Y-%m-%d"),
        "finished": False,
    }


def _check_folder(folder: Path, about: dict[str, Any], resume: bool) -> None:
    """Refuse a folder that holds something else."""
    if not (folder / shards.ABOUT).exists():
        return
    if not resume:
        raise InputError(f"'{folder}' holds data already; go on with --resume, or choose another --out")
    before = shards.read_about(folder)
    for part in ("target", "settings"):
        for key, now in about[part].items():
            if (was := before.get(part, {}).get(key)) != now:
                raise InputError(f"'{folder}' was made with {key} = {was}, not {now}; choose another --out")


def _versions() -> dict[str, str]:
    import transformers

    from windfall import __version__

    return {"version": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def _mill(
    target: Target, settings: Settings, batch: int | None, jobs: int, say: Callable[[str], None]
) -> BulkGenerator:
    capacity = min(filter(None, (settings.max_length, target.context)))
    slots = max(1, min(batch or fitting(target, capacity), jobs))
    try:
        return BulkGenerator(target, slots, capacity, say)
    except torch.OutOfMemoryError:
        raise InputError(
            f"{slots} texts of {capacity} tokens at once do not fit on {target.device}; "
            "take a smaller --batch or --max-length"
        ) from None


# ---- conversations


@dataclass
class Conversation:
    """A prompt being answered, turn by turn."""

    source: Source
    done: Finished
    messages: list[dict[str, str]] = field(default_factory=list)
    text: Text = field(default_factory=lambda: Text([], []))  # the last of `done.texts`, while it grows

    def ask(self, target: Target, settings: Settings) -> Job | None:
        """The next turn, or None at the end."""
        chat = self.source.chat and bool(target.tokenizer.chat_template)
        turn = len(self.messages) // 2
        if turn == (len(self.source.turns) if chat else min(1, len(self.source.turns))):
            return None
        self.messages.append({"role": "user", "content": self.source.turns[turn]})
        prompt = _render(target, self.messages) if chat else list(target.tokenizer(self.source.turns[0]).input_ids)
        limit = min(filter(None, (settings.max_length, target.context))) - ROOM
        if not 0 < len(prompt) <= limit:
            self.done.counts["too_long"] += 1
            return None
        return settings.job(self.done.key, prompt)

    def hear(self, answer: Answer, target: Target, settings: Settings) -> bool:
        """Take an answer down; returns whether the conversation can go on."""
        tokens, counts = answer.tokens, self.done.counts
        said = target.tokenizer.decode(tokens, skip_special_tokens=True)
        if not said.strip():
            counts["empty"] += 1
            return False
        repeated, grams, loop = find_loop(tokens)
        looping = settings.cut_loops and loop is not None
        tokens = tokens[:loop] if looping else tokens
        self._write(answer.job.prompt, tokens)
        counts.update(
            answers=1,
            answer_tokens=len(tokens),
            greedy=int(answer.job.temperature == 0),
            stopped=int(answer.finish == "stop" and not looping),
            loops=int(loop is not None),
            grams=grams,
            repeated=repeated,
        )
        self.messages.append({"role": "assistant", "content": said})
        return not looping

    def _write(self, prompt: list[int], tokens: list[int]) -> None:
        """Go on with the last text if the prompt does, to the token; otherwise begin another."""
        written = self.text.tokens
        if not written or prompt[: len(written)] != written:
            self.text = Text([], [])
            self.done.texts.append(self.text)
        self.text.answer += [False] * (len(prompt) - len(self.text.tokens)) + [True] * len(tokens)
        self.text.tokens = prompt + tokens


def _render(target: Target, messages: list[dict[str, str]], tokenize: bool = True, answer: bool = True) -> Any:
    try:
        return target.tokenizer.apply_chat_template(
            messages, add_generation_prompt=answer, tokenize=tokenize, return_dict=False
        )
    except TemplateError as error:
        raise InputError(f"the chat template of {target.name} refuses these messages: {error}") from None


def find_loop(tokens: list[int]) -> tuple[int, int, int | None]:
    """How many of a text's 8-grams came before, how many there are, and where one has come for the third time."""
    seen: Counter[tuple[int, ...]] = Counter()
    repeated, loop = 0, None
    for end in range(GRAM, len(tokens) + 1):
        gram = tuple(tokens[end - GRAM : end])
        seen[gram] += 1
        repeated += seen[gram] > 1
        loop = end if loop is None and seen[gram] == 3 else loop
    return repeated, max(0, len(tokens) - GRAM + 1), loop


class Scribe:
    """Has prompts answered and writes them down, block by block in their order: what a block holds does not depend on
    when it was made."""

    def __init__(self, mill: BulkGenerator, folder: Path, settings: Settings, about: dict[str, Any], report: Report):
        self.mill, self.target, self.folder = mill, mill.target, folder
        self.settings, self.about, self.report = settings, about, report
        files = shards.shard_files(folder, shards.TRAIN)
        written = [shards.Shard.read(file) for file in files]
        self.counts: Counter[str] = sum((Counter(json.loads(s.told["counts"])) for s in written), Counter())
        self.written = {key for shard in written for key in shard.prompts.tolist()}
        self.number = max((int(file.stem[-5:]) + 1 for file in files), default=0)  # of the next shard
        left = shards.read_unfinished(folder)
        self.finished = {key: done for key, done in left.items() if key not in self.written}
        self.unsaved = 0
        self.tokens = 0

    def answer(self, sources: list[Source]) -> None:
        """Everything that was not answered before."""
        self._tell()
        waiting = [source for source in sources if source.key not in self.written]
        size = self.settings.shard
        blocks = deque([s.key for s in waiting[at : at + size]] for at in range(0, len(waiting), size))
        prior = len(sources) - len(waiting)
        try:
            for _ in self._conversations(source for source in waiting if source.key not in self.finished):
                self._write_blocks(blocks)
                done = len(sources) - sum(map(len, blocks)) + len(self.finished)
                self.report(Progress("Answering", max(done, prior), len(sources), self.tokens))
            self._write_blocks(blocks)
        finally:
            if blocks:
                shards.write_unfinished(self.folder, list(self.finished.values()))
        (self.folder / shards.UNFINISHED).unlink(missing_ok=True)
        self.about["finished"] = True
        self._tell()

    def _conversations(self, sources: Iterator[Source]) -> Iterator[None]:
        """Keep the mill supplied; yields after every answer."""
        queue: deque[Job] = deque()
        open_ones: dict[int, Conversation] = {}

        def supply() -> None:
            while len(queue) < 2 * self.mill.batch and (source := next(sources, None)) is not None:
                held_out = share("held-out", source.key) < self.settings.held_out
                conversation = Conversation(source, Finished(source.key, held_out))
                if (job := conversation.ask(self.target, self.settings)) is None:
                    self._finish(conversation.done)
                else:
                    open_ones[source.key] = conversation
                    queue.append(job)

        supply()
        for answer in self.mill.run(queue):
            conversation = open_ones[answer.job.key]
            self.tokens += len(answer.tokens)
            goes_on = conversation.hear(answer, self.target, self.settings)
            job = conversation.ask(self.target, self.settings) if goes_on else None
            if job is None:
                self._finish(open_ones.pop(answer.job.key).done)
            else:
                queue.appendleft(job)
            supply()
            yield

    def _finish(self, done: Finished) -> None:
        tokens = sum(len(text.tokens) for text in done.texts)
        done.counts.update(texts=len(done.texts), tokens=tokens, held_out=len(done.texts) * done.held_out)
        self.finished[done.key] = done
        self.unsaved += 1

    def _write_blocks(self, blocks: deque[list[int]]) -> None:
        """Write the blocks that are complete, in order; and now and then what else there is."""
        while blocks and all(key in self.finished for key in blocks[0]):
            block = [self.finished.pop(key) for key in blocks.popleft()]
            shards.write_shard(self.folder, self.number, block)
            self.number += 1
            self.counts += sum((done.counts for done in block), Counter())
            self._tell()
        if self.unsaved >= self.settings.shard:
            shards.write_unfinished(self.folder, list(self.finished.values()))
            self.unsaved = 0

    def _tell(self) -> None:
        counts = {key: count for key, count in sorted(self.counts.items()) if key not in ("grams", "repeated")}
        self.about["counts"] = counts
        self.about["repeated_share"] = round(self.counts["repeated"] / max(1, self.counts["grams"]), 4)
        shards.write_about(self.folder, self.about)


# ---- prompts by the target


def user_opening(target: Target) -> tuple[list[int], str]:
    """The tokens before a user's first words in this target's chat template, and the text after them."""
    if not target.tokenizer.chat_template:
        raise InputError(f"{target.name} has no chat template, from which --self-prompts begin")
    rendered = _render(target, [{"role": "user", "content": SENTINEL}], tokenize=False, answer=False)
    before, found, after = rendered.partition(SENTINEL)
    ids = target.tokenizer(before.rstrip(" "), add_special_tokens=False).input_ids  # a space belongs to the next word
    if not found or not ids:
        raise InputError(f"the chat template of {target.name} has no place where a user's words begin")
    return list(ids), after


def _self_prompts(
    mill: BulkGenerator, folder: Path, settings: Settings, wanted: int, known: set[int], report: Report
) -> list[Source]:
    """User turns that the target writes from the bare chat template: different ones, in order of their attempts."""
    tried = _read_attempts(folder)
    opening, after = user_opening(mill.target)
    found: dict[int, Source] = {}
    first, tokens = 0, 0
    while len(found) < wanted and first < ATTEMPTS * wanted:
        attempts = range(first, min(first + wanted - len(found), ATTEMPTS * wanted))
        queue = deque(_attempt(settings, number, opening) for number in attempts if number not in tried)
        for done, answer in enumerate(mill.run(queue, _user_ends(mill.target, after)), 1):
            tried[answer.job.key] = _user_words(mill.target, answer, after)
            tokens += len(answer.tokens)
            report(Progress("Asking", len(found) + done, wanted, tokens))
            if done % settings.shard == 0:
                _write_attempts(folder, tried)
        _write_attempts(folder, tried)
        for number in attempts:
            source = Source((tried[number] or "",), origin="self")
            if tried[number] and source.key not in known:
                found.setdefault(source.key, source)
        first = attempts.stop
    return list(found.values())


def _attempt(settings: Settings, number: int, opening: list[int]) -> Job:
    temperature = settings.temperature or 1.0  # greedy turns would all be the same
    return Job(number, opening, USER_TOKENS, temperature, hashed("self", settings.seed, number))


def _user_ends(target: Target, after: str) -> tuple[int, ...]:
    """The model's own ends, and the special token that follows a user's words."""
    ids = target.tokenizer(after.strip(), add_special_tokens=False).input_ids[:1]
    special = {*target.tokenizer.all_special_ids, *target.tokenizer.added_tokens_decoder}
    return tuple({*target.eos, *(token for token in ids if token in special)})


def _user_words(target: Target, answer: Answer, after: str) -> str | None:
    """What a user said, or None if it has no end: neither a token that ends it nor the template's words after it."""
    said = target.tokenizer.decode(answer.tokens, skip_special_tokens=True)
    closing = after.strip()
    words, closed, _ = said.partition(closing) if closing else (said, "", "")
    return (words.strip() or None) if closed or answer.finish == "stop" else None


def _read_attempts(folder: Path) -> dict[int, str | None]:
    file = folder / SELF_PROMPTS
    if not file.is_file():
        return {}
    try:
        rows = [json.loads(line) for line in file.read_text("utf-8").split("\n") if line]
        return {row["attempt"]: row["text"] for row in rows}
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"'{file}' is damaged; remove it, and the target will ask again") from None


def _write_attempts(folder: Path, tried: dict[int, str | None]) -> None:
    rows = (json.dumps({"attempt": number, "text": tried[number]}) for number in sorted(tried))
    replace_text(folder / SELF_PROMPTS, "\n".join(rows) + "\n")
