"""Token files: what was said and which of it the target wrote, in shards that appear whole or not at all."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from windfall.checkpoints.quiet_libs import first_line
from windfall.core.files import replace_file, replace_text
from windfall.core.types import InputError

ABOUT = "data.json"
UNFINISHED = "unfinished.safetensors"
TRAIN, HELD_OUT = "train", "held-out"
POOL = 4096  # texts that are sorted by length together


@dataclass
class Text:
    """A sequence of tokens; `answer` marks those that the target wrote."""

    tokens: list[int]
    answer: list[bool]


@dataclass
class Finished:
    """All that came of a prompt: usually one text, or none."""

    key: int
    held_out: bool
    texts: list[Text] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


# ---- writing


def write_shard(folder: Path, number: int, block: list[Finished]) -> None:
    """The prompts of a block: their held-out texts, then the others, whose file says that the block is there."""
    for split in (HELD_OUT, TRAIN):
        own = [done for done in block if done.held_out == (split == HELD_OUT)]
        prompts = torch.tensor([done.key for done in (block if split == TRAIN else own)], dtype=torch.long)
        told = {"counts": json.dumps(sum((done.counts for done in block), Counter()) if split == TRAIN else {})}
        _save(_shard(folder, split, number), {**_flat([t for d in own for t in d.texts]), "prompts": prompts}, told)


def write_unfinished(folder: Path, done: list[Finished]) -> None:
    """What is finished of blocks that are not, for another start."""
    told = [[each.key, each.held_out, len(each.texts), each.counts] for each in done]
    _save(folder / UNFINISHED, _flat([text for each in done for text in each.texts]), {"told": json.dumps(told)})


def read_unfinished(folder: Path) -> dict[int, Finished]:
    if not (folder / UNFINISHED).is_file():
        return {}
    shard = Shard.read(folder / UNFINISHED)
    texts = (Text(tokens.tolist(), answer.tolist()) for tokens, answer in map(shard.text, range(len(shard))))
    return {
        key: Finished(key, held_out, [next(texts) for _ in range(size)], Counter(counts))
        for key, held_out, size, counts in json.loads(shard.told["told"])
    }


def write_about(folder: Path, about: dict[str, Any]) -> None:
    replace_text(folder / ABOUT, json.dumps(about, indent=1, ensure_ascii=False) + "\n")


def read_about(folder: Path) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads((folder / ABOUT).read_text("utf-8"))
        int(about["target"]["vocab_size"])
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"'{folder}' has no {ABOUT}; make it with: windfall train data") from None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read '{folder / ABOUT}': {first_line(error)}") from error
    except (KeyError, TypeError):
        raise InputError(f"'{folder / ABOUT}' does not say who wrote the texts; make them again") from None
    return about


def shard_files(folder: Path, split: str) -> list[Path]:
    return sorted(folder.glob(f"{split}-[0-9][0-9][0-9][0-9][0-9].safetensors"))


def _shard(folder: Path, split: str, number: int) -> Path:
    return folder / f"{split}-{number:05}.safetensors"


def _flat(texts: list[Text]) -> dict[str, Tensor]:
    lengths = torch.tensor([0, *(len(text.tokens) for text in texts)])
    return {
        "tokens": torch.tensor([token for text in texts for token in text.tokens], dtype=torch.int32),
        "answer": torch.tensor([own for text in texts for own in text.answer], dtype=torch.uint8),
        "offsets": lengths.cumsum(0),
    }


def _save(file: Path, tensors: dict[str, Tensor], told: dict[str, str]) -> None:
    replace_file(file, lambda temporary: save_file(tensors, str(temporary), metadata=told))


# ---- reading


@dataclass(frozen=True)
class Shard:
    """A file's texts, back to back."""

    tokens: Tensor  # [T] int32
    answer: Tensor  # [T] uint8
    offsets: Tensor  # [n + 1] long
    prompts: Tensor  # [p] long: keys of all prompts of the block
    told: dict[str, str]

    @classmethod
    def read(cls, file: Path) -> Shard:
        try:
            with safe_open(str(file), framework="pt") as stored:
                names = set(stored.keys())
                tokens, answer, offsets = (stored.get_tensor(name) for name in ("tokens", "answer", "offsets"))
                prompts = stored.get_tensor("prompts") if "prompts" in names else torch.zeros(0, dtype=torch.long)
                return cls(tokens, answer, offsets, prompts, stored.metadata() or {})
        except Exception as error:  # safetensors has errors of its own
            raise InputError(f"'{file}' is damaged or incomplete: {first_line(error)}") from error

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def text(self, place: int) -> tuple[Tensor, Tensor]:
        start, end = self.offsets[place], self.offsets[place + 1]
        return self.tokens[start:end], self.answer[start:end].bool()


