"""Training texts on disk: token shards that are written atomically, and batches read from them."""

from __future__ import annotations

import json
import math
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
from torch.nn.utils.rnn import pad_sequence

from windfall.checkpoints.quiet_libs import first_line
from windfall.core.files import replace_file, replace_text
from windfall.core.types import InputError
from windfall.train.batch import Batch

METADATA_FILE = "data.json"
UNFINISHED_FILE = "unfinished.safetensors"
TRAIN, HELD_OUT = "train", "held-out"
SORTED_TEXTS = 4096  # texts that are sorted by length together


class Sampling(NamedTuple):
    """How the answers of a text were drawn: `argmax(log p / temperature + gumbel(seed, position))`."""

    temperature: float | None  # 0: greedy; None: not recorded
    seed: int | None  # of the noise of all its answers


UNKNOWN = Sampling(None, None)


@dataclass
class Text:
    """A sequence of tokens; `answer` marks the tokens that the target generated."""

    tokens: list[int]
    answer: list[bool]
    sampling: Sampling = UNKNOWN


@dataclass
class FinishedPrompt:
    """The texts that a prompt led to (usually one), and counts for the metadata."""

    key: int
    held_out: bool
    texts: list[Text] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


# ---- writing


def write_shard(folder: Path, number: int, block: list[FinishedPrompt]) -> None:
    """Write a block of prompts: held-out texts first, then training texts, whose file marks the block as complete."""
    for split in (HELD_OUT, TRAIN):
        own = [done for done in block if done.held_out == (split == HELD_OUT)]
        prompts = torch.tensor([done.key for done in (block if split == TRAIN else own)], dtype=torch.long)
        counts = sum((done.counts for done in block), Counter()) if split == TRAIN else {}
        tensors = {**_flat([text for done in own for text in done.texts]), "prompts": prompts}
        _save(folder / f"{split}-{number:05}.safetensors", tensors, {"counts": json.dumps(counts)})


def write_unfinished(folder: Path, done: list[FinishedPrompt]) -> None:
    """Write the finished prompts of incomplete blocks, from which a resumed run continues."""
    rows = [[each.key, each.held_out, len(each.texts), each.counts] for each in done]
    texts = _flat([text for each in done for text in each.texts])
    _save(folder / UNFINISHED_FILE, texts, {"told": json.dumps(rows)})


def read_unfinished(folder: Path) -> dict[int, FinishedPrompt]:
    if not (folder / UNFINISHED_FILE).is_file():
        return {}
    shard = Shard.read(folder / UNFINISHED_FILE)
    stored = ((*shard.text(index), shard.sampling(index)) for index in range(len(shard)))
    texts = (Text(tokens.tolist(), answer.tolist(), sampling) for tokens, answer, sampling in stored)
    return {
        key: FinishedPrompt(key, held_out, [next(texts) for _ in range(size)], Counter(counts))
        for key, held_out, size, counts in json.loads(shard.metadata["told"])
    }


def write_metadata(folder: Path, metadata: dict[str, Any]) -> None:
    replace_text(folder / METADATA_FILE, json.dumps(metadata, indent=1, ensure_ascii=False) + "\n")


def read_metadata(folder: Path) -> dict[str, Any]:
    file = folder / METADATA_FILE
    try:
        metadata: dict[str, Any] = json.loads(file.read_text("utf-8"))
        int(metadata["target"]["vocab_size"])
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"'{folder}' has no {METADATA_FILE}; make it with: windfall train data") from None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read '{file}': {first_line(error)}") from error
    except (KeyError, TypeError):
        raise InputError(f"'{file}' does not name the target of the texts; make them again") from None
    return metadata


def shard_files(folder: Path, split: str) -> list[Path]:
    return sorted(folder.glob(f"{split}-[0-9][0-9][0-9][0-9][0-9].safetensors"))


def _flat(texts: list[Text]) -> dict[str, Tensor]:
    lengths = torch.tensor([0, *(len(text.tokens) for text in texts)])
    return {
        "tokens": torch.tensor([token for text in texts for token in text.tokens], dtype=torch.int32),
        "answer": torch.tensor([own for text in texts for own in text.answer], dtype=torch.uint8),
        "offsets": lengths.cumsum(0),
        **_sampling_tensors([text.sampling for text in texts]),
    }


def _sampling_tensors(known: list[Sampling]) -> dict[str, Tensor]:
    """Of each text: the temperature, nan if it is not recorded, and the seed, then -1."""
    temperatures = [math.nan if each.temperature is None else each.temperature for each in known]
    seeds = [-1 if each.seed is None else each.seed for each in known]
    return {
        "temperatures": torch.tensor(temperatures, dtype=torch.float64),
        "seeds": torch.tensor(seeds, dtype=torch.long),
    }


