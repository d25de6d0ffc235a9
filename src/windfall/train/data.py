"""Training data for draft heads: the target answers prompts, and the conversations are written as token shards."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError

from windfall.core import options
from windfall.core.files import make_folder, replace_text
from windfall.core.options import option
from windfall.core.types import InputError
from windfall.engine.as_completed import as_completed
from windfall.engine.engine import Engine
from windfall.engine.generation import Generation
from windfall.engine.request import Handle
from windfall.model.target import Target
from windfall.train import shards
from windfall.train.shards import FinishedPrompt, Sampling, Text
from windfall.train.sources import MIN_PASSAGE_CHARS, Source, hashed, read_sources, share

MIN_ANSWER_ROOM = 16  # tokens that a conversation must have left for an answer
LOOP_TOKENS = 8  # an n-gram of this length that occurs three times is a loop
MAX_USER_TOKENS = 256  # of a user turn that the target generates
ATTEMPTS_PER_SELF_PROMPT = 4
SENTINEL = "WINDFALLUSERTEXT"
SELF_PROMPTS_FILE = "self-prompts.jsonl"


@dataclass(frozen=True)
class Request:
    """A prompt to complete. The completion depends on these fields only."""

    key: int  # the caller's identifier
    prompt: list[int]
    max_new_tokens: int
    temperature: float
    seed: int
    eos: tuple[int, ...] | None = None  # tokens that end the text; None: the model's

    def submit(self, engine: Engine) -> Handle:
        """Let the engine complete the prompt."""
        names = ("max_new_tokens", "temperature", "seed", "eos")
        return engine.submit(self.prompt, **{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class Settings:
    """What the answers depend on, besides the target and the prompts."""

    max_new_tokens: int = option(256, "length of an answer", low=1)
    temperature: float = option(1.0, "of the sampled answers", low=0)
    greedy_share: float = option(0.5, "share of the answers that are greedy", low=0, high=1)
    held_out: float = option(0.02, "share of the prompts kept for validation", low=0, high=1)
    seed: int = option(0, "of the answers and of the order of prompts")
    max_length: int = option(2048, "tokens of a conversation", low=2 * MIN_ANSWER_ROOM)
    cut_loops: bool = option(False, "end an answer when an 8-gram occurs for the third time")
    shard: int = option(2000, "prompts per file", low=1)

    def __post_init__(self) -> None:
        options.check(self)

    def request(self, key: int, prompt: list[int], limit: int) -> Request:
        """The request for an answer, up to `limit` tokens of prompt and answer.

        Its temperature and seed depend on the prompt's key and the seed only.
        """
        greedy = share("greedy", self.seed, key) < self.greedy_share
        temperature, room = 0.0 if greedy else self.temperature, limit - len(prompt)
        return Request(key, prompt, min(self.max_new_tokens, room), temperature, hashed("noise", self.seed, key))

    def conversation_limit(self, target: Target) -> int:
        """The largest number of tokens of a conversation with this target."""
        return min(filter(None, (self.max_length, target.context)))


@dataclass(frozen=True)
class Progress:
    """The progress of `make_data`."""

    stage: str
    done: int
    total: int
    tokens: int  # generated since the start


Report = Callable[[Progress], None]


def make_data(
    engine: Engine,
    names: list[str],
    folder: Path,
    settings: Settings,
    *,
    self_prompts: int = 0,
    limit: int | None = None,
    resume: bool = False,
    pause_after: float | None = None,
    report: Report = lambda _: None,
    notify: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Let the engine's target answer these prompts and `self_prompts` of its own; return the metadata in `data.json`.

    The engine decodes `max_requests` texts at once. Its policy changes the speed, but not the answers. No prompt is
    begun after `pause_after` minutes; with `resume`, a later call answers the others.
    """
    begun = time.monotonic()
    target = engine.target
    if target.tokenizer is None:
        raise InputError(f"{target.name} has no tokenizer, so prompts cannot be encoded")
    if not names and not self_prompts:
        raise InputError("there are no prompts; name files or datasets, or use --self-prompts")
    metadata = _describe(target, settings)
    _check_folder(folder, metadata, resume)
    given = list(read_sources(names))
    prompts = {source.key: source for source in given}
    metadata["prompts"] = {"given": len(given), "duplicates": len(given) - len(prompts), "self": 0}
    chosen = sorted(prompts, key=lambda key: hashed("order", settings.seed, key))[:limit]
    if not chosen and not self_prompts:
        raise InputError(f"these files hold no prompts (a text to continue needs {MIN_PASSAGE_CHARS} characters)")
    make_folder(folder)
    if not (folder / shards.METADATA_FILE).exists():
        shards.write_metadata(folder, metadata)
    kept = {key: prompts[key] for key in chosen}
    if self_prompts:
        own = _self_prompts(engine, folder, settings, self_prompts, set(kept), report)
        metadata["prompts"]["self"] = len(own)
        kept |= {source.key: source for source in own}
        if len(own) < self_prompts:
            attempts = ATTEMPTS_PER_SELF_PROMPT * self_prompts
            notify(f"the target wrote {len(own)} different user turns in {attempts} attempts")
    if not kept:
        raise InputError(f"{target.name} wrote no complete user turn; give it prompts")
    metadata["prompts"]["kept"] = len(kept)
    metadata["prompts"]["sources"] = dict(Counter(source.origin for source in kept.values()))
    end = None if pause_after is None else begun + 60 * pause_after
    DataWriter(engine, folder, settings, metadata, report).answer(list(kept.values()), end)
    return metadata