class Batch(NamedTuple):
    """Texts padded on the right with token 0."""

    tokens: Tensor  # [b, n] long
    answer: Tensor  # [b, n] bool: tokens that the target wrote
    lengths: Tensor | None = None  # [b] long, without padding


@dataclass(frozen=True)
class TokenData:
    """The texts of one split, by number; batches of them in an order that depends on seed and epoch alone."""

    shards: list[Shard]
    about: dict[str, Any]

    @classmethod
    def open(cls, folder: str | Path, split: str = TRAIN) -> TokenData:
        if split not in (TRAIN, HELD_OUT):
            raise InputError(f"a split is {TRAIN} or {HELD_OUT}, not '{split}'")
        about = read_about(Path(folder))
        data = cls([Shard.read(file) for file in shard_files(Path(folder), split)], about)
        if not len(data) and split == TRAIN:
            raise InputError(f"'{folder}' has no texts yet")
        return data

    @property
    def vocab_size(self) -> int:
        return int(self.about["target"]["vocab_size"])

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        """tokens [n] int32, answer [n] bool."""
        if not 0 <= place < len(self):
            raise IndexError(place)
        starts = np.cumsum([0, *map(len, self.shards)])
        which = bisect_right(starts.tolist(), place) - 1
        return self.shards[which].text(place - int(starts[which]))

    def plan(self, max_tokens: int, max_length: int, seed: int = 0, epoch: int = 0) -> list[list[int]]:
        """Which texts go together: similar lengths, about `max_tokens` with padding, all texts that have something to
        learn within `max_length`, in an order that is the same every time."""
        lengths = np.minimum(self._lengths(), max_length)
        useful = np.flatnonzero(self._answered(max_length))
        chance = np.random.Generator(np.random.PCG64([seed, epoch]))
        order, batches = chance.permutation(useful), []
        for start in range(0, len(order), POOL):
            pool = order[start : start + POOL]
            batches += _cut(pool[np.argsort(lengths[pool], kind="stable")].tolist(), lengths, max_tokens)
        return [batches[place] for place in chance.permutation(len(batches))]

    def batches(
        self, max_tokens: int, max_length: int, seed: int = 0, epoch: int = 0, start: int = 0
    ) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on; longer texts lose their end."""
        for places in self.plan(max_tokens, max_length, seed, epoch)[start:]:
            yield self._padded(places, max_length)

    def _padded(self, places: list[int], max_length: int) -> Batch:
        texts = [tuple(part[:max_length] for part in self[place]) for place in places]
        pad = torch.nn.utils.rnn.pad_sequence
        tokens = pad([tokens.long() for tokens, _ in texts], batch_first=True)
        answer = pad([answer for _, answer in texts], batch_first=True)
        return Batch(tokens, answer, torch.tensor([len(tokens) for tokens, _ in texts]))

    def _lengths(self) -> Any:
        return np.concatenate([np.zeros(0, np.int64), *(shard.offsets.diff().numpy() for shard in self.shards)])

    def _answered(self, max_length: int) -> Any:
        """[texts] bool: whether the target wrote any of a text's first tokens."""
        found = [np.zeros(0, bool)]
        for shard in self.shards:
            written = torch.cat([torch.zeros(1, dtype=torch.long), shard.answer.cumsum(0)])
            ends = torch.minimum(shard.offsets[1:], shard.offsets[:-1] + max_length)
            found.append((written[ends] > written[shard.offsets[:-1]]).numpy())
        return np.concatenate(found)


def _cut(places: list[int], lengths: Any, max_tokens: int) -> list[list[int]]:
    """Texts in order of length, cut into batches of at most `max_tokens` with padding (a longer text goes alone)."""
    batches: list[list[int]] = []
    for place in places:
        if batches and (len(batches[-1]) + 1) * lengths[place] <= max_tokens:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches


def token_counts(data: TokenData) -> Tensor:
    """How often the target wrote each token, [V] long."""
    counts = torch.zeros(data.vocab_size, dtype=torch.long)
    for shard in data.shards:
        counts += torch.bincount(shard.tokens[shard.answer.bool()].long(), minlength=data.vocab_size)
    return counts