def _save(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    replace_file(file, lambda temporary: save_file(tensors, str(temporary), metadata=metadata))


# ---- reading


@dataclass(frozen=True)
class Shard:
    """The texts of one file, back to back."""

    tokens: Tensor  # [T] int32
    answer: Tensor  # [T] uint8
    offsets: Tensor  # [n + 1] long
    prompts: Tensor  # [p] long: keys of all prompts of the block
    metadata: dict[str, str]
    temperatures: Tensor  # [n] float64: 0 for greedy texts, nan if it is not recorded
    seeds: Tensor  # [n] long: of the noise of the draws, -1 if it is not recorded

    @classmethod
    def read(cls, file: Path) -> Shard:
        try:
            with safe_open(str(file), framework="pt") as stored:
                names = set(stored.keys())
                tokens, answer, offsets = (stored.get_tensor(name) for name in ("tokens", "answer", "offsets"))
                prompts = stored.get_tensor("prompts") if "prompts" in names else torch.zeros(0, dtype=torch.long)
                texts = len(offsets) - 1
                sampling = _sampling_tensors([UNKNOWN] * texts)  # of files of earlier versions
                sampling = {name: stored.get_tensor(name) if name in names else own for name, own in sampling.items()}
                return cls(tokens, answer, offsets, prompts, stored.metadata() or {}, **sampling)
        except Exception as error:  # safetensors has its own error classes
            raise InputError(f"'{file}' is damaged or incomplete: {first_line(error)}") from error

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def text(self, index: int) -> tuple[Tensor, Tensor]:
        start, end = self.offsets[index : index + 2].tolist()
        return self.tokens[start:end], self.answer[start:end].bool()

    def sampling(self, index: int) -> Sampling:
        temperature, seed = float(self.temperatures[index]), int(self.seeds[index])
        return Sampling(None if math.isnan(temperature) else temperature, None if seed < 0 else seed)


@dataclass(frozen=True)
class TokenData:
    """The texts of one split. The order of batches depends on seed and epoch only."""

    shards: list[Shard]
    metadata: dict[str, Any]

    @classmethod
    def open(cls, folder: str | Path, split: str = TRAIN) -> TokenData:
        if split not in (TRAIN, HELD_OUT):
            raise InputError(f"a split is {TRAIN} or {HELD_OUT}, not '{split}'")
        metadata = read_metadata(Path(folder))
        data = cls([Shard.read(file) for file in shard_files(Path(folder), split)], metadata)
        if not len(data) and split == TRAIN:
            raise InputError(f"'{folder}' has no texts yet")
        return data

    @property
    def vocab_size(self) -> int:
        return int(self.metadata["target"]["vocab_size"])

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """tokens [n] int32, answer [n] bool."""
        shard, place = self._find(index)
        return shard.text(place)

    def sampling(self, index: int) -> Sampling:
        """How the answers of this text were drawn."""
        shard, place = self._find(index)
        return shard.sampling(place)

    def _find(self, index: int) -> tuple[Shard, int]:
        for shard in self.shards:
            if 0 <= index < len(shard):
                return shard, index
            index -= len(shard)
        raise IndexError

    def plan(self, max_tokens: int, max_length: int, seed: int = 0, epoch: int = 0) -> list[list[int]]:
        """The text indices of each batch of an epoch.

        A batch has texts of similar length and about `max_tokens` tokens with padding. Texts without an answer token
        in their first `max_length` tokens are left out.
        """
        lengths = np.minimum(self._lengths(), max_length)
        useful = np.flatnonzero(self._has_answer(max_length))
        random = np.random.Generator(np.random.PCG64([seed, epoch]))
        order, batches = random.permutation(useful), []
        for start in range(0, len(order), SORTED_TEXTS):
            pool = order[start : start + SORTED_TEXTS]
            batches += _cut(pool[np.argsort(lengths[pool], kind="stable")].tolist(), lengths, max_tokens)
        return [batches[index] for index in random.permutation(len(batches))]

    def batches(self, max_tokens: int, max_length: int, seed: int = 0, epoch: int = 0) -> Iterator[Batch]:
        """The batches of an epoch; texts are cut at `max_length`."""
        for indices in self.plan(max_tokens, max_length, seed, epoch):
            yield self.padded(indices, max_length)

    def padded(self, indices: list[int], max_length: int) -> Batch:
        """The batch of these texts."""
        found = [self._find(index) for index in indices]
        texts = [tuple(part[:max_length] for part in shard.text(place)) for shard, place in found]
        tokens, answer = (pad_sequence(list(parts), batch_first=True) for parts in zip(*texts, strict=True))
        temperatures = torch.stack([shard.temperatures[place] for shard, place in found])
        lengths = torch.tensor([len(tokens) for tokens, _ in texts])
        return Batch(tokens.long(), answer, lengths, temperatures.float())

    def _lengths(self) -> Any:
        return np.concatenate([np.zeros(0, np.int64), *(shard.offsets.diff().numpy() for shard in self.shards)])

    def _has_answer(self, max_length: int) -> Any:
        """[texts] bool: whether the first `max_length` tokens of a text contain an answer token."""
        found = [np.zeros(0, bool)]
        for shard in self.shards:
            counts = torch.cat([torch.zeros(1, dtype=torch.long), shard.answer.cumsum(0)])
            ends = torch.minimum(shard.offsets[1:], shard.offsets[:-1] + max_length)
            found.append((counts[ends] > counts[shard.offsets[:-1]]).numpy())
        return np.concatenate(found)


def _cut(indices: list[int], lengths: Any, max_tokens: int) -> list[list[int]]:
    """Cut texts, sorted by length, into batches of at most `max_tokens` with padding; a longer text is a batch."""
    batches: list[list[int]] = []
    for index in indices:
        if batches and (len(batches[-1]) + 1) * lengths[index] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def token_counts(data: TokenData) -> Tensor:
    """How many times the target generated each token, [V] long."""
    counts = torch.zeros(data.vocab_size, dtype=torch.long)
    for shard in data.shards:
        counts += torch.bincount(shard.tokens[shard.answer.bool()].long(), minlength=data.vocab_size)
    return counts