def _describe(target: Target, settings: Settings) -> dict[str, Any]:
    import transformers

    from windfall import __version__

    versions = {"version": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {
        "windfall": versions,
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


def check_folder(folder: Path, resume: bool) -> None:
    """Refuse a folder whose data would be mixed with other data, or with other files; needs no model."""
    if (folder / shards.METADATA_FILE).exists():
        if not resume:
            raise InputError(f"'{folder}' holds data already; continue it with --resume, or choose another --out")
    elif resume and folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"'{folder}' is not empty and holds no {shards.METADATA_FILE}: no data to continue")


def _check_folder(folder: Path, metadata: dict[str, Any], resume: bool) -> None:
    """Refuse a folder that holds data of another target or other settings."""
    check_folder(folder, resume)
    if not (folder / shards.METADATA_FILE).exists():
        return
    before = shards.read_metadata(folder)
    for part in ("target", "settings"):
        for key, now in metadata[part].items():
            if (was := before.get(part, {}).get(key)) != now:
                raise InputError(f"'{folder}' was made with {key} = {was}, not {now}; choose another --out")


# ---- conversations


@dataclass
class Conversation:
    """A prompt that is being answered, turn by turn."""

    source: Source
    done: FinishedPrompt
    messages: list[dict[str, str]] = field(default_factory=list)
    text: Text = field(default_factory=lambda: Text([], []))  # the last of `done.texts`

    def next_request(self, target: Target, settings: Settings) -> Request | None:
        """The request for the next answer, or None at the end of the conversation."""
        chat = self.source.chat and bool(target.tokenizer.chat_template)
        turn = len(self.messages) // 2
        if turn == (len(self.source.turns) if chat else min(1, len(self.source.turns))):
            return None
        self.messages.append({"role": "user", "content": self.source.turns[turn]})
        prompt = _render(target, self.messages) if chat else list(target.tokenizer(self.source.turns[0]).input_ids)
        limit = settings.conversation_limit(target)
        if not 0 < len(prompt) <= limit - MIN_ANSWER_ROOM:
            self.done.counts["too_long"] += 1
            return None
        return settings.request(self.done.key, prompt, limit)

    def add(self, request: Request, answer: Generation, target: Target, settings: Settings) -> bool:
        """Add an answer; return whether the conversation can continue."""
        tokens, counts = answer.token_ids, self.done.counts
        content = target.tokenizer.decode(tokens, skip_special_tokens=True)
        if not content.strip():
            counts["empty"] += 1
            return False
        repeated, grams, loop = find_loop(tokens)
        cut = settings.cut_loops and loop is not None
        tokens = tokens[:loop] if cut else tokens
        self._append(request, tokens)
        counts.update(
            answers=1,
            answer_tokens=len(tokens),
            greedy=int(request.temperature == 0),
            stopped=int(answer.finish_reason == "stop" and not cut),
            loops=int(loop is not None),
            grams=grams,
            repeated=repeated,
        )
        self.messages.append({"role": "assistant", "content": content})
        return not cut

    def _append(self, request: Request, tokens: list[int]) -> None:
        """Extend the last text if the prompt begins with exactly its tokens; otherwise begin another text.

        All answers of a conversation have the same temperature and seed.
        """
        written, prompt = self.text.tokens, request.prompt
        if not written or prompt[: len(written)] != written:
            self.text = Text([], [], Sampling(request.temperature, request.seed))
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
    """The number of repeated 8-grams, the number of 8-grams, and where one first occurs for the third time."""
    seen: Counter[tuple[int, ...]] = Counter()
    repeated, loop = 0, None
    for end in range(LOOP_TOKENS, len(tokens) + 1):
        gram = tuple(tokens[end - LOOP_TOKENS : end])
        seen[gram] += 1
        repeated += seen[gram] > 1
        loop = end if loop is None and seen[gram] == 3 else loop
    return repeated, max(0, len(tokens) - LOOP_TOKENS + 1), loop


class DataWriter:
    """Has prompts answered and writes them block by block, so that a file's content does not depend on timing."""

    def __init__(self, engine: Engine, folder: Path, settings: Settings, metadata: dict[str, Any], report: Report):
        self.engine, self.target, self.folder = engine, engine.target, folder
        self.settings, self.metadata, self.report = settings, metadata, report
        files = shards.shard_files(folder, shards.TRAIN)
        written = [shards.Shard.read(file) for file in files]
        self.counts: Counter[str] = sum((Counter(json.loads(s.metadata["counts"])) for s in written), Counter())
        self.written = {key for shard in written for key in shard.prompts.tolist()}
        self.next_shard = max((int(file.stem[-5:]) + 1 for file in files), default=0)
        left = shards.read_unfinished(folder)
        self.finished = {key: done for key, done in left.items() if key not in self.written}
        self.unsaved = 0
        self.tokens = 0

    def answer(self, sources: list[Source], end: float | None = None) -> None:
        """Answer the prompts that have no answer yet; none is begun after `end`, a time of the monotonic clock."""
        self._write_metadata()
        waiting = [source for source in sources if source.key not in self.written]
        size = self.settings.shard
        blocks = deque([s.key for s in waiting[at : at + size]] for at in range(0, len(waiting), size))
        prior = len(sources) - len(waiting)
        try:
            left = takewhile(
                lambda _: end is None or time.monotonic() < end, (s for s in waiting if s.key not in self.finished)
            )
            with closing(self._conversations(left)) as answers:
                for _ in answers:
                    self._write_blocks(blocks)
                    done = len(sources) - sum(map(len, blocks)) + len(self.finished)
                    self.report(Progress("Answering", max(done, prior), len(sources), self.tokens))
            self._write_blocks(blocks)
        finally:
            if blocks:
                shards.write_unfinished(self.folder, list(self.finished.values()))
        if blocks:  # it was paused
            return
        (self.folder / shards.UNFINISHED_FILE).unlink(missing_ok=True)
        self.metadata["finished"] = True
        self._write_metadata()

    def _conversations(self, sources: Iterator[Source]) -> Generator[None, None, None]:
        """Keep the engine supplied with requests; yield after every answer."""
        queue: deque[Request] = deque()
        running: dict[int, Conversation] = {}

        def supply() -> None:
            while len(queue) < self.engine.max_requests and (source := next(sources, None)) is not None:
                held_out = share("held-out", source.key) < self.settings.held_out
                conversation = Conversation(source, FinishedPrompt(source.key, held_out))
                if (request := conversation.next_request(self.target, self.settings)) is None:
                    self._finish(conversation.done)
                else:
                    running[source.key] = conversation
                    queue.append(request)

        supply()
        with closing(as_completed(self.engine, queue, lambda request: request.submit(self.engine))) as answers:
            for request, answer in answers:
                conversation = running[request.key]
                self.tokens += len(answer.token_ids)
                goes_on = conversation.add(request, answer, self.target, self.settings)
                following = conversation.next_request(self.target, self.settings) if goes_on else None
                if following is None:
                    self._finish(running.pop(request.key).done)
                else:
                    queue.appendleft(following)
                supply()
                yield

    def _finish(self, done: FinishedPrompt) -> None:
        tokens = sum(len(text.tokens) for text in done.texts)
        done.counts.update(texts=len(done.texts), tokens=tokens, held_out=len(done.texts) * done.held_out)
        self.finished[done.key] = done
        self.unsaved += 1

    def _write_blocks(self, blocks: deque[list[int]]) -> None:
        """Write complete blocks in order, and from time to time the finished prompts of the others."""
        while blocks and all(key in self.finished for key in blocks[0]):
            block = [self.finished.pop(key) for key in blocks.popleft()]
            shards.write_shard(self.folder, self.next_shard, block)
            self.next_shard += 1
            self.counts += sum((done.counts for done in block), Counter())
            self._write_metadata()
        if self.unsaved >= self.settings.shard:
            shards.write_unfinished(self.folder, list(self.finished.values()))
            self.unsaved = 0

    def _write_metadata(self) -> None:
        counts = {key: count for key, count in sorted(self.counts.items()) if key not in ("grams", "repeated")}
        self.metadata["counts"] = counts
        self.metadata["repeated_share"] = round(self.counts["repeated"] / max(1, self.counts["grams"]), 4)
        shards.write_metadata(self.folder, self.metadata)


# ---- prompts that the target generates


def user_opening(target: Target) -> tuple[list[int], str]:
    """The tokens before a user's first words in this target's chat template, and the text after them."""
    if not target.tokenizer.chat_template:
        raise InputError(f"{target.name} has no chat template, which --self-prompts needs")
    rendered = _render(target, [{"role": "user", "content": SENTINEL}], tokenize=False, answer=False)
    before, found, after = rendered.partition(SENTINEL)
    ids = target.tokenizer(before.rstrip(" "), add_special_tokens=False).input_ids  # a space belongs to the next word
    if not found or not ids:
        raise InputError(f"the chat template of {target.name} has no place where a user's words begin")
    return list(ids), after


def _self_prompts(
    engine: Engine, folder: Path, settings: Settings, wanted: int, known: set[int], report: Report
) -> list[Source]:
    """Different user turns that the target generates after the opening of its chat template."""
    tried, target = _read_attempts(folder), engine.target
    opening, after = user_opening(target)
    room = settings.conversation_limit(target) - len(opening)
    if room < 1:
        raise InputError(f"the chat template of {target.name} takes {len(opening)} tokens; use a larger --max-length")
    temperature = settings.temperature or 1.0  # greedy turns would all be the same
    stops = _user_stop_tokens(target, after)
    found: dict[int, Source] = {}
    first, tokens, last = 0, 0, ATTEMPTS_PER_SELF_PROMPT * wanted
    while len(found) < wanted and first < last:
        attempts = range(first, min(first + wanted - len(found), last))
        queue = deque(
            Request(
                number, opening, min(MAX_USER_TOKENS, room), temperature, hashed("self", settings.seed, number), stops
            )
            for number in attempts
            if number not in tried
        )
        try:
            with closing(as_completed(engine, queue, lambda request: request.submit(engine))) as texts:
                for done, (request, text) in enumerate(texts, 1):
                    tried[request.key] = _user_turn(target, text, after)
                    tokens += len(text.token_ids)
                    report(Progress("Asking", len(found) + done, wanted, tokens))
                    if done % settings.shard == 0:
                        _write_attempts(folder, tried)
        finally:
            _write_attempts(folder, tried)
        for number in attempts:
            source = Source((tried[number] or "",), origin="self")
            if tried[number] and source.key not in known:
                found.setdefault(source.key, source)
        first = attempts.stop
    return list(found.values())


def _user_stop_tokens(target: Target, after: str) -> tuple[int, ...]:
    """The model's stop tokens, and the special token that follows a user's words in the template."""
    ids = target.tokenizer(after.strip(), add_special_tokens=False).input_ids[:1]
    special = {*target.tokenizer.all_special_ids, *target.tokenizer.added_tokens_decoder}
    return tuple({*target.eos, *(token for token in ids if token in special)})


def _user_turn(target: Target, generation: Generation, after: str) -> str | None:
    """The generated user turn, or None if it ends neither with a stop token nor with the template's next words."""
    text = target.tokenizer.decode(generation.token_ids, skip_special_tokens=True)
    closing = after.strip()
    words, closed, _ = text.partition(closing) if closing else (text, "", "")
    return (words.strip() or None) if closed or generation.finish_reason == "stop" else None


def _read_attempts(folder: Path) -> dict[int, str | None]:
    file = folder / SELF_PROMPTS_FILE
    if not file.is_file():
        return {}
    try:
        rows = [json.loads(line) for line in file.read_text("utf-8").split("\n") if line]
        return {row["attempt"]: row["text"] for row in rows}
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"'{file}' is damaged; remove it, and the target will generate prompts again") from None


def _write_attempts(folder: Path, tried: dict[int, str | None]) -> None:
    rows = (json.dumps({"attempt": number, "text": tried[number]}) for number in sorted(tried))
    replace_text(folder / SELF_PROMPTS_FILE, "\n".join(rows) + "\n")
